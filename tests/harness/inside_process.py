"""A client of engines and routers that runs in the node's network: one process, orders in, answers out.

Orders and answers are lines of JSON on standard input and output. An order has an ``id`` and a ``do``; its answers have
the same ``id``, and the last of them says ``end``. It ends with its input. ``tests.harness.inside`` speaks with it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

_REQUEST_SECONDS: Final = 120.0
_CONNECT_SECONDS: Final = 10.0
_CHAT: Final = "/v1/chat/completions"
_TURNS: Final = 5
_THINKING_SECONDS: Final = (0.2, 0.6)
_WORDS: Final = ("river", "stone", "lamp", "cloud", "seven", "paper", "green", "walk", "under", "clock", "salt", "door")


class Client:
    """Carries out orders."""

    def __init__(self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        self._session = session
        self._tasks = tasks
        self._loads: dict[int, asyncio.Event] = {}

    def order(self, order: Mapping[str, Any]) -> None:
        """Begin to carry out an order."""
        match order["do"]:
            case "request":
                self._tasks.create_task(self._request(order))
            case "load":
                self._loads[order["id"]] = asyncio.Event()
                self._tasks.create_task(self._load(order))
            case "stop":
                self._loads.pop(order["load"]).set()

    async def _request(self, order: Mapping[str, Any]) -> None:
        answer = await self._ask(order["method"], order["url"], order["body"], order["headers"], told=order["id"])
        _say(order["id"], end=True, **answer)

    async def _ask(
        self, method: str, url: str, body: Any, headers: Mapping[str, str] | None = None, *, told: int | None = None
    ) -> dict[str, Any]:
        """A whole answer, with Unix seconds of its beginning and end; ``error`` where it does not come to its end.

        told: the order whose giver is told at once that the answer has begun.
        """
        limits = aiohttp.ClientTimeout(total=_REQUEST_SECONDS, sock_connect=_CONNECT_SECONDS)
        answer: dict[str, Any] = {"status": 0, "headers": {}, "text": "", "error": ""}
        pieces: list[bytes] = []
        try:
            async with self._session.request(method, url, json=body, headers=headers, timeout=limits) as response:
                answer |= {"status": response.status, "headers": dict(response.headers)}
                while piece := await response.content.readany():
                    if not pieces:
                        answer["began"] = time.time()
                        if told is not None:
                            _say(told, **answer)
                    pieces.append(piece)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        return {**answer, "text": b"".join(pieces).decode("utf-8", "replace"), "ended": time.time()}

    async def _load(self, order: Mapping[str, Any]) -> None:
        """Conversations side by side until it is told to stop; gives every turn that was played."""
        stop, turns = self._loads[order["id"]], list[dict[str, Any]]()
        async with asyncio.TaskGroup() as group:
            for number in range(order["conversations"]):
                group.create_task(self._converse(order, stop, turns, random.Random(number)))
        _say(order["id"], end=True, turns=turns)

    async def _converse(
        self, order: Mapping[str, Any], stop: asyncio.Event, turns: list[dict[str, Any]], chance: random.Random
    ) -> None:
        """One conversation after the other, each turn of them streamed or not."""
        while not stop.is_set():
            messages: list[dict[str, str]] = []
            for number in range(_TURNS):
                messages.append({"role": "user", "content": " ".join(chance.choices(_WORDS, k=100))})
                body = {"model": order["model"], "messages": messages, "max_tokens": 24}
                turn = await self._turn(order["url"], body, stream=chance.random() < 0.5)
                last = number + 1 == _TURNS or stop.is_set() or bool(turn["fault"])
                if last and not turn["fault"]:
                    # A salt of its own finds no handle: this is what the text is without any reuse.
                    alone = {**body, "cache_salt": f"{chance.getrandbits(64):x}"}
                    turn["cold"] = await self._turn(order["url"], alone, stream=False)
                turns.append(turn)
                if last:
                    break
                messages.append({"role": "assistant", "content": turn["text"]})
                await asyncio.sleep(chance.uniform(*_THINKING_SECONDS))

    async def _turn(self, url: str, body: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
        answer = await self._ask("POST", url + _CHAT, {**body, "stream": stream})
        text, fault = "", answer["error"]
        if not fault and answer["status"] != 200:
            fault = f"status {answer['status']}: {answer['text'][:500]}"
        if not fault:
            text, fault = _streamed(answer["text"]) if stream else _whole(answer["text"])
        told = {name.lower(): value for name, value in answer["headers"].items()}
        return {
            "text": text,
            "fault": fault,
            "streamed": stream,
            "ended": answer["ended"],
            **{name: told.get(f"x-kvloop-{name}", "") for name in ("path", "reason", "prefill", "decode")},
        }


def _whole(text: str) -> tuple[str, str]:
    """The text of an answer, and what is wrong with the answer."""
    choice = json.loads(text)["choices"][0]
    return choice["message"]["content"], _ending(choice["finish_reason"])


def _streamed(text: str) -> tuple[str, str]:
    payloads = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if payloads[-1:] != ["[DONE]"]:
        return "", "the stream has no end"
    choices = [choice for payload in payloads[:-1] for choice in json.loads(payload)["choices"]]
    endings = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return "".join(choice["delta"].get("content") or "" for choice in choices), _ending(*endings)


def _ending(*reasons: str) -> str:
    return "" if reasons in (("stop",), ("length",)) else f"it ended by {reasons}"


def _say(order: int, **answer: Any) -> None:
    print(json.dumps({"id": order, **answer}), flush=True)


async def main() -> None:
    """Until the end of standard input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        client = Client(session, tasks)
        while line := await reader.readline():
            client.order(json.loads(line))
        # Nobody hears what is still on its way.
        raise SystemExit


if __name__ == "__main__":
    asyncio.run(main())
