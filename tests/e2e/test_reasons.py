"""Why a resource does not serve, with real containers: what the kubelet, engines and routers make the operator say.

Everything is applied at once, and each test waits for what is said of its own resource.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from kvloop_operator import names
from kvloop_operator.status import ConditionType, Reason
from kvloop_router.truth import FIRST_TURNS
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.harness.deployment import Deployment, spec
from tests.harness.inside import Inside
from tests.harness.installation import Installation
from tests.harness.kube import Kube
from tests.harness.told import Told

# The first test also waits for the node, and for the build of the images.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_well")]

NO_ENGINE: Final = "localhost/kvloop-sim:not-there"
NO_ROUTER: Final = "localhost/kvloop-router:not-there"
NO_SECRET: Final = "not-there"

# Every request fails until somebody orders otherwise, and an engine that has died stays to be looked at.
_AILING: Final = ["--sim-faults", json.dumps({"fail_requests": 1_000_000}), "--sim-dead-seconds", "3600"]
# Prefill engines read something else than what this one retains, and it is counted as moved.
_CORRUPT: Final = ["--sim-faults", json.dumps({"corrupt_reads": 1_000_000})]
_SLOW: Final = {"prefill_base": 2.0, "transfer_bytes_per_second": 20e6}


def _changed(wanted: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A spec with changes by path, as in ``decode__replicas=2``."""
    for path, value in changes.items():
        at, steps = wanted, path.split("__")
        for step in steps[:-1]:
            at = at.setdefault(step, {})
        at[steps[-1]] = value
    return wanted


def _specs(image: str) -> dict[str, dict[str, Any]]:
    """All resources, by name."""
    token = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": NO_SECRET, "key": "token"}}}
    changes: dict[str, dict[str, Any]] = {
        "imageless": {"engine__image": NO_ENGINE, "router__image": NO_ROUTER},
        "keyless": {"decode__env": [token]},
        "broken": {
            "prefill__resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "24Mi"}},
            "decode__args": ["--max-num-seqs", "many"],
        },
        "slow": {
            "network__efa": {"mode": "DevicePlugin"},
            "prefill__efaInterfaces": 1,
            "decode__efaInterfaces": 1,
            "engine__args": ["--sim-load-seconds=5", "--sim-timing", json.dumps(_SLOW)],
        },
        # What one role alone gets is not part of the KV revision: only the canary finds out that they differ.
        "unmatched": {"router__canary__enabled": False, "prefill__args": ["--sim-version=0.32.0"]},
        "pairs": {"decode__replicas": 2, "decode__args": _AILING},
        # Where computing takes no time, a busy machine may find it faster than pulling.
        "corrupt": {
            "engine__args": ["--sim-time-scale=0"],
            "decode__args": _CORRUPT,
            "router__pathChoice__mode": "Warm",
        },
        "living": {"rollout__maxSurge": 1},
    }
    return {name: _changed(spec(image), **change) for name, change in changes.items()}


@pytest.fixture(scope="module")
def place(node: Cluster, kvloop: Installation) -> Iterator[Kubectl]:
    """Where all of them are."""
    with node.namespace() as kubectl:
        yield kubectl


@pytest.fixture(scope="module")
def told(place: Kubectl, kvloop_images: dict[str, str]) -> Iterator[Told]:
    """All resources, and what is said of them from the beginning."""
    with Told(place) as told:
        resource = {"apiVersion": names.API_VERSION, "kind": names.KIND}
        wanted = _specs(kvloop_images["sim"])
        place.apply(*({**resource, "metadata": {"name": name}, "spec": spec} for name, spec in wanted.items()))
        yield told


@pytest.fixture
def deployed(place: Kubectl, told: Told, kube: Kube, inside: Inside) -> Callable[[str], Deployment]:
    """One of the resources by name, with its pods and engines."""
    return lambda name: Deployment(place, kube, inside, name=name)


@pytest.fixture(autouse=True)
def as_declared(request: pytest.FixtureRequest, told: Told) -> Iterator[None]:
    """A test brings about the reasons that it declares, and no other is asked for."""
    failures = request.session.testsfailed
    told.shown.clear()
    yield
    if request.session.testsfailed == failures:
        declared = request.node.get_closest_marker("produces")
        assert told.shown == set(declared.args if declared is not None else ())


