"""Defects planted in the router, one each: an exploration that does not find them proves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from kvloop_connector.lifecycle import Event, State
from kvloop_router import proof, release, reuse, scope
from kvloop_router.kept import Kept
from kvloop_router.store import MemoryStore

Plant = Callable[[pytest.MonkeyPatch], None]


def _nothing_is_proven(patch: pytest.MonkeyPatch) -> None:
    def all_of_it(_: Any, prompt: Any, *, block_size: int, remote_num_tokens: int, **__: Any) -> int:
        return min(remote_num_tokens, len(prompt)) // block_size * block_size

    patch.setattr(proof, "reusable_tokens", all_of_it)


def _take_is_not_atomic(patch: pytest.MonkeyPatch) -> None:
    async def take(store: Any, ident: str) -> int | None:
        entry = store._entries.get(ident)
        free = entry is not None and entry.lease.state is State.ISSUED
        await asyncio.sleep(0.01)
        store._apply(ident, Event.TAKE)
        return entry.lease.grants if free else None

    patch.setattr(MemoryStore, "take", take)


def _tenant_is_not_bound(patch: pytest.MonkeyPatch) -> None:
    whole = scope.scope
    patch.setattr(scope, "scope", lambda secret, tenant, *rest, **more: whole(secret, b"", *rest, **more))


def _model_is_not_bound(patch: pytest.MonkeyPatch) -> None:
    whole = scope.scope
    patch.setattr(
        scope, "scope", lambda secret, tenant, model, *rest, **more: whole(secret, tenant, "any", *rest, **more)
    )


def _restart_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    async def notice(*_: Any) -> None:
        pass

    patch.setattr(reuse.Reuse, "_notice_restart", notice)


def _time_is_not_over(patch: pytest.MonkeyPatch) -> None:
    put = MemoryStore.put

    async def for_ever(store: MemoryStore, kept: Kept, **more: Any) -> Any:
        return await put(store, replace(kept, deadline=kept.deadline + 1e6), **more)

    patch.setattr(MemoryStore, "put", for_ever)


def _nothing_is_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(release.Releases, "add", lambda *_: None)


def _handle_is_used_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reuse.Option, "handle", property(lambda option: option.kept.handle))


DEFECTS: Final[Mapping[str, Plant]] = {
    "the proof is skipped": _nothing_is_proven,
    "a handle is not trimmed to what is proven": _handle_is_used_whole,
    "two can take one handle": _take_is_not_atomic,
    "the tenant is not bound": _tenant_is_not_bound,
    "the model is not bound": _model_is_not_bound,
    "another engine id is not noticed": _restart_is_not_noticed,
    "the time of a handle is not over": _time_is_not_over,
    "what is given up is not released": _nothing_is_released,
}
"""What a router does wrong."""
