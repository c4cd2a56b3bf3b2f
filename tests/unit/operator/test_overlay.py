"""The pod-template overlay: merged last, and unable to change what kvloop owns."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings, strategies as st

from kvloop_operator.check import check
from tests.unit.operator.documents import child, engine, engine_pod, environment, facts_of, manifests, resource


def overlaid(**overlay: Any) -> list[dict[str, Any]]:
    return manifests(decode__podTemplate=overlay)


def test_new_fields_containers_and_labels_are_added() -> None:
    children = overlaid(
        metadata={"labels": {"team": "serving"}, "annotations": {"a": "b"}},
        spec={
            "hostIPC": True,
            "initContainers": [{"name": "warm", "image": "busybox"}],
            "containers": [{"name": "engine", "tty": True}, {"name": "side", "image": "busybox"}],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    )
    template = child(children, "StatefulSet", "demo-decode")["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "serving"
    assert template["metadata"]["annotations"] == {"a": "b"}
    pod = template["spec"]
    assert pod["hostIPC"] is True
    assert [each["name"] for each in pod["containers"]] == ["engine", "side"]
    assert pod["containers"][0]["tty"] is True
    assert pod["initContainers"] == [{"name": "warm", "image": "busybox"}]
    assert pod["volumes"][-1] == {"name": "data", "emptyDir": {}}


def test_probes_and_security_context_can_be_changed() -> None:
    changed = {"name": "engine", "livenessProbe": {"periodSeconds": 60}, "securityContext": {"runAsUser": 0}}
    container = engine(overlaid(spec={"containers": [changed]}), "decode")
    assert container["livenessProbe"]["periodSeconds"] == 60
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["securityContext"]["runAsUser"] == 0
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}


def test_variables_that_kvloop_does_not_set_are_added() -> None:
    added = [{"name": "POD_IP", "value": "1.2.3.4"}, {"name": "NEW", "value": "x"}]
    variables = environment(engine(overlaid(spec={"containers": [{"name": "engine", "env": added}]}), "decode"))
    assert variables["NEW"] == "x"
    assert variables["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_the_other_role_is_left_alone() -> None:
    assert engine_pod(overlaid(spec={"hostIPC": True}), "prefill") == engine_pod(manifests(), "prefill")


def test_every_attempt_on_what_kvloop_owns_is_named() -> None:
    parsed = resource(
        decode__podTemplate={
            "metadata": {"labels": {"kvloop.io/role": "router", "app.kubernetes.io/name": "x", "free": "y"}},
            "spec": {
                "restartPolicy": "Never",
                "tolerations": [],
                "volumes": [{"name": "free"}, {"name": "kvloop-shm", "emptyDir": {}}],
                "containers": [
                    {"name": "side", "image": "free"},
                    {
                        "name": "engine",
                        "image": "other",
                        "env": [{"name": "FREE"}, {"name": "FI_PROVIDER", "value": "tcp"}],
                        "volumeMounts": [{"name": "free", "mountPath": "/dev/shm"}],
                    },
                ],
            },
        }
    )
    assert [fault.field.removeprefix("spec.decode.podTemplate.") for fault in check(parsed, facts_of(parsed))] == [
        "metadata.labels.kvloop.io/role",
        "metadata.labels.app.kubernetes.io/name",
        "spec.restartPolicy",
        "spec.tolerations",
        "spec.containers[1].image",
        "spec.containers[1].env[1]",
        "spec.containers[1].volumeMounts[0]",
        "spec.volumes[1]",
    ]


def test_the_routers_pod_has_an_overlay_too() -> None:
    overlay = {"spec": {"hostNetwork": True, "containers": [{"name": "router", "args": ["--help"]}]}}
    pod = child(manifests(router__podTemplate=overlay), "Deployment", "demo-router")["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True
    assert pod["containers"][0]["args"] == ["--config", "/etc/kvloop/router.yaml"]
    parsed = resource(router__podTemplate=overlay)
    assert [fault.field for fault in check(parsed, facts_of(parsed))] == [
        "spec.router.podTemplate.spec.containers[0].args"
    ]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=3), below, max_size=2),
    max_leaves=4,
)
CONTAINER = st.fixed_dictionaries(
    {"name": st.sampled_from(["engine", "side"])},
    optional={
        "args": VALUES,
        "command": VALUES,
        "image": VALUES,
        "env": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["POD_IP", "FI_PROVIDER", "X"]), "value": st.just("?")}),
            max_size=3,
        ),
        "volumeMounts": st.lists(
            st.fixed_dictionaries({"mountPath": st.sampled_from(["/dev/shm", "/x"]), "name": st.just("?")}), max_size=2
        ),
        "tty": VALUES,
    },
)
SPEC = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.lists(CONTAINER, max_size=3),
        "volumes": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["kvloop-shm", "kvloop-cache", "x"])}), max_size=3
        ),
        "affinity": VALUES,
        "tolerations": VALUES,
        "terminationGracePeriodSeconds": VALUES,
        "hostPID": VALUES,
    },
)
LABELS = st.dictionaries(st.sampled_from(["kvloop.io/role", "kvloop.io/kv-revision", "x"]), st.just("?"), max_size=3)


@settings(deadline=None)
@given(spec=SPEC, labels=LABELS)
def test_no_overlay_changes_what_kvloop_owns(spec: dict[str, Any], labels: dict[str, str]) -> None:
    plain = child(manifests(), "StatefulSet", "demo-decode")["spec"]["template"]
    changed = child(overlaid(metadata={"labels": labels}, spec=spec), "StatefulSet", "demo-decode")["spec"]["template"]
    assert changed["metadata"]["labels"].items() >= plain["metadata"]["labels"].items()
    for field in ("affinity", "tolerations", "terminationGracePeriodSeconds"):
        assert changed["spec"][field] == plain["spec"][field]
    own, after = plain["spec"]["containers"][0], changed["spec"]["containers"][0]
    for field in ("name", "image", "command", "args", "ports", "lifecycle", "resources"):
        assert after[field] == own[field]
    for field in ("env", "volumeMounts"):
        assert after[field][: len(own[field])] == own[field]
    assert changed["spec"]["volumes"][:2] == plain["spec"]["volumes"]
