"""A router learns of its engines from a real API server, with the account and the role that the operator gives it.

Pods are made through the API and nobody runs them: what a kubelet would say of them is written to their status.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml
from kubernetes.aio.config import incluster_config

from kvloop_connector.settings import Role
from kvloop_router.background import Background
from kvloop_router.config import parse
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.pod_watch import Patience, PodWatch
from kvloop_router.serving import serving
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.control_plane.api_front import ApiFront, fronting
from tests.control_plane.engine_pods import NAME, SECRETS, Known, Place, children
from tests.harness.engines import Kind, start
from tests.harness.kube import Kube
from tests.integration.router_process import TOKEN, Clock, RouterUnderTest, until
from tests.integration.simulated import spec

pytestmark = pytest.mark.timeout(1200)

HASTY = Patience(retry=0.05, longest_retry=0.2)
_CREATE_TOKEN = ("create", "token", f"{NAME}-router")
ACCESS = ("ServiceAccount", "Role", "RoleBinding")


@pytest.fixture
def place(kube: Kube, namespace_cp: Kubectl) -> Iterator[Place]:
    place = Place(kube, namespace_cp)
    namespace_cp.apply(*(child for child in children(place.namespace) if child["kind"] in ACCESS))
    yield place
    for pod in kube.list("Pod", place.namespace):
        place.let_go(pod["metadata"]["name"])


@pytest.fixture
def kubeconfig(control_plane: Cluster, place: Place) -> Path:
    """The router's."""
    return control_plane.service_account(place.namespace, f"{NAME}-router")


@pytest.fixture
async def front(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiFront]:
    """Between the API server and whoever connects by $KUBECONFIG."""
    async with fronting(kubeconfig) as (front, through):
        monkeypatch.setenv("KUBECONFIG", str(through))
        yield front


@asynccontextmanager
async def watching(place: Place, patience: Patience = HASTY) -> AsyncIterator[Known]:
    """Discovery as a router runs it, by $KUBECONFIG."""
    known, background = Known(), Background()
    watch = PodWatch(
        NAME, place.namespace, known.update, random=Random(7), patience=patience, interrupted=known.interruptions.append
    )
    background.serve(watch.run, "discovery")
    try:
        yield known
    finally:
        await background.close()


