"""What a situation is, what is said of it, and the scenes that situations are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvloop_operator import names
from kvloop_operator.errors import Fault
from kvloop_operator.facts import OperatorSettings
from kvloop_operator.reports import Verdict
from kvloop_operator.status import Assessment, Problem, Reason, Situation, assess
from kvloop_operator.status.transfer import ENOUGH_BYTES
from tests.unit.operator.scenes import (
    NOW,
    Scene,
    pod,
    running,
    scene,
)
from tests.unit.operator.stored import replaced

Status = Mapping[str, Any]

PULL = "rpc error: code = NotFound desc = not found"
QUOTA = 'create Pod demo-decode-0 in StatefulSet demo-decode failed error: pods "demo-decode-0" is forbidden: exceeded'


def conditions(status: Status) -> dict[str, tuple[str, str]]:
    """Status and reason of every condition."""
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def message(status: Status, kind: str = "Ready") -> str:
    (found,) = [each["message"] for each in status["conditions"] if each["type"] == kind]
    return str(found)


def said(shown: Scene, **changes: Any) -> Status:
    return assess(shown.situation(**changes)).status


def served(shown: Scene) -> Status:
    """What was said while all served at its generation."""
    return {
        **said(scene()),
        "observedGeneration": shown.resource.metadata.generation,
        "kvTransfer": {"verifiedRevision": shown.revision},
    }


def after_serving(shown: Scene) -> Scene:
    return replace(shown, previous=served(shown))


def starting(*containers: Any, role: str = "decode", **details: Any) -> Scene:
    """A deployment on its first way up, whose engine of one role is in this state; the router waits for it."""
    shown = scene()
    details = {"ready_since": NOW - 200, **details}
    router = pod("demo-router-0", names.ROUTER, running("router", ready=False, since=NOW - 50), ready_since=NOW - 60)
    return replace(shown.with_pods(shown.engine(role, 0, *containers, **details), router), pairs={})


def router_is(*containers: Any, **details: Any) -> Scene:
    return scene().with_pods(pod("demo-router-0", names.ROUTER, *containers, ready_since=NOW - 60, **details))


def with_numbers(shown: Scene, role: str, replicas: int, partition: int) -> Scene:
    place = "StatefulSet", f"demo-{role}"
    child = replaced(shown.children[place], ("spec", "replicas"), replicas)
    child = replaced(child, ("spec", "updateStrategy", "rollingUpdate", "partition"), partition)
    return replace(shown, children={**shown.children, place: child})


def without_child(shown: Scene, kind: str, name: str) -> Scene:
    return replace(shown, children={key: child for key, child in shown.children.items() if key != (kind, name)})


def rolling(*updated: Any, draining: bool = False, partition: int = 2) -> Scene:
    """Two engines a role at the previous revision, of which the upper ones are as ``updated`` says."""
    shown = scene(generation=2, prefill__replicas=2, decode__replicas=2)
    label = str(int(NOW) - 5) if draining else None
    for role in ("prefill", "decode"):
        old = [
            shown.engine(role, each, revision="old", kv="previous", draining=label if each == 1 else None)
            for each in (0, 1)
        ]
        shown = shown.with_pods(*old).with_child("StatefulSet", f"demo-{role}", currentRevision="old")
        shown = with_numbers(shown, role, 2, partition)
        if updated:
            shown = shown.with_pods(shown.engine(role, 1, *updated, ready_since=NOW - 60))
    return replace(shown, pairs={}, previous=said(scene(prefill__replicas=2, decode__replicas=2)))


def scaling_down(*, draining: bool = True) -> Scene:
    shown = scene(generation=2)
    label = str(int(NOW) - 5) if draining else None
    return after_serving(
        with_numbers(shown, "decode", 2, 2).with_pods(shown.engine("decode", 1, draining=label)).verified()
    )


def stuck_in_termination(deleted: float, *finalizers: str) -> Scene:
    shown = scene()
    pod = shown.engine("decode", 0, deleted=deleted)
    return after_serving(shown.with_pods(replaced(pod, ("metadata", "finalizers"), list(finalizers))))


def evicted_router() -> dict[str, Any]:
    return pod("demo-router-gone", names.ROUTER, ready=False, phase="Failed", reason="Evicted")


def unsettled(shown: Scene) -> Scene:
    return shown.with_child("StatefulSet", "demo-decode", observedGeneration=0)


def changed_while_paused() -> Scene:
    shown = scene(paused=True, generation=2)
    place = "StatefulSet", "demo-decode"
    path = ("spec", "template", "spec", "containers", 0, "image")
    return replace(shown, children={**shown.children, place: replaced(shown.children[place], path, "another")})


def pair_failed() -> Scene:
    shown = scene(decode__replicas=2)
    (bad,) = [pair for pair in shown.pairs.values() if pair.decode == "demo-decode-1"]
    return replace(shown, pairs={**shown.pairs, bad.key: replace(bad, verdict=Verdict.FAILED, detail="no KV moved")})


def pair_wrong() -> Scene:
    shown = pair_failed()
    (bad,) = [pair for pair in shown.pairs.values() if pair.verdict is Verdict.FAILED]
    wrong = replace(bad, verdict=Verdict.WRONG, detail="2.10 nats apart")
    return replace(shown, pairs={**shown.pairs, bad.key: wrong})


def pair_left() -> Scene:
    shown = pair_failed()
    return shown.with_pods(shown.engine("decode", 0, running(ready=False), ready_since=NOW - 10))


def slow(shown: Scene, moved: int = ENOUGH_BYTES) -> Scene:
    return shown.verified(to_decode_bytes=moved, to_prefill_bytes=0, to_decode_seconds=1.0, to_prefill_seconds=0.0)


def newer_template(monkeypatch: pytest.MonkeyPatch) -> Scene:
    for module in ("kvloop_operator.facts", "kvloop_operator.status.assessment"):
        monkeypatch.setattr(f"{module}.ENGINE_TEMPLATE_VERSIONS", ("1", "2"))
    return scene(settings=OperatorSettings(live_template_version="1"))


def fault(shown: Scene) -> Situation:
    wrong = Fault("spec.engine.image", '"vllm"', "no vLLM version in the tag", "set engine.version")
    return shown.situation(faults=(wrong,), step=None, wanted_revision="")


def problem(reason: Reason, shown: Scene | None = None) -> Situation:
    return (shown or scene()).situation(
        problems=(Problem(reason, "Secret demo-router: why it was refused"),), step=None
    )


@dataclass(frozen=True)
class Row:
    """A situation, and what is said of it. ``ready``, ``reconciling``, ``stalled``: status and reason, or absent.

    others: further conditions. words: what the message of Ready names.
    """

    name: str
    of: Callable[[], Scene | Situation]
    ready: str
    reconciling: str = ""
    stalled: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def assessed(row: Row) -> Assessment:
    found = row.of()
    return assess(found.situation() if isinstance(found, Scene) else found)
