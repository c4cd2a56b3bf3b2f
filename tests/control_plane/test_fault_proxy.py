"""The proxy in front of the API server does what the tests of the operator take for granted."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.harness.fault_proxy import (
    CutWatch,
    Delay,
    Drop,
    ExpireWatch,
    FaultProxy,
    Hold,
    MuteWatch,
    Refuse,
    is_watch,
    is_write,
    parse,
)
from tests.harness.kube import Kube

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def proxy(control_plane: Cluster, tmp_path: Path) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane.kubeconfig, tmp_path) as running:
        yield running


class Watch:
    """A watch on the ConfigMaps of a namespace, through the proxy."""

    def __init__(self, proxy: FaultProxy, namespace: str, **query: str) -> None:
        document = json.loads(proxy.kubeconfig.read_text())
        self._connection = http.client.HTTPConnection(urlsplit(document["clusters"][0]["cluster"]["server"]).netloc)
        text = "".join(f"&{name}={value}" for name, value in query.items())
        self._connection.request(
            "GET",
            f"/api/v1/namespaces/{namespace}/configmaps?watch=true&sendInitialEvents=true"
            f"&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true{text}",
            headers={"Authorization": f"Bearer {document['users'][0]['user']['token']}"},
        )
        self.answer = self._connection.getresponse()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def event(self, *, seconds: float | None = None) -> Any:
        """The next event; None at the end. Raises TimeoutError where none comes for that long."""
        assert self._connection.sock is not None
        self._connection.sock.settimeout(seconds)
        line = self.answer.readline()
        return json.loads(line) if line else None


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


@pytest.mark.parametrize(
    ("method", "path", "watch", "verb", "target"),
    [
        ("GET", "/api/v1/pods?limit=5", False, "list", ("", "pods", "", "", "")),
        ("GET", "/api/v1/namespaces/a/pods/b", False, "get", ("", "pods", "a", "b", "")),
        ("GET", "/api/v1/namespaces/a", False, "get", ("", "namespaces", "", "a", "")),
        ("GET", "/apis/apps/v1/deployments?watch=1", True, "watch", ("apps", "deployments", "", "", "")),
        ("PATCH", "/apis/k/v1/namespaces/a/ds/b/status?x", False, "patch", ("k", "ds", "a", "b", "status")),
        ("POST", "/api/v1/namespaces/a/events", False, "create", ("", "events", "a", "", "")),
        ("DELETE", "/api/v1/namespaces/a/pods/b", False, "delete", ("", "pods", "a", "b", "")),
        ("GET", "/apis/apps/v1", False, "get", ("apps", "", "", "", "")),
        ("GET", "/version", False, "get", ("", "", "", "", "")),
    ],
)
def test_a_request_line_is_read_as_the_api_server_reads_it(
    method: str, path: str, watch: bool, verb: str, target: tuple[str, ...]
) -> None:
    seen = parse(method, path, watch=watch)
    assert (seen.verb, seen.method, seen.path) == (verb, method, path)
    assert (seen.group, seen.plural, seen.namespace, seen.name, seen.subresource) == target


def test_requests_go_through_and_are_noted(proxy: FaultProxy, namespace_cp: Kubectl) -> None:
    assert namespace_cp.namespace is not None
    kube = Kube(proxy.kubeconfig)
    kube.create(config_map("big", text="x" * 300_000), namespace_cp.namespace)
    # A long list comes compressed.
    (found,) = kube.list("ConfigMap", namespace_cp.namespace, selector="!none")[:1]
    assert kube.get("ConfigMap", namespace_cp.namespace, "big") is not None
    assert found["metadata"]["namespace"] == namespace_cp.namespace
    assert [(seen.verb, seen.plural, seen.name) for seen in proxy.requests] == [
        ("create", "configmaps", ""),
        ("list", "configmaps", ""),
        ("get", "configmaps", "big"),
    ]


def test_the_identity_stays_the_same(proxy: FaultProxy) -> None:
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = Kube(proxy.kubeconfig).request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=review)
    assert answer.body["status"]["userInfo"]["username"] == "admin"


@pytest.mark.parametrize("status", [409, 410, 429, 500, 503, 504])
def test_a_refusal_is_a_status_and_does_not_reach_the_api_server(
    proxy: FaultProxy, namespace_cp: Kubectl, status: int
) -> None:
    assert namespace_cp.namespace is not None
    rule = proxy.fail(is_write, Refuse(status, retry_after=7))
    with Client(proxy) as client:
        answer = client.create(namespace_cp.namespace, "made")
        assert (answer.status, answer.retry_after) == (status, "7")
        assert (answer.body["kind"], answer.body["code"]) == ("Status", status)
        assert rule.used == 1
        # Created only now: the first request did not reach it.
        assert client.create(namespace_cp.namespace, "made").status == 201


@pytest.mark.parametrize("applied", [True, False])
def test_a_dropped_request_was_applied_or_not(
    proxy: FaultProxy, namespace_cp: Kubectl, kube: Kube, applied: bool
) -> None:
    assert namespace_cp.namespace is not None
    proxy.fail(is_write, Drop(applied=applied))
    with Client(proxy) as client, pytest.raises((http.client.HTTPException, ConnectionError)):
        client.create(namespace_cp.namespace, "made")
    assert (kube.get("ConfigMap", namespace_cp.namespace, "made") is not None) == applied


def test_a_held_request_gets_no_answer_and_others_do(proxy: FaultProxy) -> None:
    proxy.fail(lambda seen: seen.path == "/version", Hold(), times=None)
    with Client(proxy, seconds=0.5) as impatient, pytest.raises(TimeoutError):
        impatient.get("/version")
    with Client(proxy) as client:
        assert client.get("/api").status == 200


def test_a_delayed_answer_comes_after_the_request_was_dealt_with(
    proxy: FaultProxy, namespace_cp: Kubectl, kube: Kube
) -> None:
    assert namespace_cp.namespace is not None
    proxy.fail(is_write, Delay(0.2))
    with Client(proxy) as client:
        assert client.create(namespace_cp.namespace, "late").status == 201
    proxy.fail(is_write, Delay(600))
    with Client(proxy, seconds=0.5) as impatient, pytest.raises(TimeoutError):
        impatient.create(namespace_cp.namespace, "later")
    assert kube.get("ConfigMap", namespace_cp.namespace, "later") is not None


def test_rules_count_skip_and_take_every_so_many(proxy: FaultProxy) -> None:
    rule = proxy.fail(lambda _: True, Refuse(503), times=2, skip=1, every=2)
    with Client(proxy) as client:
        assert [client.get("/version").status for _ in range(8)] == [200, 503, 200, 503, 200, 200, 200, 200]
        assert (rule.used, len(proxy.requests)) == (2, 8)
        proxy.fail(lambda _: True, Refuse(500), times=None)
        assert [client.get("/version").status for _ in range(2)] == [500, 500]
        proxy.clear()
        assert client.get("/version").status == 200


def test_a_watch_streams_event_by_event(proxy: FaultProxy, namespace_cp: Kubectl, kube: Kube) -> None:
    assert namespace_cp.namespace is not None
    with Watch(proxy, namespace_cp.namespace) as watch:
        _read_to_bookmark(watch)
        kube.create(config_map("new"), namespace_cp.namespace)
        event = watch.event(seconds=60)
        assert (event["type"], event["object"]["metadata"]["name"]) == ("ADDED", "new")


@pytest.mark.parametrize("half", [True, False])
def test_a_watch_breaks_in_the_middle(proxy: FaultProxy, namespace_cp: Kubectl, kube: Kube, half: bool) -> None:
    assert namespace_cp.namespace is not None
    for name in ("a", "b", "c"):
        kube.create(config_map(name), namespace_cp.namespace)
    proxy.fail(is_watch, CutWatch(2, half=half))
    with Watch(proxy, namespace_cp.namespace) as watch:
        assert [watch.event(seconds=60)["type"] for _ in range(2)] == ["ADDED", "ADDED"]
        rest = b""
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            rest = watch.answer.readline()
        assert (b"ADDED" in rest) == half
        assert not rest.endswith(b"\n")
    with Watch(proxy, namespace_cp.namespace) as watch:
        _read_to_bookmark(watch)


def test_a_mute_watch_stays_open_and_says_nothing(proxy: FaultProxy, namespace_cp: Kubectl, kube: Kube) -> None:
    assert namespace_cp.namespace is not None
    proxy.fail(is_watch, MuteWatch(0))
    with Watch(proxy, namespace_cp.namespace) as watch:
        kube.create(config_map("new"), namespace_cp.namespace)
        with pytest.raises(TimeoutError):
            watch.event(seconds=0.5)


def test_a_watch_s_version_is_too_old_at_once_or_in_the_stream(proxy: FaultProxy, namespace_cp: Kubectl) -> None:
    assert namespace_cp.namespace is not None
    proxy.fail(is_watch, Refuse(410))
    with Watch(proxy, namespace_cp.namespace) as watch:
        assert watch.answer.status == 410
    proxy.fail(is_watch, ExpireWatch(0))
    with Watch(proxy, namespace_cp.namespace) as watch:
        event = watch.event(seconds=60)
        assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
        assert watch.event(seconds=60) is None


def _read_to_bookmark(watch: Watch) -> None:
    while watch.event(seconds=60)["type"] != "BOOKMARK":
        pass


class Client:
    """Requests through the proxy, over one connection."""

    def __init__(self, proxy: FaultProxy, *, seconds: float = 60) -> None:
        document = json.loads(proxy.kubeconfig.read_text())
        server = urlsplit(document["clusters"][0]["cluster"]["server"]).netloc
        self._headers = {
            "Authorization": f"Bearer {document['users'][0]['user']['token']}",
            "Content-Type": "application/json",
        }
        self._connection = http.client.HTTPConnection(server, timeout=seconds)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str) -> Answer:
        return self._answer("GET", path, None)

    def create(self, namespace: str, name: str) -> Answer:
        """A ConfigMap."""
        return self._answer("POST", f"/api/v1/namespaces/{namespace}/configmaps", json.dumps(config_map(name)))

    def _answer(self, method: str, path: str, body: str | None) -> Answer:
        self._connection.request(method, path, body, self._headers)
        with self._connection.getresponse() as answer:
            return Answer(answer.status, answer.headers.get("Retry-After"), json.loads(answer.read()))


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    retry_after: str | None
    body: Any
