"""At rest the operator asks for no change, however often it looks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from tests.cluster.audit import AuditLog
from tests.cluster.waiting import wait_until
from tests.control_plane.conftest import StartOperator
from tests.control_plane.settled import settle, writes
from tests.harness.kube import Kube
from tests.harness.operator_process import USER
from tests.unit.operator.documents import document

pytestmark = pytest.mark.timeout(1200)

RESOURCES: Final = 100
RESYNCS: Final = 20


def test_twenty_looks_at_a_hundred_resources_ask_for_no_change(
    kube: Kube, ns: str, start_operator: StartOperator, audit: AuditLog
) -> None:
    operator = start_operator(f"--namespace={ns}", "--resync-seconds=1")
    made = [{**document(), "metadata": {"name": f"demo-{index}"}} for index in range(RESOURCES)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: kube.create(each, ns), made))
    settle(operator, audit, ns)
    assert operator.metric("kvloop_operator_resources") == RESOURCES

    def passes() -> float:
        return operator.metric("kvloop_operator_reconciles_total", result="ok")

    since, before = audit.from_now(), passes()
    operator.wait_for_resyncs(RESYNCS)
    # A busy machine may have one pass for two resyncs.
    wait_until(lambda: passes() - before >= RESYNCS * RESOURCES, what="twenty passes over each resource")
    assert writes(since) == []
    assert operator.metric("kvloop_operator_reconciles_total", result="defect") == 0

    # Lists of every kind, and the Secret of each resource, which nobody watches: it asks for nothing else.
    asked = {(event.verb, event.resource) for event in since.events(lambda event: event.user == USER) if event.resource}
    assert ("get", "secrets") in asked
    assert {verb for verb, _ in asked} <= {"get", "list", "watch"}
    assert {resource for verb, resource in asked if verb == "get"} == {"secrets"}