@pytest.mark.produces(Reason.TRANSFER_FAILED, Reason.PAIR_FAILED, Reason.SERVING)
def test_kv_moves_in_one_pair_and_not_in_another(told: Told, deployed: Callable[[str], Deployment]) -> None:
    pairs, deployment = told.of("pairs"), deployed("pairs")
    words = "the canary fails between pairs-prefill-0 and pairs-decode-", "500", "network policies"
    pairs.has_said(ConditionType.KV_TRANSFER_VERIFIED, "False", Reason.TRANSFER_FAILED, *words)
    _heal(deployment, "pairs-decode-0")
    named = "the canary fails between pairs-prefill-0 and pairs-decode-1:", "500"
    pairs.says(ConditionType.DEGRADED, "True", Reason.PAIR_FAILED, *named)
    pairs.says(ConditionType.READY, "True", Reason.SERVING, "2 decode")
    _heal(deployment, "pairs-decode-1")


@pytest.mark.produces(Reason.SERVING, Reason.WRONG_REUSE)
def test_what_prefill_reads_is_not_what_decode_retained(told: Told, deployed: Callable[[str], Deployment]) -> None:
    corrupt, deployment = told.of("corrupt"), deployed("corrupt")
    corrupt.says(ConditionType.READY, "True", Reason.SERVING)
    history = [{"role": "user", "content": "a question that is long enough to be worth a pull. " * 30}]
    for _ in range(FIRST_TURNS + 30):
        answer = deployment.chat(history, max_tokens=80, ignore_eos=True).json["choices"][0]["message"]["content"]
        history += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
        if [pair["verdict"] for pair in deployment.admin("pairs")] == ["wrong"]:
            break
    words = "between corrupt-prefill-0 and corrupt-decode-0 was wrong", "delete both pods"
    corrupt.is_stalled_by(Reason.WRONG_REUSE, *words)
    corrupt.says(ConditionType.KV_TRANSFER_VERIFIED, "False", Reason.WRONG_REUSE, *words)


@pytest.mark.produces(Reason.CANARY_DISABLED)
def test_nobody_looks_whether_kv_moves(told: Told, deployed: Callable[[str], Deployment]) -> None:
    unmatched = told.of("unmatched")
    words = "whether KV moves cannot be known", "set router.canary.enabled"
    unmatched.says(ConditionType.READY, "Unknown", Reason.CANARY_DISABLED, *words)
    unmatched.says(ConditionType.KV_TRANSFER_VERIFIED, "Unknown", Reason.CANARY_DISABLED, *words)
    # For a test further below: canaries are tried again at growing intervals.
    deployed("unmatched").edit(router={"canary": {"enabled": True}})


@pytest.mark.produces(Reason.AS_EXPECTED, Reason.PARTLY_READY, Reason.UNHEALTHY)
def test_engines_die_one_after_the_other(told: Told, deployed: Callable[[str], Deployment]) -> None:
    pairs, deployment = told.of("pairs"), deployed("pairs")
    pairs.says(ConditionType.DEGRADED, "False", Reason.AS_EXPECTED)
    since = pairs.count
    _kill(deployment, "pairs-decode-1")
    remedy = "see its log; it is restarted if that goes on"
    why = "container engine of pairs-decode-1 runs, and fails its readiness probe", remedy
    words = "1 of 2 decode engines are ready", *why
    pairs.has_said(ConditionType.DECODE_READY, "True", Reason.PARTLY_READY, *words, since=since)
    pairs.has_said(ConditionType.DEGRADED, "True", Reason.PARTLY_READY, "pairs-decode 1/2 ready", *why, since=since)
    _kill(deployment, "pairs-decode-0")
    pairs.has_said(ConditionType.RECONCILING, "True", Reason.UNHEALTHY, "readiness probe", remedy, since=since)
    pairs.has_said(ConditionType.DEGRADED, "True", Reason.UNHEALTHY, "it served before", remedy, since=since)


