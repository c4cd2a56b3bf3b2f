"""The node runs real pods: names, Services, restarts, devices, memory limits; the images of this checkout start."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.errors import CommandFailedError
from tests.cluster.fixtures import skip_where_unavailable
from tests.cluster.kubectl import Kubectl, Manifest
from tests.cluster.waiting import wait_until

# The first test also waits for the node, and the first image for the build of all.
pytestmark = pytest.mark.timeout(1200)

_PROGRAM: Final = """
import http.server, os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answer = os.environ["HOSTNAME"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""
_FETCH: Final = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode(), end='')"
_RESTRICTED: Final = {"pod-security.kubernetes.io/enforce": "restricted"}


def _container(image: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "image": image,
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        **more,
    }


def _pod(*containers: Manifest, **more: Any) -> dict[str, Any]:
    return {
        "containers": list(containers),
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        **more,
    }


def _service(name: str, *, headless: bool) -> Manifest:
    spec: dict[str, Any] = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]}
    if headless:
        spec["clusterIP"] = "None"
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _web(image: str, replicas: int) -> list[Manifest]:
    server = _container(
        image,
        command=["python3", "-c", _PROGRAM],
        readinessProbe={"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
        resources={"limits": {"memory": "128Mi", "nvidia.com/gpu": 1, "vpc.amazonaws.com/efa": 2}},
    )
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "web"},
        "spec": {
            "serviceName": "web",
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": _pod(server)},
        },
    }
    return [_service("web", headless=True), _service("front", headless=False), stateful_set]


def _fetch(kubectl: Kubectl, url: str) -> str | None:
    """What a pod gets from a URL; None where it gets nothing, as names and rules trail the pods by a moment."""
    try:
        return kubectl("exec", "web-0", "--", "python3", "-c", _FETCH, url)
    except CommandFailedError:
        return None


def _uid(kubectl: Kubectl, pod: str) -> str:
    return str(kubectl.get("pod", pod)["metadata"]["uid"])


def test_a_stateful_set_lives_its_whole_life(node: Cluster, base_image: str) -> None:
    with node.namespace(labels=_RESTRICTED) as kubectl:
        kubectl.apply(*_web(base_image, 3))
        kubectl.wait("jsonpath={.status.readyReplicas}=3", "statefulset/web")

        front = f"http://front.{kubectl.namespace}.svc.cluster.local"
        wait_until(lambda: _fetch(kubectl, "http://web-1.web:8080") == "web-1", what="a pod reached by its name")
        wait_until(
            lambda: _fetch(kubectl, front) in {"web-0", "web-1", "web-2"}, what="the Service reached by its name"
        )

        killed = _uid(kubectl, "web-1")
        kubectl("delete", "pod", "web-1", "--grace-period=0", "--force")
        kubectl.wait("jsonpath={.status.readyReplicas}=3", "statefulset/web")
        kubectl.wait("condition=Ready", "pod/web-1")
        assert _uid(kubectl, "web-1") != killed

        kubectl("scale", "statefulset/web", "--replicas=1")
        kubectl.wait("delete", "pod/web-1", "pod/web-2")
        kubectl.wait("jsonpath={.status.readyReplicas}=1", "statefulset/web")

        kubectl("delete", "statefulset/web", "--cascade=foreground")
        assert kubectl.list("pods") == []


def test_the_audit_log_shows_who_killed_a_pod_and_who_made_the_next(
    node: Cluster, namespace: Kubectl, base_image: str
) -> None:
    with skip_where_unavailable():
        audit = node.audit
    namespace.apply(*_web(base_image, 1))
    namespace.wait("jsonpath={.status.readyReplicas}=1", "statefulset/web")
    since = audit.from_now()
    namespace("delete", "pod", "web-0")

    pods = [event for event in since.events() if event.namespace == namespace.namespace and event.resource == "pods"]
    assert ("admin", "delete", "web-0", 200) in [(event.user, event.verb, event.name, event.code) for event in pods]
    # Tries before the old one was gone ended with 409.
    made = since.wait_for(
        lambda event: (
            (event.verb, event.resource, event.subresource, event.namespace, event.code)
            == ("create", "pods", "", namespace.namespace, 201)
        )
    )
    assert {event.user for event in made} == {"system:kube-controller-manager"}


