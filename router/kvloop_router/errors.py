"""Errors of the router.

RouterError
├── InvalidConfig      the configuration file cannot be used
├── RequestError       the client's fault; becomes an answer in OpenAI's error shape
├── Unavailable        no engine can serve now; retrying later helps
└── EngineError        an engine's fault
    ├── EngineUnreachable   no connection: nothing was sent
    ├── EngineFailed        5xx, a reset or a timeout before an answer: what the engine did is unknown
    │   └── EngineDraining  an answer of nothing, with status 200: it takes no new requests and does not say so
    ├── EngineRejected      4xx: refused before scheduling, nothing was read
    └── StreamBroken        the answer ended before its end
"""

from __future__ import annotations


class RouterError(Exception):
    """Base of every error of this package."""


class InvalidConfig(RouterError):
    """The configuration file cannot be used; the message names every faulty field."""


class RequestError(RouterError):
    """A request that is answered with ``status`` and never reaches an engine.

    retry_after: in how many seconds it may be asked again; None: asking again does not help.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after = retry_after


class Unavailable(RouterError):
    """No engine can serve this turn now. ``reason`` is one lower-case word or two, for metrics and ``/readyz``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(RouterError):
    """Something went wrong at or on the way to the engine called ``engine``. The message holds no body."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(f"{engine}: {message}")
        self.engine = engine


class EngineUnreachable(EngineError):
    """No connection was made, so that nothing was sent."""


class EngineFailed(EngineError):
    """A 5xx, a reset, a timeout or a malformed answer; whether the engine read a handle is not known.

    status: of the answer; 0 where there was none.
    """

    def __init__(self, engine: str, message: str, *, status: int = 0) -> None:
        super().__init__(engine, message)
        self.status = status


class EngineDraining(EngineFailed):
    """It aborts whatever is new, as vLLM does between SIGTERM and its end."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine, "draining")


class EngineRejected(EngineError):
    """A 4xx. ``body`` is the engine's own error, which is the client's to see. ``retry_after``: its header."""

    def __init__(
        self, engine: str, status: int, body: bytes, content_type: str, retry_after: str | None = None
    ) -> None:
        super().__init__(engine, f"status {status}")
        self.retry_after = retry_after
        self.status = status
        self.body = body
        self.content_type = content_type


class StreamBroken(EngineError):
    """The answer ended before its end; bytes of it may have reached the client."""
