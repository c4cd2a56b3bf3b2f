"""The life of a resource with one engine of each role: served, repaired, scaled, and without one of its engines."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from kvloop_connector.settings import Role
from kvloop_operator import names
from tests.cluster.audit import AuditLog
from tests.harness.deployment import Deployment, spec
from tests.harness.inside import Pending
from tests.harness.installation import Installation
from tests.harness.kube import Object

# The first test also waits for the node, and for the build of the images.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_well")]


def _question(*words: str) -> dict[str, str]:
    return {"role": "user", "content": " ".join(words * 150)}


def _answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _wanted(found: Object | None) -> list[Any]:
    assert found is not None
    return [found["metadata"]["labels"], found.get("spec"), found.get("data")]


@pytest.fixture
def served(shared: Deployment, kvloop_images: dict[str, str]) -> Deployment:
    """One engine of each role, served, whatever the test before has left."""
    shared.apply(spec(kvloop_images["sim"]))
    shared.wait_until_served()
    return shared


def test_a_resource_that_kubectl_applies_serves_turns_and_the_second_reuses_kv(served: Deployment) -> None:
    transfer = served.conditions()["KVTransferVerified"]
    assert (transfer["status"], transfer["reason"]) == ("True", "Verified")

    (prefill,), (decode,) = served.engines(Role.PREFILL), served.engines(Role.DECODE)
    start = served.metrics(prefill), served.metrics(decode)
    history = [_question("morning")]
    first = served.chat(history)
    cold = served.metrics(prefill) - start[0]
    assert first.headers["x-kvloop-path"] == "cold"
    assert (first.headers["x-kvloop-prefill"], first.headers["x-kvloop-decode"]) == (prefill.name, decode.name)
    assert (cold.reads, cold.external_hits) == (0, 0)

    text = first.json["choices"][0]["message"]["content"]
    second = served.chat([*history, _answered(text), _question("evening")])
    warm = served.metrics(prefill) - start[0] - cold
    reused = int(second.headers["x-kvloop-reused-tokens"])
    assert second.headers["x-kvloop-path"] == "warm"
    assert reused >= 300
    # The engines' own account: prefill read that much from decode, and decode read both turns from prefill.
    assert (warm.reads, warm.external_hits) == (1, reused)
    assert warm.bytes_read > 0
    assert (served.metrics(decode) - start[1]).reads == 2

    (row,) = served.kubectl("get", "dinf", "--no-headers").splitlines()
    assert row.split()[:6] == [served.name, "kvloop/demo-model", "1/1", "1/1", "True", "Serving"]


def test_what_somebody_edits_is_repaired_also_after_the_operator_ended_in_between(
    served: Deployment, kvloop: Installation, audit: AuditLog
) -> None:
    engines = served.engines()
    kvloop.kill_operator()
    edits: dict[tuple[str, str], dict[str, Any]] = {
        ("Service", "demo-router"): {"spec": {"ports": [{"name": "http", "port": 9999, "targetPort": "http"}]}},
        ("ConfigMap", "demo-router"): {"data": {names.ROUTER_CONFIG_KEY: "nonsense"}},
        ("StatefulSet", "demo-decode"): {"metadata": {"labels": {names.LABEL_ROLE: None}}},
        ("NetworkPolicy", "demo-prefill"): {"spec": {"ingress": []}},
        ("Deployment", "demo-router"): {"spec": {"replicas": 2}},
    }
    before = {what: served.kube.get(what[0], served.namespace, what[1]) for what in edits}
    for (kind, name), patch in edits.items():
        served.kube.patch(kind, served.namespace, name, patch)
    kvloop.wait_until_ready()
    since = kvloop.wait_until_quiet()
    for (kind, name), was in before.items():
        assert _wanted(served.kube.get(kind, served.namespace, name)) == _wanted(was)
    # Nothing of this was a reason to touch an engine, and at rest nothing is written.
    assert served.engines() == engines
    kvloop.wait_for_resyncs(2)
    assert kvloop.writes(since) == []
    served.wait_until_served()
    served.chat([_question("repaired")])


def test_fewer_engines_come_by_draining_and_a_drain_can_be_taken_back(served: Deployment) -> None:
    served.kubectl("scale", f"dinf/{served.name}", "--replicas=2")
    served.wait_until_served()
    assert served.resource()["status"]["decode"]["summary"] == "2/2"
    at: dict[str, Pending] = {}
    for word in ("one", "other"):
        stream = served.begin([_question(word)], stream=True, max_tokens=1500, ignore_eos=True)
        at[stream.headers()["x-kvloop-decode"]] = stream
    # Each went where there was less to do.
    assert at.keys() == {"demo-decode-0", "demo-decode-1"}

    served.kubectl("scale", f"dinf/{served.name}", "--replicas=1")
    served.wait_until(lambda: served.engine("demo-decode-1").draining, what="the engine to drain")
    served.wait_for("Reconciling", "True", reason="Draining")
    assert served.chat([_question("meanwhile")]).headers["x-kvloop-decode"] == "demo-decode-0"

    served.kubectl("scale", f"dinf/{served.name}", "--replicas=2")
    served.wait_until(lambda: not served.engine("demo-decode-1").draining, what="the drain to be taken back")
    # No question twice: the handle of the first answer would keep it where that is.
    turn = count()
    served.wait_until(
        lambda: _routed_to(served, "demo-decode-1", f"turn {next(turn)}"), what="turns at the engine that drained"
    )

    leaving = served.engine("demo-decode-1").uid

    def gone_at() -> float | None:
        (pod,) = [pod for pod in served.engines() if pod.uid == leaving]
        return pod.deleted_at

    served.kubectl("scale", f"dinf/{served.name}", "--replicas=1")
    served.wait_until(lambda: gone_at() is not None, what="the engine to go")
    deleted_at = gone_at()
    answer = at["demo-decode-1"].answer()
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("data: ") > 1500
    # Kubernetes counts in whole seconds.
    assert deleted_at is not None
    assert deleted_at >= answer.ended - 1
    served.wait_until_served()
    assert served.resource()["status"]["decode"]["summary"] == "1/1"


def _routed_to(served: Deployment, decode: str, word: str) -> bool:
    return served.chat([_question(word)]).headers["x-kvloop-decode"] == decode


def test_an_engine_that_was_killed_is_another_one_and_nothing_of_the_old_is_used(served: Deployment) -> None:
    history = [_question("before")]
    first = served.chat(history).json["choices"][0]["message"]["content"]
    history += [_answered(first), _question("after")]
    (decode,) = served.engines(Role.DECODE)
    verified = served.resource()["status"]["kvTransfer"]["verifiedRevision"]

    # As kill -9 of the engine: nothing is answered.
    assert served.inside.begin("POST", f"{decode.url}/sim/crash", {}).answer().error
    served.wait_until(lambda: served.engine(decode.name).restarts == 1, what="the container to be started anew")
    served.wait_until_served()
    again = served.engine(decode.name)
    assert again.uid == decode.uid
    assert again.process != decode.process
    assert served.resource()["status"]["kvTransfer"]["verifiedRevision"] == verified

    answer = served.chat(history)
    assert answer.headers["x-kvloop-path"] == "cold"
    alone = served.chat(history, cache_salt="alone")
    text = answer.json["choices"][0]["message"]["content"]
    assert text == alone.json["choices"][0]["message"]["content"]
    third = served.chat([*history, _answered(text), _question("later")])
    assert third.headers["x-kvloop-path"] == "warm"

    def verified_anew() -> bool:
        return [pair["verdict"] for pair in served.admin("pairs")] == ["verified"]

    served.wait_until(verified_anew, what="the new engine verified by the router")


def test_an_image_that_is_not_there_stops_the_rollout_and_the_old_pair_serves_on(
    served: Deployment, kvloop_images: dict[str, str]
) -> None:
    served.edit(rollout={"maxSurge": 1})
    served.wait_until_served()
    engines = served.engines()
    served.edit(engine={"image": "localhost/kvloop-sim:not-there"})
    stalled = served.wait_for("Stalled", "True", reason="RolloutBlocked")
    assert "localhost/kvloop-sim:not-there" in stalled["message"]
    assert "the previous engines go on serving" in stalled["message"]
    conditions = served.conditions()
    assert (conditions["Ready"]["status"], conditions["Ready"]["reason"]) == ("False", "RolloutBlocked")
    (row,) = served.kubectl("get", "dinf", "--no-headers").splitlines()
    assert row.split()[4:6] == ["False", "RolloutBlocked"]
    first = served.chat([_question("still")])
    text = first.json["choices"][0]["message"]["content"]
    second = served.chat([_question("still"), _answered(text), _question("here")])
    assert second.headers["x-kvloop-path"] == "warm"

    served.edit(engine={"image": kvloop_images["sim"]})
    served.wait_until_served()
    served.wait_until(lambda: served.engines() == engines, what="the broken engines gone, the others untouched")
