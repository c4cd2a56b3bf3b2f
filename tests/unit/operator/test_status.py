"""What is said of a resource, situation by situation; every reason comes about in one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvloop_operator.reports import Verdict
from kvloop_operator.rollout import DrainReport
from kvloop_operator.status import ConditionType, Problem, Reason, assess
from kvloop_operator.status.findings import CRASH_SLACK_SECONDS, TERMINATION_SLACK_SECONDS
from kvloop_operator.status.transfer import FAILED_ATTEMPTS
from tests.unit.operator.scenes import (
    NOW,
    Scene,
    crashing,
    ended,
    ending,
    running,
    scene,
    unschedulable,
    waiting,
)
from tests.unit.operator.situations import ROWS
from tests.unit.operator.situations.cases import (
    PULL,
    Row,
    after_serving,
    assessed,
    changed_while_paused,
    conditions,
    fault,
    message,
    newer_template,
    rolling,
    said,
    scaling_down,
    slow,
    starting,
    stuck_in_termination,
    unsettled,
)
from tests.unit.operator.stored import replaced


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_situation(row: Row) -> None:
    status = assessed(row).status
    found = {kind: " ".join(each) for kind, each in conditions(status).items()}
    assert found["Ready"] == row.ready
    assert found.get("Reconciling", "") == (f"True {row.reconciling}" if row.reconciling else "")
    assert found.get("Stalled", "") == (f"True {row.stalled}" if row.stalled else "")
    assert {kind: found.get(kind) for kind in row.others} == row.others
    for words in row.words:
        assert words in message(status)


def test_every_reason_comes_about(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {reason for row in ROWS for _, reason in conditions(assessed(row).status).values()}
    reasons |= {reason for _, reason in conditions(said(newer_template(monkeypatch))).values()}
    assert reasons == {reason.value for reason in Reason}


def test_conditions_stand_in_one_order() -> None:
    orders = [list(conditions(assessed(row).status)) for row in ROWS]
    assert all(order == [kind.value for kind in ConditionType if kind.value in order] for order in orders)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_pod_s_trouble_says_what_to_do(row: Row) -> None:
    status = assessed(row).status
    if row.stalled and row.stalled not in ("Forbidden", "NameTaken", "ApplyFailed"):
        assert ";" in message(status, "Stalled")


def test_counts_of_a_role() -> None:
    shown = scene(decode__replicas=3).without_pods("demo-decode-2")
    shown = shown.with_pods(shown.engine("decode", 1, revision="old", ready_since=NOW - 60))
    shown = shown.with_pods(shown.engine("decode", 0, running(ready=False, since=NOW - 50), ready_since=NOW - 60))
    assert said(shown)["decode"] == {
        "replicas": 2,
        "desired": 3,
        "ready": 1,
        "updated": 1,
        "revision": shown.revision,
        "selector": "kvloop.io/deployment=demo,kvloop.io/role=decode",
        "summary": "1/3",
    }


def test_pods_that_end_are_no_longer_counted() -> None:
    shown = scene(decode__replicas=2)
    counted = said(shown.with_pods(shown.engine("decode", 1, deleted=NOW + 30)))["decode"]
    assert (counted["replicas"], counted["ready"], counted["updated"]) == (1, 1, 1)


def test_nothing_is_updated_before_the_template_is_applied() -> None:
    assert said(replace(changed_while_paused(), resource=scene().resource))["decode"]["updated"] == 0


def test_the_count_of_updated_pods_waits_for_the_statefulset_controller() -> None:
    shown = unsettled(scene(decode__replicas=2))
    assert said(replace(shown, previous={"decode": {"updated": 1}}))["decode"]["updated"] == 1


def test_clients_are_told_where_to_call() -> None:
    assert said(scene())["url"] == "http://demo-router.team.svc:8000"
    assert said(scene(router__service__port=80))["url"] == "http://demo-router.team.svc:80"
    encrypted = scene(security__tls__router__secretName="mine")
    assert said(encrypted)["url"] == "https://demo-router.team.svc:8000"


def test_a_newer_engine_template_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    status = said(newer_template(monkeypatch))
    assert status["engineTemplate"] == {"current": "1", "offered": "2"}
    assert conditions(status)["UpdateAvailable"] == ("True", "NewEngineTemplate")
    assert "set rollout.engineTemplateVersion to 2" in message(status, "UpdateAvailable")


def test_the_newest_engine_template_is_offered_to_nobody() -> None:
    assert said(scene())["engineTemplate"] == {"current": "1", "offered": ""}


def test_verification_is_kept_by_kv_revision() -> None:
    shown = scene()
    assert said(shown)["kvTransfer"]["verifiedRevision"] == shown.revision
    other = replace(shown, pairs={}, previous={"kvTransfer": {"verifiedRevision": "another"}})
    assert conditions(said(other))["KVTransferVerified"] == ("Unknown", "VerifyingKVTransfer")
    assert said(other)["kvTransfer"]["verifiedRevision"] == "another"


def test_the_connector_that_was_left_to_kvloop_is_told_and_why_it_is_not_kvloops() -> None:
    def transfer(**changes: Any) -> Any:
        return said(scene(**changes))["kvTransfer"]

    assert transfer(kvTransfer__connector="NixlConnector")["connector"] == "NixlConnector"
    assert transfer(kvTransfer__connector="NixlConnector")["connectorMessage"] == ""
    assert transfer(engine__version="0.33.0")["connector"] == "NixlConnector"
    assert "0.32.0 only" in transfer(engine__version="0.33.0")["connectorMessage"]
    assert transfer(engine__version="0.32.0")["connector"] == "KvloopConnector"
    assert transfer(engine__version="0.32.0")["connectorMessage"] == ""


def test_the_connector_stays_told_while_the_spec_cannot_be_read() -> None:
    told = said(scene())["kvTransfer"]
    unread = said(scene(), resource=None, facts=None, previous={"kvTransfer": told})["kvTransfer"]
    assert unread == told


def test_pairs_of_another_revision_or_of_pods_that_are_gone_prove_nothing() -> None:
    shown = scene()
    (pair,) = shown.pairs.values()
    for wrong in (replace(pair, kv_revision="another"), replace(pair, decode_uid="gone")):
        status = said(replace(shown, pairs={wrong.key: wrong}))
        assert conditions(status)["KVTransferVerified"] == ("Unknown", "VerifyingKVTransfer")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda: slow(scene()), ("True", "SlowTransport")),
        (lambda: scene().verified(Verdict.FAILED, attempts=FAILED_ATTEMPTS), ("False", "TransferFailed")),
        (lambda: after_serving(scene().verified(Verdict.WRONG)), ("False", "WrongReuse")),
        (scene, ("True", "Verified")),
    ],
)
def test_an_operator_that_was_restarted_says_the_same(before: Callable[[], Scene], reason: tuple[str, str]) -> None:
    """It has forgotten every report, until the routers are asked again."""
    earlier = said(before())
    later = assess(replace(scene(), pairs={}, previous=earlier).situation())
    assert conditions(later.status)["KVTransferVerified"] == reason
    assert later.status == earlier
    assert later.transitions == ()


def test_an_engine_that_was_restarted_takes_nothing_away() -> None:
    shown = scene()
    restarted = shown.engine("decode", 0)
    restarted["metadata"]["uid"] = "another"
    status = said(after_serving(shown.with_pods(restarted)))
    assert conditions(status)["Ready"] == ("True", "Serving")
    failed = after_serving(shown.with_pods(restarted)).verified(Verdict.FAILED, attempts=FAILED_ATTEMPTS)
    assert conditions(said(failed))["Ready"] == ("False", "TransferFailed")


def test_wrong_reuse_is_over_with_the_engines_that_it_was_between() -> None:
    shown = after_serving(scene()).verified(Verdict.WRONG)
    status = said(shown)
    assert conditions(status)["Ready"] == ("False", "WrongReuse")
    restarted = shown.engine("decode", 0)
    restarted["metadata"]["uid"] = "another"
    unknown = replace(shown.with_pods(restarted), previous=status)
    assert conditions(said(unknown))["Ready"] == ("False", "WrongReuse")
    assert conditions(said(unknown.verified()))["Ready"] == ("True", "Serving")


def test_where_kv_goes_one_way_only_that_is_said() -> None:
    assert message(said(scene(kvTransfer__bidirectionalKvXfer=False)), "KVTransferVerified") == (
        "KV was seen to move from prefill to decode"
    )


def test_pull_failures_that_alternate_change_nothing() -> None:
    """The kubelet says one thing while it tries and another while it waits."""
    back_off = starting(waiting("ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {PULL}'))
    first = said(back_off)
    again = assess(replace(starting(waiting("ErrImagePull", PULL)), previous=first).situation())
    assert again.status == first
    assert again.transitions == ()


def pulling(shown: Scene, *trying: str) -> Scene:
    """No image for any engine that is not ready. Pods in ``trying`` are at their next try, the others wait for it."""
    for each in shown.pods:
        name = each["metadata"]["name"]
        if each["status"]["containerStatuses"][0]["state"].get("waiting"):
            back_off = waiting("ImagePullBackOff", f'Back-off pulling image "x": ErrImagePull: {PULL}')
            state = waiting("ErrImagePull", PULL) if name in trying else back_off
            shown = shown.with_pods(replaced(each, ("status", "containerStatuses"), [state]))
    return shown


def nothing_pulled() -> Scene:
    shown, state = scene(prefill__replicas=2), waiting("ErrImagePull", PULL)
    places = (("prefill", 0), ("prefill", 1), ("decode", 0))
    return shown.with_pods(*(shown.engine(*place, state, ready_since=NOW - 60) for place in places))


@pytest.mark.parametrize(
    "shown", [nothing_pulled(), rolling(waiting("ErrImagePull", PULL), partition=1)], ids=["new", "rolling"]
)
def test_failures_of_several_pods_to_pull_that_alternate_change_nothing(shown: Scene) -> None:
    names = {each["metadata"]["name"] for each in shown.pods}
    for first in sorted(names):
        began = said(pulling(shown, *names - {first}))
        settled = said(replace(pulling(shown), previous=began))
        assert conditions(settled)["Ready"][0] == "False"
        for trying in (*({each} for each in sorted(names)), names - {first}, names):
            assert said(replace(pulling(shown, *trying), previous=settled)) == settled


def test_of_several_pods_that_get_no_image_the_first_is_told_whichever_was_first_to_fail() -> None:
    shown = nothing_pulled()
    began = said(pulling(shown, "demo-prefill-0", "demo-prefill-1"))
    assert "demo-decode-0" in message(began)
    assert "demo-prefill-0" in message(said(replace(pulling(shown), previous=began)))


def test_crashes_that_alternate_with_runs_change_nothing() -> None:
    first = said(starting(crashing()))
    last = ending()
    for container in (running(ready=False, since=NOW - 20, restarts=5, last=last), ended(last, restarts=5)):
        again = assess(replace(starting(container), previous=first).situation())
        assert again.status == first


def test_while_pods_drain_nothing_changes_with_their_turns() -> None:
    first = said(scaling_down())
    for turns in (3, 2, 0):
        report = DrainReport(running_turns=turns, live_handles=turns)
        drains = {each["metadata"]["uid"]: report for each in scaling_down().pods}
        assert said(replace(scaling_down(), drains=drains, previous=first)) == first


def test_a_transition_has_the_time_of_its_status_and_not_of_its_reason() -> None:
    loading = starting(running(ready=False, since=NOW - 50))
    earlier = said(starting(waiting("ContainerCreating")))
    later = said(replace(loading, previous=earlier, now=NOW + 100))
    ready = {each["type"]: each["lastTransitionTime"] for each in later["conditions"]}
    assert ready["Ready"] == ready["Reconciling"] == "2027-01-15T08:00:00Z"
    done = said(replace(scene(), previous=later, now=NOW + 200))
    times = {each["type"]: each["lastTransitionTime"] for each in done["conditions"]}
    assert times["Ready"] == "2027-01-15T08:03:20Z"
    assert times["PrefillReady"] == "2027-01-15T08:00:00Z"


@pytest.mark.parametrize(
    ("shown", "again_at"),
    [
        (lambda: starting(scheduled=unschedulable(NOW - 100)), NOW + 500),
        (lambda: stuck_in_termination(NOW - 10), NOW - 10 + TERMINATION_SLACK_SECONDS),
        (
            lambda: starting(running(ready=False, since=NOW - 20, restarts=3, last=ending())),
            NOW - 20 + 40 + CRASH_SLACK_SECONDS,
        ),
        (scene, None),
    ],
)
def test_what_time_alone_changes_is_assessed_again_then(shown: Callable[[], Scene], again_at: float | None) -> None:
    assert assess(shown().situation()).again_at == again_at


def test_events_tell_what_has_changed_and_only_that() -> None:
    first = assess(replace(scene(), pairs={}).situation())
    assert [(each.type, each.reason) for each in first.transitions] == [("Normal", "VerifyingKVTransfer")]
    second = assess(replace(scene(), previous=first.status).situation())
    assert [(each.type, each.reason) for each in second.transitions] == [("Normal", "Serving"), ("Normal", "Verified")]
    lost = replace(scene(decode__replicas=2).without_pods("demo-decode-1"), previous=second.status)
    third = assess(lost.situation())
    assert [(each.type, each.reason) for each in third.transitions] == [("Warning", "PartlyReady")]
    assert assess(replace(lost, previous=third.status).situation()).transitions == ()


def test_a_long_message_is_cut() -> None:
    told = 'no "' + "x" * 5000
    status = said(scene(), problems=(Problem(Reason.APPLY_FAILED, told),), step=None)
    assert len(message(status)) == 1000
    assert message(status).endswith("…")


def test_what_cannot_be_judged_for_now_stays_as_it_was() -> None:
    earlier = said(slow(scene()))
    status = assess(fault(replace(slow(scene()), previous=earlier))).status
    assert conditions(status)["KVTransferVerified"] == ("True", "SlowTransport")
    assert conditions(status)["Degraded"] == ("True", "SlowTransport")
    assert status["decode"]["revision"] == earlier["decode"]["revision"]
    unread = scene().situation(resource=None, facts=None, step=None, wanted_revision="", previous=earlier)
    status = assess(unread).status
    assert status["url"] == earlier["url"]
    assert status["engineTemplate"] == earlier["engineTemplate"]
    assert status["decode"]["desired"] == 1
