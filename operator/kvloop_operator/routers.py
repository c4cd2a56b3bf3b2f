"""Asking the routers' admin ports what runs on which engine, and between which engines KV was seen to move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from kvloop_operator import names
from kvloop_operator.live import Object
from kvloop_operator.reports import InvalidReport, Reports, RouterReport, parse_report

_ANSWER_SECONDS: Final = 5.0


class Routers:
    """Clients of the admin API. ``clock``: Unix seconds."""

    def __init__(self, session: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
        self._session = session
        self._clock = clock

    async def ask(self, pods: Sequence[Object], token: str) -> Reports:
        """What the routers in ``pods`` say. One that does not answer, or not with a report, is among the failures."""
        answers = await asyncio.gather(*(self._ask(pod, token) for pod in pods))
        named = zip((pod["metadata"]["name"] for pod in pods), answers, strict=True)
        return Reports(
            routers=len(pods),
            answered=tuple(answer for answer in answers if isinstance(answer, RouterReport)),
            failures={name: answer for name, answer in named if isinstance(answer, str)},
        )

    async def _ask(self, pod: Object, token: str) -> RouterReport | str:
        name, address = pod["metadata"]["name"], pod.get("status", {}).get("podIP", "")
        host = f"[{address}]" if ":" in address else address
        root = f"http://{host}:{names.ADMIN_PORT}/admin/v1"
        try:
            engines, pairs = await self._get(f"{root}/engines", token), await self._get(f"{root}/pairs", token)
            return parse_report(name, engines, pairs, self._clock())
        except aiohttp.ClientResponseError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                return f"{name} refuses the token in its Secret, which it read when it started; delete the pod"
            return f"{name}: status {error.status} from its admin port; see its log"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"no answer from its admin port ({type(error).__name__})"
            return f"{name}: {why}; let the operator reach it through network policies"
        except (InvalidReport, ValueError) as error:
            return f"{name}: {error}"

    async def _get(self, url: str, token: str) -> Any:
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        async with self._session.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=limit) as answer:
            answer.raise_for_status()
            return await answer.json()
