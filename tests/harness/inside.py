"""Requests from inside the node's network, where pods and Services have addresses.

::

    with Inside(cluster.in_node_network) as inside:
        inside.get("http://10.244.0.3:8000/health").status
        with inside.load(url, model="demo", conversations=4) as load:
            ...
        load.turns
"""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_ANSWER_SECONDS: Final = 180.0


class InsideEnded(AssertionError):
    """The process in the node's network has ended; the message says how."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; times are Unix seconds. ``error``: why it did not come to its end, else empty."""

    status: int
    headers: Mapping[str, str]
    text: str
    error: str
    began: float
    ended: float

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a load. ``fault``: what was wrong with its answer, else empty. ``cold``: the same turn without reuse,
    played after the last turn of a conversation."""

    text: str
    fault: str
    streamed: bool
    ended: float
    path: str
    reason: str
    prefill: str
    decode: str
    cold: Turn | None = None

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Turn:
        cold = told.get("cold")
        return cls(**{**told, "cold": None if cold is None else cls.parse(cold)})


@dataclass(slots=True)
class Load:
    """Conversations that go on. ``turns`` are there once it was stopped."""

    turns: Sequence[Turn] = ()

    @property
    def faults(self) -> list[str]:
        """What failed, turns that were played anew without reuse included."""
        return [each.fault for turn in self.turns for each in (turn, turn.cold) if each is not None and each.fault]

    @property
    def wrong(self) -> list[Turn]:
        """Turns whose text is another than without reuse."""
        return [turn for turn in self.turns if turn.cold is not None and turn.cold.text != turn.text]

    def decode_engines(self, path: str) -> set[str]:
        """Where turns of a path were decoded."""
        return {turn.decode for turn in self.turns if turn.path == path}


class Pending:
    """A request on its way."""

    def __init__(self, heard: Callable[[], Mapping[str, Any]]) -> None:
        self._heard = heard
        self._headers: Mapping[str, str] | None = None
        self._answer: Answer | None = None

    def headers(self) -> Mapping[str, str]:
        """Wait for the beginning of the answer; gives its headers, in lower case."""
        if self._headers is None:
            self._take()
        assert self._headers is not None
        return self._headers

    def answer(self) -> Answer:
        """Wait for the end of the answer."""
        while self._answer is None:
            self._take()
        return self._answer

    def _take(self) -> None:
        told = self._heard()
        self._headers = {name.lower(): value for name, value in told["headers"].items()}
        if told.get("end"):
            self._answer = Answer(
                told["status"],
                self._headers,
                told["text"],
                told["error"],
                told.get("began", told["ended"]),
                told["ended"],
            )


class Inside:
    """A process in the node's network. May be used from several threads."""

    def __init__(self, in_network: Callable[..., list[str]]) -> None:
        self._command = in_network(sys.executable, "-P", str(Path(__file__).with_name("inside_process.py")))
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._heard: dict[int, queue.SimpleQueue[Mapping[str, Any] | None]] = {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, name="inside")
        self._listener.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._listener.join()
        self._process.stdout.close()

    def get(self, url: str, *, headers: Mapping[str, str] | None = None) -> Answer:
        """The answer to a GET request."""
        return self.begin("GET", url, headers=headers).answer()

    def post(self, url: str, body: Mapping[str, Any]) -> Answer:
        """The answer to a POST request."""
        return self.begin("POST", url, body).answer()

    def begin(self, method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Pending:
        """Send a request, without waiting for its answer."""
        number = self._order("request", method=method, url=url, body=body, headers=headers)
        return Pending(lambda: self._hear(number))

    @contextmanager
    def load(self, url: str, *, model: str, conversations: int) -> Iterator[Load]:
        """Conversations side by side through the router at ``url``, until the context is left and they have ended."""
        load = Load()
        number = self._order("load", url=url, model=model, conversations=conversations)
        try:
            yield load
        finally:
            self._order("stop", load=number)
            load.turns = [Turn.parse(turn) for turn in self._hear(number)["turns"]]

    def _order(self, what: str, **more: Any) -> int:
        assert self._process.stdin is not None
        with self._lock:
            number = next(self._numbers)
            self._heard[number] = queue.SimpleQueue()
            self._process.stdin.write(json.dumps({"id": number, "do": what, **more}) + "\n")
            self._process.stdin.flush()
        return number

    def _hear(self, number: int) -> Mapping[str, Any]:
        told = self._heard[number].get(timeout=_ANSWER_SECONDS)
        if told is None:
            raise InsideEnded(f"exit {self._process.wait()}: see above for what it wrote")
        if told.get("end"):
            del self._heard[number]
        return told

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            self._heard[told["id"]].put(told)
        for waiting in list(self._heard.values()):
            waiting.put(None)