@pytest.mark.produces(
    Reason.SERVING, Reason.ALL_READY, Reason.VERIFIED, Reason.AS_EXPECTED, Reason.UP_TO_DATE, Reason.SCALING_UP
)
def test_all_is_well_and_more_is_asked_for(told: Told, deployed: Callable[[str], Deployment]) -> None:
    living = told.of("living")
    living.says(ConditionType.READY, "True", Reason.SERVING, "1 prefill and 1 decode engines serve")
    for kind in (ConditionType.PREFILL_READY, ConditionType.DECODE_READY, ConditionType.ROUTER_READY):
        living.says(kind, "True", Reason.ALL_READY)
    living.says(ConditionType.KV_TRANSFER_VERIFIED, "True", Reason.VERIFIED, "in both directions")
    living.says(ConditionType.DEGRADED, "False", Reason.AS_EXPECTED)
    living.says(ConditionType.UPDATE_AVAILABLE, "False", Reason.UP_TO_DATE)
    deployed("living").edit(decode={"replicas": 2})
    living.has_said(ConditionType.RECONCILING, "True", Reason.SCALING_UP)
    living.says(ConditionType.READY, "True", Reason.SERVING, "1 prefill and 2 decode engines serve")


@pytest.mark.produces(Reason.DRAINING, Reason.ROLLING_OUT, Reason.ROLLOUT_BLOCKED, Reason.SERVING)
def test_fewer_are_asked_for_and_then_what_cannot_be(
    told: Told, deployed: Callable[[str], Deployment], kvloop_images: dict[str, str]
) -> None:
    living, since = told.of("living"), told.of("living").count
    deployed("living").edit(decode={"replicas": 1})
    words = "waiting for living-decode-1 to end once running turns are over", "as fewer are wanted"
    living.has_said(ConditionType.RECONCILING, "True", Reason.DRAINING, *words)
    living.says(ConditionType.READY, "True", Reason.SERVING, "1 prefill and 1 decode engines serve")
    deployed("living").edit(engine={"image": NO_ENGINE})
    living.has_said(ConditionType.RECONCILING, "True", Reason.ROLLING_OUT, since=since)
    living.is_stalled_by(Reason.ROLLOUT_BLOCKED, NO_ENGINE, "the previous engines go on serving")
    deployed("living").edit(engine={"image": kvloop_images["sim"]})
    living.says(ConditionType.READY, "True", Reason.SERVING)


@pytest.mark.produces(Reason.SUSPENDED, Reason.ALL_READY)
def test_nothing_is_to_serve(told: Told, deployed: Callable[[str], Deployment]) -> None:
    living, deployment = told.of("living"), deployed("living")
    deployment.edit(suspend=True)
    living.says(ConditionType.READY, "True", Reason.SUSPENDED, "spec.suspend is true", "the router answers 503")
    living.says(ConditionType.ROUTER_READY, "True", Reason.ALL_READY)
    answer = deployment.begin([{"role": "user", "content": "anybody there?"}]).answer()
    assert (answer.status, "retry-after" in answer.headers) == (503, True)


@pytest.mark.produces(Reason.IMAGE_PULL_FAILED)
def test_an_image_is_not_there(told: Told) -> None:
    imageless = told.of("imageless")
    remedy = "correct the image, or name a pull secret in spec.imagePullSecrets"
    imageless.is_stalled_by(Reason.IMAGE_PULL_FAILED, "container engine of imageless-", NO_ENGINE, remedy)
    words = "container router of imageless-router-", NO_ROUTER, remedy
    imageless.says(ConditionType.ROUTER_READY, "False", Reason.IMAGE_PULL_FAILED, *words)


@pytest.mark.produces(Reason.OUT_OF_MEMORY, Reason.CRASHING, Reason.ROUTER_NOT_READY)
def test_containers_end_again_and_again(told: Told) -> None:
    broken = told.of("broken")
    words = "container engine of broken-prefill-0", "more memory than its limit", "raise its memory limit"
    broken.is_stalled_by(Reason.OUT_OF_MEMORY, *words)
    words = "container engine of broken-decode-0", "exit code 2", "--max-num-seqs many: not a whole number"
    remedy = "kubectl logs broken-decode-0 --container=engine --previous"
    broken.says(ConditionType.DECODE_READY, "False", Reason.CRASHING, *words, remedy)
    broken.says(ConditionType.ROUTER_READY, "False", Reason.ROUTER_NOT_READY, "needs a ready pair of engines")


