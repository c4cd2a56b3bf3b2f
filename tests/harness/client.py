"""A plain HTTP client for engines: one connection a call, JSON in and out, streams event by event."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CALL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of an answer."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


def get(url: str) -> Reply:
    """The answer to a GET request."""
    with _answer("GET", url, None) as answer:
        return Reply(answer.status, answer.read().decode())


def post(url: str, body: Mapping[str, Any] | bytes, *, api_key: str = "") -> Reply:
    """The answer to a POST request; ``bytes`` go out as they are."""
    with _answer("POST", url, body, api_key) as answer:
        return Reply(answer.status, answer.read().decode())


@contextmanager
def sent(url: str, body: Mapping[str, Any]) -> Iterator[Callable[[], Reply]]:
    """A request on its way, and how to wait for its answer; the connection closes with the context, answered or not."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CALL_SECONDS)

    def reply() -> Reply:
        with connection.getresponse() as answer:
            return Reply(answer.status, answer.read().decode())

    try:
        connection.request("POST", parts.path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        yield reply
    finally:
        connection.close()


@contextmanager
def stream(url: str, body: Mapping[str, Any]) -> Iterator[Iterator[str]]:
    """The payloads of the events of a streamed answer, as they come; leaving early closes the connection."""
    with _answer("POST", url, {**body, "stream": True}) as answer:
        assert answer.status == 200, answer.read().decode()
        yield _payloads(answer)


@contextmanager
def _answer(
    method: str, url: str, body: Mapping[str, Any] | bytes | None, api_key: str = ""
) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CALL_SECONDS)
    encoded = json.dumps(body).encode() if isinstance(body, Mapping) else body
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        connection.request(method, parts.path, encoded, headers)
        with connection.getresponse() as answer:
            yield answer
    finally:
        connection.close()


def _payloads(answer: http.client.HTTPResponse) -> Iterator[str]:
    while line := answer.readline():
        text = line.decode().strip()
        if text.startswith("data: "):
            yield text.removeprefix("data: ")
