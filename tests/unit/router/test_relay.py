"""What the relay learns from a stream, and when it lets go of a byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvloop_router import relay
from kvloop_router.errors import EngineFailed, StreamBroken
from kvloop_router.relay import ClientGone, Ended
from tests.unit.router.kept_handles import Clock

ROLE = {"index": 0, "delta": {"role": "assistant", "content": ""}}
TEXT = {"index": 0, "delta": {"content": "fine"}, "token_ids": [1, 2]}
END = {"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [3]}
DONE = b"data: [DONE]\n\n"


def event(*choices: Any, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": list(choices), **more}).encode() + b"\n\n"


class Reads:
    """An engine's stream that comes in these reads."""

    engine = "decode-0"
    status = 200
    content_type = "text/event-stream"

    def __init__(self, *reads: bytes) -> None:
        self._reads = [*reads, b""]

    async def read(self) -> bytes:
        return self._reads.pop(0)

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        while self._reads[0] and take(self._reads[0]):
            self._reads.pop(0)

    @property
    def over(self) -> bool:
        return self._reads == [b""]

    def unread(self) -> bytes:
        unread, self._reads = b"".join(self._reads), [b""]
        return unread


class Client:
    """A client that takes ``seconds`` for each write."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        self.started = False
        self.ended = False
        self.writes: list[bytes] = []
        self._clock = clock
        self._seconds = seconds

    async def start(self, status: int, content_type: str) -> None:
        self.started = True

    async def write(self, data: bytes) -> None:
        self.writes.append(data)
        self._clock.now += self._seconds

    def write_now(self, data: bytes) -> bool:
        if not self._seconds:
            self.writes.append(data)
        return not self._seconds

    async def comment(self, data: bytes) -> None:
        self.writes.append(data)

    async def end(self, data: bytes = b"") -> None:
        if data:
            await self.write(data)
        self.ended = True


async def relayed(reads: Reads, client: Client, clock: Clock, told: list[Ended]) -> Ended:
    async def finished(ended: Ended) -> None:
        if ended.handle is not None:
            assert not any(b'"finish_reason": "stop"' in write for write in client.writes)
        assert not any(DONE in write for write in client.writes)
        told.append(ended)

    upstream: Any = reads
    return await relay.stream(upstream, client, keep_token_ids=False, finished=finished, clock=clock)


async def test_a_stream_tells_its_handle_and_tokens_before_its_end_goes_out() -> None:
    clock, told = Clock(), list[Ended]()
    client = Client(clock)
    handle = {"remote_engine_id": "d"}

    ended = await relayed(
        Reads(event(ROLE, prompt_token_ids=[7, 8]), event(TEXT), event(END, kv_transfer_params=handle), DONE),
        client,
        clock,
        told,
    )

    assert told == [ended]
    assert (ended.handle, ended.prompt_token_ids, ended.token_ids) == (handle, [7, 8], [1, 2, 3])
    assert client.ended
    assert b"token_ids" not in b"".join(client.writes)


async def test_nothing_goes_out_before_there_is_an_answer() -> None:
    clock = Clock()
    client = Client(clock)

    await relayed(Reads(event(ROLE), event(TEXT), event(END), DONE), client, clock, [])

    assert client.writes[0].startswith(event(ROLE))
    assert b"fine" in client.writes[0]


async def test_a_stream_without_a_handle_tells_its_end_too() -> None:
    clock, told = Clock(), list[Ended]()

    await relayed(Reads(event(ROLE) + event(TEXT) + event(END) + DONE), Client(clock), clock, told)

    assert [ended.handle for ended in told] == [None]


async def test_time_that_a_slow_client_takes_is_counted() -> None:
    clock = Clock()
    reads = Reads(event(ROLE) + event(TEXT), *[event(TEXT)] * 3, event(END) + DONE)

    ended = await relayed(reads, Client(clock, seconds=10), clock, [])

    # The last piece goes with the end: nothing is left to be read meanwhile.
    assert ended.held_up == 40


async def test_what_was_held_up_is_known_when_the_handle_is() -> None:
    clock, seen = Clock(), list[float]()

    async def finished(ended: Ended) -> None:
        seen.append(ended.held_up)

    reads: Any = Reads(event(TEXT), event(TEXT), event(END, kv_transfer_params={"x": 1}), DONE)
    await relay.stream(reads, Client(clock, seconds=100), keep_token_ids=False, finished=finished, clock=clock)

    assert seen == [200]


@pytest.mark.parametrize(
    "reads",
    [
        [],
        [event(ROLE)],
        [event(ROLE), DONE],
        [event(ROLE), event({**ROLE, "finish_reason": "abort"}), DONE],
        [b'data: {"error": {"code": 500}}\n\n', DONE],
        [b'data: {"error": {"message": "no code"}}\n\n', DONE],
    ],
)
async def test_a_stream_without_an_answer_is_a_failure_that_can_be_tried_again(reads: list[bytes]) -> None:
    clock = Clock()
    client = Client(clock)

    with pytest.raises(EngineFailed):
        await relayed(Reads(*reads), client, clock, [])

    assert client.writes == []
    assert not client.ended


async def test_a_stream_that_ends_early_is_never_ended_for_the_client() -> None:
    clock, told = Clock(), list[Ended]()
    client = Client(clock)

    with pytest.raises(StreamBroken):
        await relayed(Reads(event(TEXT)), client, clock, told)

    assert not client.ended
    assert told == []


async def test_an_abort_after_some_text_is_an_answer() -> None:
    clock = Clock()
    client = Client(clock)

    await relayed(Reads(event(TEXT), event({**END, "finish_reason": "abort"}), DONE), client, clock, [])

    assert client.ended


class Leaves(Client):
    """A client that is gone when the first bytes come."""

    async def write(self, data: bytes) -> None:
        raise ClientGone


@pytest.mark.parametrize("arrived", [True, False], ids=["answer complete", "answer running"])
async def test_handle_of_an_answer_that_its_client_did_not_wait_for_is_told(arrived: bool) -> None:
    clock, told = Clock(), list[Ended]()
    handle = {"remote_engine_id": "d"}
    rest = [event(TEXT), event(END, kv_transfer_params=handle) + DONE] if arrived else [event(TEXT)]

    with pytest.raises(ClientGone):
        await relayed(Reads(event(ROLE) + event(TEXT), *rest), Leaves(clock), clock, told)

    assert [(ended.handle, ended.token_ids) for ended in told] == ([(handle, [1, 2, 1, 2, 3])] if arrived else [])
