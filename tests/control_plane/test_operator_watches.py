"""Watches and lists that break, are refused, tell nothing or are too old: the operator ends where it would without.

As in `test_operator_faults.py`, but each fault is there from the operator's start on, and each test has an operator of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from kvloop_operator.cluster.kinds import RESOURCE
from tests.cluster.audit import AuditLog
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.control_plane.conftest import StartOperator
from tests.control_plane.courses import CHANGED, MADE, Course, run
from tests.control_plane.settled import owned, settle, snapshot
from tests.harness.fault_proxy import (
    CutWatch,
    Drop,
    ExpireWatch,
    Fault,
    FaultProxy,
    MuteWatch,
    Predicate,
    Refuse,
    Seen,
    is_watch,
)
from tests.harness.kube import Kube
from tests.harness.operator_process import OperatorProcess

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def undisturbed(
    control_plane: Cluster, kube: Kube, operator_account: Path, tmp_path_factory: pytest.TempPathFactory
) -> Course:
    """What a run without faults comes to."""
    audit = control_plane.audit.from_now()
    with control_plane.namespace() as kubectl:
        assert kubectl.namespace is not None
        log = tmp_path_factory.mktemp("operator") / "operator.log"
        flags = [f"--namespace={kubectl.namespace}", "--resync-seconds=0.5"]
        with OperatorProcess(operator_account, log=log, flags=flags) as operator:
            operator.wait_until_ready()
            return run(kube, kubectl.namespace, operator, audit, lambda: None)


def is_watch_of_statefulsets(request: Seen) -> bool:
    return is_watch(request) and request.plural == "statefulsets"


def is_list(request: Seen) -> bool:
    return request.verb == "list"


OF_WATCHES: Final[Mapping[str, tuple[Predicate, Fault, int | None]]] = {
    "cut-again-and-again": (is_watch, CutWatch(1), None),
    "cut-in-the-middle-of-an-event": (is_watch, CutWatch(1, half=True), 22),
    "too-old-in-the-stream": (is_watch, ExpireWatch(1), 22),
    "too-old-at-once": (is_watch, Refuse(410), 3),
    "refused": (is_watch, Refuse(500), 22),
    "unavailable": (is_watch, Refuse(503), 22),
    "too-many": (is_watch, Refuse(429, retry_after=1), 22),
    "unauthorized": (is_watch, Refuse(401), 1),
    "forbidden": (is_watch, Refuse(403), 1),
    "lost": (is_watch, Drop(applied=False), 22),
    "lists-fail": (is_list, Refuse(500), 3),
    "lists-too-many": (is_list, Refuse(429, retry_after=1), 3),
    "lists-forbidden": (is_list, Refuse(403), 1),
    "lists-lost": (is_list, Drop(applied=True), 3),
    "everything-unavailable": (lambda _: True, Refuse(503), 4),
    "everything-lost": (lambda _: True, Drop(applied=False), 4),
}
ENDS_IT: Final = ("too-old-at-once", "unauthorized", "forbidden", "lists-forbidden")
"""After these the operator ends, and the kubelet starts it anew."""


@pytest.mark.parametrize("case", OF_WATCHES)
def test_watches_and_lists_that_fail_change_nothing_of_the_end(
    kube: Kube, ns: str, operator_account: Path, tmp_path: Path, undisturbed: Course, case: str
) -> None:
    wanted, fault, times = OF_WATCHES[case]
    # Without readings of everything, which would hide what watches miss.
    flags = (f"--namespace={ns}", "--resync-seconds=100000")
    ends = 0
    with (
        FaultProxy(operator_account, tmp_path) as proxy,
        OperatorProcess(proxy.kubeconfig, log=tmp_path / "operator.log", flags=flags) as operator,
    ):

        def reaches(expected: Any) -> bool:
            nonlocal ends
            ends += operator.relaunch_if_ended()
            return bool(snapshot(kube, ns, "demo") == expected)

        rule = proxy.fail(wanted, fault, times=times)
        kube.create(MADE, ns)
        wait_until(lambda: reaches(undisturbed.made), what="what a run without faults makes")
        proxy.fail(wanted, fault, times=times)
        kube.patch(RESOURCE.kind, ns, "demo", {"spec": CHANGED})
        kube.delete("Service", ns, "demo-router")
        kube.patch("Role", ns, "demo-router", {"rules": []})
        wait_until(lambda: reaches(undisturbed.changed), what="what a run without faults changes")
        assert rule.used == times or times is None
        assert ends == 0 or case in ENDS_IT
        wait_until(lambda: operator.health()[0] == 200, what="a probe that passes")


def test_liveness_fails_while_a_watch_is_dead_and_the_work_goes_on(
    kube: Kube,
    ns: str,
    operator_account: Path,
    tmp_path: Path,
    undisturbed: Course,
    start_operator: StartOperator,
    audit: AuditLog,
) -> None:
    with FaultProxy(operator_account, tmp_path) as proxy:
        proxy.fail(is_watch_of_statefulsets, MuteWatch(0), times=None)
        operator = start_operator(f"--namespace={ns}", "--resync-seconds=0.5", kubeconfig=proxy.kubeconfig)
        made = kube.create(MADE, ns)
        settle(operator, audit, ns)
        # Readings of everything make up for the watch.
        assert snapshot(kube, ns, "demo") == undisturbed.made
        wait_until(lambda: operator.health()[0] == 503, what="a liveness probe that fails")
        assert operator.health()[1] == "the watch of StatefulSet is dead\n"
        kube.delete("StatefulSet", ns, "demo-decode")
        wait_until(lambda: ("StatefulSet", "demo-decode") in owned(kube, ns, made), what="the StatefulSet anew")
        # What the kubelet does then.
        proxy.clear()
        operator.restart()
        settle(operator, audit, ns)
        assert operator.health() == (200, "ok\n")
        operator.kill()
