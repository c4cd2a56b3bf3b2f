"""Which manifests the node takes, which it takes with a notice, and which it refuses."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from kvloop.node.errors import UnsupportedManifest
from kvloop.node.workloads import read_manifests, template_revision
from tests.unit.cli.node_manifests import Manifest, container, deployment, pod_template, stateful_set

PLAIN = pod_template(container("sh"))


def with_container(**fields: Any) -> Manifest:
    return stateful_set("x", pod_template(container("sh", **fields)))


def with_spec(**fields: Any) -> Manifest:
    return stateful_set("x", pod_template(container("sh"), **fields))


def test_defaults_are_kubernetes_own() -> None:
    probe = {"httpGet": {"port": "http"}}

    [workload] = read_manifests(
        [with_container(ports=[{"name": "http", "containerPort": 8000}], livenessProbe=probe)]
    ).workloads

    liveness = workload.template.containers[0].probes.liveness
    assert liveness is not None
    assert (liveness.period, liveness.timeout, liveness.failure_threshold, liveness.success_threshold) == (10, 1, 3, 1)
    assert (workload.template.grace, workload.template.restart_policy, workload.partition) == (30, "Always", 0)


@pytest.mark.parametrize(
    ("surge", "unavailable", "replicas", "wanted"),
    [
        (None, None, 1, (1, 0)),
        (None, None, 4, (1, 1)),
        ("50%", "50%", 3, (2, 1)),
        (2, 1, 3, (2, 1)),
    ],
)
def test_shares_of_a_deployment_are_rounded_as_in_kubernetes(
    surge: Any, unavailable: Any, replicas: int, wanted: tuple[int, int]
) -> None:
    strategy = {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}

    [workload] = read_manifests([deployment("x", PLAIN, replicas=replicas, strategy=strategy)]).workloads

    assert (workload.max_surge, workload.max_unavailable) == wanted


def test_objects_are_read_as_bytes() -> None:
    encoded = base64.b64encode(b"\x00\xff").decode()
    secret = {"kind": "Secret", "metadata": {"name": "s"}, "data": {"a": encoded}, "stringData": {"b": "ü"}}

    objects = read_manifests([secret]).objects

    assert objects.find("Secret", "default", "s") == {"a": b"\x00\xff", "b": "ü".encode()}


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (
            with_container(resources={"limits": {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 16}}),
            "nvidia.com/gpu, vpc",
        ),
        (with_container(resources={"requests": {"cpu": "1", "memory": "1Gi"}}), "not enforced"),
        (with_container(securityContext={"privileged": True}), "security contexts are not applied"),
        (with_spec(securityContext={"runAsNonRoot": True}), "security contexts are not applied"),
        (with_spec(nodeSelector={"zone": "a"}), "there is one node"),
        (with_spec(volumes=[{"name": "shm", "emptyDir": {"medium": "Memory"}}]), "memory-backed volumes"),
        (with_spec(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]), "size limits"),
        ({"kind": "Service", "metadata": {"name": "x"}, "spec": {}}, "names do not resolve"),
        ({"kind": "NetworkPolicy", "metadata": {"name": "x"}, "spec": {}}, "objects without effect: NetworkPolicy"),
        (stateful_set("x", PLAIN, minReadySeconds=5), "minReadySeconds is not honoured"),
        (stateful_set("x", PLAIN, replicas=2, podManagementPolicy="OrderedReady"), "OrderedReady is not honoured"),
    ],
)
def test_what_is_left_out_is_said(manifest: Manifest, words: str) -> None:
    notices = read_manifests([manifest]).notices

    assert len(notices) == 1
    assert words in notices[0]


def test_what_means_nothing_here_is_not_mentioned() -> None:
    manifest = with_spec(imagePullSecrets=[{"name": "x"}], serviceAccountName="x", automountServiceAccountToken=False)

    assert read_manifests([manifest]).notices == ()


@pytest.mark.parametrize(
    ("manifest", "path"),
    [
        (with_container(lifecycle={"postStart": {"exec": {"command": ["x"]}}}), "containers[0].lifecycle.postStart"),
        (with_container(livenessProbe={"grpc": {"port": 1}}), "containers[0].livenessProbe.grpc"),
        (with_container(livenessProbe={"periodSeconds": 1}), "containers[0].livenessProbe"),
        (with_container(livenessProbe={"tcpSocket": {"port": "nameless"}}), "livenessProbe.tcpSocket.port"),
        (with_container(livenessProbe={"tcpSocket": {"port": 70000}}), "livenessProbe.tcpSocket.port"),
        (with_container(volumeMounts=[{"name": "gone", "mountPath": "/x"}]), "containers[0].volumeMounts[0]"),
        (with_container(env=[{"name": "X", "value": 1}]), "containers[0].env[0].value"),
        (with_container(tty=True), "containers[0].tty"),
        (with_container(comand=["typo"]), "containers[0].comand"),
        (with_container(ports=[{"containerPort": 1, "hostPort": 1}]), "ports[0].hostPort"),
        (with_spec(hostNetwork=True), "spec.hostNetwork"),
        (with_spec(volumes=[{"name": "m", "persistentVolumeClaim": {"claimName": "m"}}]), "spec.volumes[0]"),
        (with_spec(volumes=[{"name": "m", "hostPath": {"path": "/"}}]), "spec.volumes[0]"),
        (with_spec(restartPolicy="Never"), "template.spec.restartPolicy"),
        (with_spec(containers=[]), "spec.containers"),
        (stateful_set("x", PLAIN, volumeClaimTemplates=[{}]), "spec.volumeClaimTemplates"),
        (stateful_set("x", PLAIN, unheardOf=1), "spec.unheardOf"),
        (stateful_set("x", PLAIN, replicas=True), "spec.replicas"),
        (deployment("x", PLAIN, paused=True), "spec.paused"),
        (deployment("x", PLAIN, strategy={"type": "OnDelete"}), "spec.strategy.type"),
        ({"kind": "DaemonSet", "metadata": {"name": "x"}}, "DaemonSet/x"),
        ({"kind": "Secret", "metadata": {"name": "x"}, "data": {"a": "%"}}, "Secret/x.data.a"),
    ],
)  # fmt: skip
def test_what_matters_and_cannot_be_honoured_is_refused_with_its_path(manifest: Manifest, path: str) -> None:
    with pytest.raises(UnsupportedManifest) as caught:
        read_manifests([manifest])

    assert caught.value.path.endswith(path)


def test_a_manifest_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UnsupportedManifest, match="repeats it"):
        read_manifests([stateful_set("x", PLAIN), stateful_set("x", PLAIN)])


def test_equal_templates_have_equal_revisions_whatever_their_order() -> None:
    assert template_revision({"a": 1, "b": [{"c": 2, "d": 3}]}) == template_revision({"b": [{"d": 3, "c": 2}], "a": 1})
    assert template_revision({"a": 1}) != template_revision({"a": 2})
