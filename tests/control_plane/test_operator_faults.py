"""Whatever becomes of the operator's requests, it ends where it would have ended without.

A proxy between operator and API server spoils requests while a resource is made (`MADE`) and again while it is changed
(`CHANGED`). Then children and status have to be those of a run without faults, and nothing more may be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from kvloop_operator.cluster.kinds import RESOURCE
from tests.cluster.audit import AuditLog
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.control_plane.courses import CHANGED, MADE, Course, run
from tests.control_plane.settled import settle, snapshot, wait_for_reason
from tests.harness.fault_proxy import Delay, Drop, Fault, FaultProxy, Hold, Predicate, Refuse, Seen, is_write
from tests.harness.kube import Kube
from tests.harness.operator_process import OperatorProcess

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def proxy(operator_account: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    with FaultProxy(operator_account, tmp_path_factory.mktemp("proxy")) as running:
        yield running


@pytest.fixture(scope="module")
def through_proxy(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator behind the proxy that watches all namespaces."""
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    flags = ["--all-namespaces", "--resync-seconds=0.5"]
    with OperatorProcess(proxy.kubeconfig, log=log, flags=flags) as operator:
        operator.wait_until_ready()
        yield operator
        print(operator.log_tail(200))


@pytest.fixture(scope="module")
def undisturbed(control_plane: Cluster, kube: Kube, through_proxy: OperatorProcess) -> Course:
    """What a run without faults comes to."""
    audit = control_plane.audit.from_now()
    with control_plane.namespace() as kubectl:
        assert kubectl.namespace is not None
        return run(kube, kubectl.namespace, through_proxy, audit, lambda: None)


def is_get(request: Seen) -> bool:
    return request.verb == "get"


OF_REQUESTS: Final[Mapping[str, tuple[Predicate, Fault]]] = {
    "write-conflicts": (is_write, Refuse(409)),
    "write-too-many": (is_write, Refuse(429, retry_after=1)),
    "write-fails": (is_write, Refuse(500)),
    "write-unavailable": (is_write, Refuse(503)),
    "write-times-out-at-the-server": (is_write, Refuse(504)),
    "write-unauthorized": (is_write, Refuse(401)),
    "write-lost-on-its-way": (is_write, Drop(applied=False)),
    "write-whose-answer-is-lost": (is_write, Drop(applied=True)),
    "write-answered-late": (is_write, Delay(1)),
    "status-conflicts": (lambda seen: seen.subresource == "status", Refuse(409)),
    "status-whose-answer-is-lost": (lambda seen: seen.subresource == "status", Drop(applied=True)),
    "get-fails": (is_get, Refuse(500)),
    "get-too-many": (is_get, Refuse(429, retry_after=1)),
    "get-lost": (is_get, Drop(applied=False)),
}


@pytest.mark.parametrize("case", OF_REQUESTS)
def test_requests_that_fail_change_nothing_of_the_end(
    kube: Kube,
    ns: str,
    proxy: FaultProxy,
    through_proxy: OperatorProcess,
    undisturbed: Course,
    audit: AuditLog,
    case: str,
) -> None:
    wanted, fault = OF_REQUESTS[case]

    def disturb() -> None:
        proxy.fail(lambda seen: seen.namespace == ns and wanted(seen), fault, times=3, every=2)

    rule = proxy.fail(lambda seen: seen.namespace == ns and wanted(seen), fault, times=3, every=2)
    course = run(kube, ns, through_proxy, audit, disturb)
    assert rule.used >= 1
    assert course.made == undisturbed.made
    assert course.changed == undisturbed.changed
    # A write whose answer was lost may come twice; others only once.
    again = 6 if fault == Drop(applied=True) else 0
    assert course.written <= undisturbed.written + again
    assert through_proxy.health()[0] == 200


def test_a_write_that_is_never_answered_is_tried_again(
    kube: Kube,
    ns: str,
    proxy: FaultProxy,
    through_proxy: OperatorProcess,
    undisturbed: Course,
    audit: AuditLog,
) -> None:
    rule = proxy.fail(lambda seen: seen.namespace == ns and seen.plural == "services", Hold())
    kube.create(MADE, ns)
    wait_until(lambda: rule.used == 1, what="a request that is held")
    wait_for_reason(kube, ns, "demo", "Unschedulable")
    settle(through_proxy, audit, ns)
    assert snapshot(kube, ns, "demo") == undisturbed.made


def test_an_api_server_that_is_away_is_waited_for_and_is_no_reason_to_start_anew(
    kube: Kube,
    ns: str,
    proxy: FaultProxy,
    through_proxy: OperatorProcess,
    undisturbed: Course,
    audit: AuditLog,
) -> None:
    kube.create(MADE, ns)
    settle(through_proxy, audit, ns)
    proxy.fail(lambda _: True, Drop(applied=False), times=None)
    failed = "kvloop_operator_resyncs_total"
    before = through_proxy.metric(failed, result="Unavailable")
    kube.patch(RESOURCE.kind, ns, "demo", {"spec": CHANGED})
    wait_until(lambda: through_proxy.metric(failed, result="Unavailable") >= before + 5, what="failed readings")
    assert through_proxy.health()[0] == 200
    proxy.clear()
    wait_until(lambda: snapshot(kube, ns, "demo") == undisturbed.changed, what="the change")
    assert through_proxy.health()[0] == 200
