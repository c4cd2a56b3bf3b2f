"""Lines of the audit log as events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster.audit import AuditLog, parse_event


def _line(**changes: Any) -> str:
    event: dict[str, Any] = {
        "auditID": "1",
        "stage": "ResponseComplete",
        "requestURI": "/apis/apps/v1/namespaces/a/deployments/b/scale?x=1",
        "verb": "patch",
        "user": {"username": "someone"},
        "userAgent": "kubectl",
        "objectRef": {
            "apiGroup": "apps",
            "resource": "deployments",
            "subresource": "scale",
            "namespace": "a",
            "name": "b",
        },
        "responseStatus": {"code": 200},
        "annotations": {
            "authorization.k8s.io/decision": "allow",
            "authorization.k8s.io/reason": "RBAC: allowed by RoleBinding x",
        },
    }
    return json.dumps(event | changes) + "\n"


def test_an_event_says_who_did_what_to_which_object_and_why_it_was_allowed() -> None:
    event = parse_event(_line())
    assert (event.user, event.verb, event.code, event.allowed) == ("someone", "patch", 200, True)
    assert (event.group, event.resource, event.subresource) == ("apps", "deployments", "scale")
    assert (event.namespace, event.name, event.rule) == ("a", "b", "RBAC: allowed by RoleBinding x")
    assert event.mutates


def test_the_impersonated_user_is_the_one_who_counts() -> None:
    assert parse_event(_line(impersonatedUser={"username": "other"})).user == "other"


def test_a_refused_request_is_seen_as_one_and_has_no_rule() -> None:
    event = parse_event(_line(annotations={"authorization.k8s.io/decision": "forbid"}, responseStatus={"code": 403}))
    assert (event.allowed, event.rule, event.code) == (False, "", 403)


def test_neither_reads_nor_access_reviews_nor_paths_without_an_object_mutate() -> None:
    assert not parse_event(_line(verb="list")).mutates
    assert not parse_event(_line(verb="create", objectRef={"resource": "selfsubjectaccessreviews"})).mutates
    assert not parse_event(_line(verb="get", objectRef={})).mutates


def test_a_watch_counts_once_and_a_half_written_line_later(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    watch = _line(verb="watch", stage="ResponseStarted") + _line(verb="watch")
    path.write_text(watch + _line(auditID="2")[:40])
    log = AuditLog(path)
    assert [event.verb for event in log.events()] == ["watch"]
    later = log.from_now()
    path.write_text(watch + _line(auditID="2"))
    assert [event.verb for event in log.events()] == ["watch", "patch"]
    assert [event.verb for event in later.events()] == ["patch"]