async def test_a_pod_is_an_engine_while_its_process_runs(
    place: Place, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    place.add("starting")
    uid = place.add("serving", address="10.0.0.7")
    async with watching(place) as known:
        await known.until_named("serving")
        assert known.engines["serving"] == EngineSpec(
            name="serving",
            role=Role.DECODE,
            url="http://10.0.0.7:8000",
            pod_uid=uid,
            process=f"{uid}/containerd://1",
            kv_revision="abc",
            checked=True,
        )

        place.says("starting", address="10.0.0.8")
        await known.until_named("serving", "starting")
        place.label("serving", "kvloop.io/draining", "1764460800")
        await known.until(lambda engines: engines["serving"].draining)
        place.label("serving", "kvloop.io/draining", None)
        await known.until(lambda engines: not engines["serving"].draining)
        place.says("serving", address="10.0.0.7", ready=False)
        await known.until(lambda engines: not engines["serving"].ready)
        place.says("serving", address="10.0.0.7", process="2")
        await known.until(lambda engines: engines["serving"].process == f"{uid}/containerd://2")

        place.delete("serving")
        await known.until(lambda engines: engines["serving"].draining)
        place.says("serving", address="10.0.0.7", process="2", ready=False)
        await known.until(lambda engines: not engines["serving"].ready)
        place.says("serving", address="10.0.0.7", process="2", ready=False, runs=False)
        await known.until_named("starting")
        place.let_go("serving")
    assert known.interruptions == []


async def test_pods_of_others_are_not_seen(
    control_plane: Cluster, kube: Kube, place: Place, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    place.add("router", "router", address="10.0.0.2")
    place.add("other", deployment="other", address="10.0.0.3")
    async with watching(place) as known:
        place.add("first", address="10.0.0.4")
        place.add("second", "prefill", address="10.0.0.5")
        await known.until_named("first", "second")
    assert {engine.name for engines in known.told for engine in engines} == {"first", "second"}


async def test_whatever_happened_while_the_api_server_was_away_is_made_good(place: Place, front: ApiFront) -> None:
    for name in ("stays", "goes", "drains", "is-replaced"):
        place.add(name, address="10.0.0.1")
    async with watching(place) as known:
        await known.until_named("stays", "goes", "drains", "is-replaced")
        before, asked = dict(known.engines), len(front.asked)
        front.away = True
        front.cut()
        place.delete("goes")
        place.let_go("goes")
        place.label("drains", "kvloop.io/draining", "1")
        place.delete("is-replaced")
        place.let_go("is-replaced")
        uid = place.add("is-replaced", address="10.0.0.9")
        place.add("joins", address="10.0.0.1")
        await until(lambda: len(front.asked) > asked + 2)
        assert known.engines == before, "the engines that were known last stay in use"

        front.away = False
        await known.until_named("stays", "drains", "is-replaced", "joins")
        assert known.engines["drains"].draining
        assert known.engines["stays"] == before["stays"]
        assert known.engines["is-replaced"].pod_uid == uid
    assert set(known.interruptions) == {"failed"}


async def test_a_watch_that_is_cut_again_and_again_misses_nothing(place: Place, front: ApiFront) -> None:
    async with watching(place) as known:
        for number in range(8):
            name = f"engine-{number}"
            place.add(name, address="10.0.0.1")
            if number % 2:
                front.cut()
            place.label(name, "kvloop.io/draining", "1")
            if number % 3:
                front.cut()
            await known.until_draining(name)
            if number >= 2:
                gone = f"engine-{number - 2}"
                place.delete(gone)
                front.cut()
                place.let_go(gone)
                await known.until_gone(gone)
        assert set(known.engines) == {"engine-6", "engine-7"}


async def test_a_watch_that_stays_silent_is_opened_anew(place: Place, front: ApiFront) -> None:
    place.add("first", address="10.0.0.1")
    patience = Patience(retry=0.05, longest_retry=0.2, silence=1.0)
    async with watching(place, patience) as known:
        await known.until_named("first")
        await until(lambda: "watch" in front.asked)
        front.stall()
        place.add("second", address="10.0.0.2")
        await known.until_named("first", "second")
    assert "timeout" in known.interruptions


async def test_a_version_that_the_api_server_has_forgotten_leads_to_a_new_list(place: Place, front: ApiFront) -> None:
    # The API server remembers all that ever happened to pods, but not what was before it knew our kind.
    rules = [{"apiGroups": ["kvloop.io"], "resources": ["disaggregatedinferences"], "verbs": ["watch"]}]
    reads = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "reads"}}
    place.kube.create({**reads, "kind": "Role", "rules": rules}, place.namespace)
    binds = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reads"},
        "subjects": [{"kind": "ServiceAccount", "name": f"{NAME}-router"}],
    }
    place.kube.create({**reads, "kind": "RoleBinding", **binds}, place.namespace)
    place.add("first", address="10.0.0.1")
    async with watching(place) as known:
        await known.until_named("first")
        front.forgotten = f"/apis/kvloop.io/v1alpha1/namespaces/{place.namespace}/disaggregatedinferences"
        await until(lambda: "watch" in front.asked)
        front.cut()
        await until(lambda: "expired" in known.interruptions)
        front.forgotten = None
        place.add("second", address="10.0.0.2")
        await known.until_named("first", "second")


async def test_a_watch_that_ends_by_its_time_goes_on_from_where_it_was(place: Place, front: ApiFront) -> None:
    place.add("first", address="10.0.0.1")
    async with watching(place, Patience(retry=0.05, watch=1.0)) as known:
        await known.until_named("first")
        await until(lambda: front.asked.count("watch") == 3, seconds=60)
        place.add("second", address="10.0.0.2")
        await known.until_named("first", "second")
    assert front.asked.count("list") == 1
    assert known.interruptions == []
    assert len(known.told) == 2, "what did not change is not told again"


async def test_rights_that_are_given_later_are_made_use_of(place: Place, front: ApiFront) -> None:
    binding = place.kube.get("RoleBinding", place.namespace, f"{NAME}-router")
    assert binding is not None
    place.kube.delete("RoleBinding", place.namespace, f"{NAME}-router")
    place.add("first", address="10.0.0.1")
    async with watching(place) as known:
        await until(lambda: known.interruptions.count("failed") > 2)
        assert known.told == []
        given = {field: binding[field] for field in ("apiVersion", "kind", "roleRef", "subjects")}
        place.kube.create({**given, "metadata": {"name": f"{NAME}-router"}}, place.namespace)
        await known.until_named("first")