def test_a_process_that_dies_is_started_anew_in_its_pod(namespace: Kubectl, base_image: str) -> None:
    namespace.apply(*_web(base_image, 1))
    namespace.wait("jsonpath={.status.readyReplicas}=1", "statefulset/web")
    before = _uid(namespace, "web-0")
    with contextlib.suppress(CommandFailedError):  # what is executed may die with the container
        namespace("exec", "web-0", "--", "python3", "-c", "import os; os.kill(1, 15)")
    namespace.wait("jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/web-0")
    namespace.wait("condition=Ready", "pod/web-0")
    assert _uid(namespace, "web-0") == before


def test_a_container_that_eats_more_than_its_limit_is_killed_for_it(namespace: Kubectl, base_image: str) -> None:
    eater = _container(
        base_image, command=["python3", "-c", "x = bytearray(1 << 30)"], resources={"limits": {"memory": "64Mi"}}
    )
    namespace.apply(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "eater"}, "spec": _pod(eater, restartPolicy="Never")}
    )
    namespace.wait("jsonpath={.status.phase}=Failed", "pod/eater")
    (status,) = namespace.get("pod", "eater")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["reason"] == "OOMKilled"


def test_more_devices_than_there_are_stay_unscheduled_and_say_which(namespace: Kubectl, base_image: str) -> None:
    greedy = _container(base_image, command=["python3"], resources={"limits": {"vpc.amazonaws.com/efa": 64}})
    namespace.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "greedy"}, "spec": _pod(greedy)})
    namespace.wait("condition=PodScheduled=false", "pod/greedy")
    (condition,) = namespace.get("pod", "greedy")["status"]["conditions"]
    assert "Insufficient vpc.amazonaws.com/efa" in condition["message"]


def test_a_pod_reaches_the_api_server_with_its_own_token(namespace: Kubectl, base_image: str) -> None:
    program = """
import ssl, urllib.request as r
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
headers = {"Authorization": "Bearer " + open(folder + "token").read()}
request = r.Request("https://kubernetes.default.svc/version", headers=headers)
print(r.urlopen(request, context=ssl.create_default_context(cafile=folder + "ca.crt"), timeout=60).status)
"""
    _run_to_end(namespace, _container(base_image, command=["python3", "-c", program]))
    assert namespace("logs", "once") == "200\n"


@pytest.mark.parametrize(
    ("component", "argument", "says"),
    [("router", "--help", r"usage: kvloop-router"), ("sim", "--version", r"\d+\.\d+")],
)
def test_the_image_of_a_component_starts_without_root_and_without_writing(
    namespace: Kubectl, kvloop_images: dict[str, str], component: str, argument: str, says: str
) -> None:
    _run_to_end(namespace, _container(kvloop_images[component], args=[argument]))
    assert re.match(says, namespace("logs", "once"))


def test_the_image_of_the_simulator_has_the_command_of_an_engine(
    namespace: Kubectl, kvloop_images: dict[str, str]
) -> None:
    _run_to_end(namespace, _container(kvloop_images["sim"], command=["vllm", "--version"]))
    assert re.match(r"\d+\.\d+", namespace("logs", "once"))


def _run_to_end(kubectl: Kubectl, container: Manifest) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "once"},
        "spec": _pod(container, restartPolicy="Never"),
    }
    kubectl.apply(pod)
    ended = {"Succeeded", "Failed"}
    wait_until(lambda: kubectl.get("pod", "once")["status"].get("phase") in ended, what="end of the pod")
    assert kubectl.get("pod", "once")["status"]["phase"] == "Succeeded", kubectl("logs", "once")