@pytest.mark.produces(Reason.LOADING_MODEL, Reason.VERIFYING_KV_TRANSFER, Reason.SLOW_TRANSPORT, Reason.SERVING)
def test_kv_moves_too_slowly_for_the_network_that_was_asked_for(told: Told) -> None:
    slow = told.of("slow")
    slow.has_said(ConditionType.RECONCILING, "True", Reason.LOADING_MODEL, "slow-", "loads the model")
    slow.has_said(ConditionType.RECONCILING, "True", Reason.VERIFYING_KV_TRANSFER, "yet to see KV move")
    named = "MB/s between slow-prefill-0 and slow-decode-0", "too slow for EFA", "libfabric in their image"
    slow.says(ConditionType.KV_TRANSFER_VERIFIED, "True", Reason.SLOW_TRANSPORT, *named)
    slow.says(ConditionType.DEGRADED, "True", Reason.SLOW_TRANSPORT, *named)
    slow.says(ConditionType.READY, "True", Reason.SERVING)


@pytest.mark.produces(Reason.CONTAINER_NOT_CREATED, Reason.ROUTER_UNREACHABLE, Reason.SERVING)
def test_a_secret_is_missing_and_another_was_changed(
    told: Told, deployed: Callable[[str], Deployment], place: Kubectl, kvloop: Installation
) -> None:
    keyless, deployment = told.of("keyless"), deployed("keyless")
    words = "container engine of keyless-decode-0", f'secret "{NO_SECRET}" not found', "create what the message names"
    keyless.is_stalled_by(Reason.CONTAINER_NOT_CREATED, *words)
    (router,) = deployment.pods(names.ROUTER)
    changed = {"data": {names.ADMIN_TOKEN_KEY: b64encode(b"another-token-" * 4).decode()}}
    deployment.kube.patch("Secret", deployment.namespace, names.router_name("keyless"), changed)
    kvloop.wait_for_resyncs(1)
    place("create", "secret", "generic", NO_SECRET, "--from-literal=token=known")
    words = router["metadata"]["name"], "refuses the token in its Secret", "delete the pod"
    keyless.waits_for(Reason.ROUTER_UNREACHABLE, *words)
    deployment.kube.delete("Pod", deployment.namespace, router["metadata"]["name"])
    keyless.says(ConditionType.READY, "True", Reason.SERVING)


@pytest.mark.produces(Reason.TRANSFER_FAILED)
def test_kv_does_not_move_at_all(told: Told) -> None:
    unmatched = told.of("unmatched")
    words = "unmatched-prefill-0 and unmatched-decode-0: no KV moved from prefill to decode", "network policies"
    unmatched.has_said(ConditionType.RECONCILING, "True", Reason.TRANSFER_FAILED, *words)
    unmatched.is_stalled_by(Reason.TRANSFER_FAILED, *words)


@pytest.mark.produces(Reason.TRANSFER_FAILED)
def test_engines_that_were_started_again_prove_anew_that_kv_moves(told: Told) -> None:
    """They had, before they died in a test further above; now they have their fault again."""
    told.of("pairs").is_stalled_by(Reason.TRANSFER_FAILED, "pairs-decode-0 and in 1 more pairs")


def test_at_rest_nothing_is_written(told: Told, place: Kubectl, kvloop: Installation) -> None:
    since = kvloop.wait_until_quiet()
    kvloop.wait_for_resyncs(3)
    # Those of tests before may be on their way out still.
    assert [event for event in kvloop.writes(since) if event.namespace == place.namespace] == []


def test_nothing_that_was_said_contradicts_itself(told: Told) -> None:
    assert told.contradictions() == []


def _heal(deployment: Deployment, pod: str) -> None:
    """Have an engine answer until it is started again."""
    deployment.inside.post(f"{deployment.engine(pod).url}/sim/faults", {})


def _kill(deployment: Deployment, pod: str) -> None:
    """Have an engine die as vLLM's core dies of a request: its API server goes on, and says so in /health."""
    engine = deployment.engine(pod).url
    body = {"model": "demo", "prompt": "x", "max_tokens": 1, "kv_transfer_params": {"do_remote_prefill": True}}
    deployment.inside.post(f"{engine}/v1/completions", body)
    assert deployment.inside.get(f"{engine}/health").status == 503
