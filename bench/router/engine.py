"""A prefill and a decode engine in one process that answer at once and cost next to nothing.

``python -m bench.router.engine`` prints their two ports. Nothing is computed and nothing of a request is parsed but its
head; see ``wire``. Like a real engine, decode gives all its streams their next chunk in one step.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable
from itertools import count
from typing import cast

import uvloop

from bench.router import wire

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_numbers = count(1)


class Steps:
    """The streams of one pace; with each step each gets its next chunk."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._streams: list[Stream] = []
        self._due = 0.0

    def add(self, stream: Stream) -> None:
        """From the next step on."""
        self._streams.append(stream)
        if len(self._streams) == 1:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + self._seconds
            loop.call_at(self._due, self._step)

    def _step(self) -> None:
        self._streams = [stream for stream in self._streams if stream.step()]
        if self._streams:
            self._due += self._seconds
            loop = asyncio.get_running_loop()
            self._due = max(self._due, loop.time())
            loop.call_at(self._due, self._step)


class Stream:
    """One answer that is still going on."""

    def __init__(self, transport: asyncio.Transport, chunks: int, middle: bytes, last: bytes) -> None:
        self._transport = transport
        self._left = chunks
        self._middle = middle
        self._last = last

    def step(self) -> bool:
        """Send the next chunk; gives whether there are more."""
        if self._transport.is_closing():
            return False
        self._left -= 1
        self._transport.write(self._middle if self._left else self._last)
        return self._left > 0


class Engine(asyncio.Protocol):
    """A connection to an engine."""

    def __init__(self, role: str, *, retains: bool, steps: dict[int, Steps]) -> None:
        self._role = role
        self._retains = retains
        self._steps = steps
        self._transport: asyncio.Transport
        self._parts: list[bytes] = []
        self._missing = 0
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._parts.append(data)
            self._missing -= len(data)
            if self._missing <= 0:
                self._answer(self._head, b"".join(self._parts))
            return
        if self._parts:
            data = b"".join([*self._parts, data])
            self._parts.clear()
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._parts = [data]
            return
        self._head = data[:end]
        length = _LENGTH.search(self._head)
        if length is None and _CHUNKED.search(self._head):
            # No router of the benchmark does that with the turns; what they ask beside them needs no body.
            self._transport.abort()
            return
        self._missing = (int(length[1]) if length else 0) - (len(data) - end - 4)
        self._parts = [data[end + 4 :]]
        if self._missing <= 0:
            self._answer(self._head, self._parts[0])

    def _answer(self, head: bytes, body: bytes) -> None:
        self._parts = []
        self._missing = 0
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            found = _FACTS.get(path)
            self._transport.write(found() if found else wire.answer(b'{"error":"not found"}', "404 Not Found"))
        elif path == b"/tokenize":
            self._transport.write(wire.tokenized(wire.tokens_of(body)))
        elif wire.STREAMS.search(body):
            self._stream(body)
        else:
            self._prefill(body)

    def _prefill(self, body: bytes) -> None:
        tokens = wire.tokens_of(body)
        handle = wire.GIVEN_HANDLE.search(body)
        params = wire.params(self._role, next(_numbers), tokens, pulled=int(handle[1]) if handle else None)
        self._transport.write(wire.prefilled(params, tokens, with_ids=bool(wire.ASKS_IDS.search(body))))

    def _stream(self, body: bytes) -> None:
        with_ids = bool(wire.ASKS_IDS.search(body))
        found, step = wire.MAX_TOKENS.search(body), wire.SEED.search(body)
        assert found is not None
        assert step is not None
        chunks, step_ms = int(found[1]), int(step[1])
        tokens = wire.tokens_of(body)
        params = wire.params(self._role, next(_numbers), tokens, pulled=None) if self._retains else b"null"
        last = wire.last_chunk(params, with_ids=with_ids)
        middle = wire.chunk(with_ids=with_ids)
        self._transport.write(wire.STREAM_HEAD + wire.first_chunk(tokens, with_ids=with_ids) + middle)
        steps = self._steps.get(step_ms)
        if steps is None:
            steps = self._steps[step_ms] = Steps(step_ms / 1000)
        # The role's chunk and the first with text have gone out.
        steps.add(Stream(self._transport, chunks - 2, middle, last))


_METRICS = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="%d",num_gpu_blocks="1000000000"} 1.0
vllm:num_requests_running{model_name="bench"} 0.0
vllm:num_requests_waiting{model_name="bench"} 0.0
"""
_MODELS = (
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1796040000,"owned_by":"vllm","root":"bench",'
    b'"parent":null,"max_model_len":%d,"permission":[]}]}'
)
_FACTS: dict[bytes, Callable[[], bytes]] = {
    b"/health": lambda: wire.answer(b""),
    b"/version": lambda: wire.answer(b'{"version":"0.33.0"}'),
    b"/v1/models": lambda: wire.answer(_MODELS % wire.MAX_MODEL_LEN),
    b"/metrics": lambda: wire.answer(_METRICS % wire.BLOCK_SIZE, content_type="text/plain; version=0.0.4"),
}


async def serve(*, retains: bool) -> None:
    """Listen, say where, and serve for ever."""
    loop = asyncio.get_running_loop()
    steps: dict[int, Steps] = {}
    servers = [
        await loop.create_server(
            lambda role=role: Engine(role, retains=retains, steps=steps),  # type: ignore[misc]
            "127.0.0.1",
            0,
            backlog=4096,
        )
        for role in ("prefill", "decode")
    ]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--retains", action="store_true", help="decode returns handles: a bidirectional engine")
    uvloop.run(serve(retains=parser.parse_args().retains))


if __name__ == "__main__":
    main()