async def test_a_token_that_is_refused_is_read_anew(
    control_plane: Cluster, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kubelet replaces the token of a pod, on which the router depends where it runs."""
    cluster = place.kubectl.json("config", "view", "--raw")["clusters"][0]["cluster"]
    server = urlsplit(cluster["server"])
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    authority.write_bytes(b64decode(cluster["certificate-authority-data"]))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", server.hostname or "")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port or 443))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    place.kubectl("create", "secret", "generic", "bound")
    token.write_text(place.kubectl(*_CREATE_TOKEN, "--bound-object-kind=Secret", "--bound-object-name=bound").strip())
    place.add("first", address="10.0.0.1")
    async with watching(place, Patience(retry=0.05, longest_retry=0.2, watch=1.0)) as known:
        await known.until_named("first")
        place.kube.delete("Secret", place.namespace, "bound")
        await until(lambda: "failed" in known.interruptions, seconds=60)
        token.write_text(place.kubectl(*_CREATE_TOKEN).strip())
        place.add("second", address="10.0.0.2")
        await known.until_named("first", "second")


async def test_a_router_serves_with_the_engines_that_the_api_server_names(
    place: Place, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    question = "read the ticket, look at the code, run the tests and say what they tell you. " * 12
    sampling: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
    with start(Kind.SIM, tmp_path / "engines", [spec(Role.PREFILL), spec(Role.DECODE), spec(Role.DECODE)]) as engines:
        (prefill,), (first, second) = engines.prefill, engines.decode
        uids = {"p-0": place.add("p-0", "prefill", address=prefill.host)}
        uids["d-0"] = place.add("d-0", address=first.host)
        async with serving_by(place, tmp_path) as router:
            assert router.router is not None
            pairs, pool = router.router.pairs, router.router.engines
            await until(lambda: [report.verdict for report in pairs.reports()] == ["verified"], seconds=60)
            (pair,) = (await router.admin("/admin/v1/pairs"))["pairs"]
            one = await router.chat(question, **sampling)
            place.says("d-0", address=first.host, ready=False)
            await until(lambda: {engine.spec.name for engine in pool if engine.serving} == {"p-0"}, seconds=60)
            unready = await router.get("/readyz")
            place.says("d-0", address=first.host)

            uids["d-1"] = place.add("d-1", address=second.host)
            place.label("d-0", "kvloop.io/draining", "1764460800")
            await until(lambda: {engine.spec.name for engine in pool if engine.serving} == {"p-0", "d-1"}, seconds=60)
            two = await router.chat(question, one.content, "go on", **sampling)
            told = {engine["name"]: engine for engine in (await router.admin("/admin/v1/engines"))["engines"]}
            place.delete("d-0")
            place.let_go("d-0")
            await until(lambda: {engine.spec.name for engine in pool} == {"p-0", "d-1"}, seconds=60)
            three = await router.chat(question, one.content, "go on", two.content, "and now?", **sampling)
            ready = await router.get("/readyz")

    assert (pair["prefillPodUID"], pair["decodePodUID"]) == (uids["p-0"], uids["d-0"])
    assert {name: engine["podUID"] for name, engine in told.items()} == uids
    assert {name for name, engine in told.items() if engine["draining"]} == {"d-0"}
    assert (told["d-0"]["runningTurns"], told["d-0"]["liveHandles"]) == (0, 0)
    assert [turn.path for turn in (one, two, three)] == ["cold", "warm", "warm"]
    assert [turn.headers["X-Kvloop-Decode"] for turn in (one, two, three)] == ["d-0", "d-1", "d-1"]
    assert (unready.status, ready.status) == (503, 200)


@asynccontextmanager
async def serving_by(place: Place, directory: Path) -> AsyncIterator[RouterUnderTest]:
    """A router with the configuration that the operator writes, but for addresses and files of this machine."""
    (text,) = [child["data"]["router.yaml"] for child in children(place.namespace) if child["kind"] == "ConfigMap"]
    document = yaml.safe_load(text)
    for name, content in (("digest-key", SECRETS.digest_key), ("admin-token", TOKEN)):
        (directory / name).write_text(content)
    document["listen"] = {"host": "127.0.0.1", "port": 0}
    document["admin"] = {**document["listen"], "tokenFile": str(directory / "admin-token")}
    document["digestKeyFile"] = str(directory / "digest-key")
    config, clock = parse(yaml.safe_dump(document), {"POD_NAMESPACE": place.namespace}), Clock()
    async with serving(config, clock=clock, random=Random(7)) as router, aiohttp.ClientSession() as session:
        yield RouterUnderTest(
            url="http://{}:{}".format(*router.address),
            admin_url="http://{}:{}".format(*router.admin_address),
            engines_file=directory / "none",
            session=session,
            clock=clock,
            router=router,
        )


def test_routers_are_let_in_where_pods_have_to_be_restricted(control_plane: Cluster) -> None:
    with control_plane.namespace(labels={"pod-security.kubernetes.io/enforce": "restricted"}) as kubectl:
        assert kubectl.namespace is not None
        own = [child for child in children(kubectl.namespace) if child["metadata"]["name"] == f"{NAME}-router"]
        kubectl.apply(*own)
        kubectl.wait("create", "pod", "--selector=kvloop.io/role=router")
