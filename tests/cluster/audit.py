"""The API server's audit log, as the tests read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.cluster.waiting import wait_until

READ_VERBS: Final = frozenset({"get", "list", "watch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """One request, as the API server saw it. Empty strings where a field does not apply."""

    user: str
    """Whose rights counted: the impersonated user, where there is one."""
    user_agent: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    path: str
    """The request's URI, with its query."""
    code: int
    """HTTP status; of a watch, that of its start."""
    allowed: bool
    """What authorization said, whatever became of the request then."""
    rule: str
    """Why it was allowed: for RBAC the binding and role. Empty where it was refused."""

    @property
    def mutates(self) -> bool:
        """Whether the request asks for a change. Reviews (of access, of tokens) are created, and change nothing."""
        return self.verb not in READ_VERBS and not self.resource.endswith("reviews") and bool(self.resource)


def parse_event(line: str) -> AuditEvent:
    """One line of the log."""
    event: dict[str, Any] = json.loads(line)
    target = event.get("objectRef", {})
    notes = event.get("annotations", {})
    allowed = notes.get("authorization.k8s.io/decision") != "forbid"
    return AuditEvent(
        user=(event.get("impersonatedUser") or event["user"]).get("username", ""),
        user_agent=event.get("userAgent", ""),
        verb=event["verb"],
        group=target.get("apiGroup", ""),
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        path=event["requestURI"],
        code=event.get("responseStatus", {}).get("code", 0),
        allowed=allowed,
        rule=notes.get("authorization.k8s.io/reason", "") if allowed else "",
    )


@dataclass(frozen=True, slots=True)
class AuditLog:
    """Reads the log from the byte `start` on."""

    path: Path
    start: int = 0

    def from_now(self) -> AuditLog:
        """The same log without what is already in it."""
        # Up to the last whole line: one may be half written.
        return AuditLog(self.path, self.path.read_bytes().rfind(b"\n") + 1)

    def events(self, wanted: Callable[[AuditEvent], bool] = lambda _: True) -> list[AuditEvent]:
        """The events so far that are `wanted`, in order; a watch counts once, when it starts."""
        return [event for event in self._read() if wanted(event)]

    def wait_for(self, wanted: Callable[[AuditEvent], bool], *, count: int = 1) -> Sequence[AuditEvent]:
        """Wait until `count` events are `wanted`: the log may trail the answer by a moment."""
        wait_until(lambda: len(self.events(wanted)) >= count, what=f"{count} events in the audit log")
        return self.events(wanted)

    def _read(self) -> Iterator[AuditEvent]:
        started: set[str] = set()
        with self.path.open("rb") as log:
            log.seek(self.start)
            for line in log:
                # The last line may be half written; it is read next time.
                if not line.endswith(b"\n"):
                    return
                identity = json.loads(line)["auditID"]
                if identity not in started:
                    started.add(identity)
                    yield parse_event(line.decode())
