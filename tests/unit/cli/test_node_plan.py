"""Template, identity and objects -> what is executed, with which environment and files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvloop.node.errors import UnsupportedManifest
from kvloop.node.images import ProcessImage
from kvloop.node.model import ContainerPlan, PodIdentity, PodPlan
from kvloop.node.pod_plan import Place, path_rewriter, plan_pod
from kvloop.node.workloads import read_manifests
from tests.unit.cli.node_manifests import (
    Manifest,
    config_map,
    container,
    field_ref,
    pod_template,
    secret,
    stateful_set,
)

IDENTITY = PodIdentity(
    name="demo-prefill-0",
    namespace="default",
    uid="0a1b2c3d-0000-0000-0000-000000000000",
    address="127.20.30.2",
    host_address="127.20.30.1",
)
STATE = Path("/state")
POD = STATE / "pods" / "demo-prefill-0.0a1b2c3d"
PYTHON = Path(sys.executable)
IMAGE = ProcessImage(path=(PYTHON.parent,), entrypoint=(PYTHON.name, "-m", "engine"), environment={"SET_BY": "image"})


def plan(template: Manifest, *objects: Manifest, host_paths: tuple[Path, ...] = ()) -> PodPlan:
    wanted = read_manifests([stateful_set("demo-prefill", template), *objects])
    place = Place(directory=STATE / "pods", images={"image": IMAGE}, host_paths=host_paths)
    return plan_pod(wanted.workloads[0].template, IDENTITY, objects=wanted.objects, place=place)


def only_container(template: Manifest, *objects: Manifest) -> ContainerPlan:
    [planned] = plan(template, *objects).containers
    return planned


def environment(env: list[Manifest], *objects: Manifest, **fields: Any) -> dict[str, str]:
    """The container's variables, without those that the image and the node set."""
    planned = only_container(pod_template(container("sh", env=env, **fields)), *objects)
    return {
        name: value
        for name, value in planned.environment.items()
        if name not in ("PATH", "HOME", "HOSTNAME", "LANG", "SET_BY")
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "demo-prefill-0"),
        ("metadata.namespace", "default"),
        ("metadata.uid", IDENTITY.uid),
        ("metadata.labels['kvloop.io/role']", "prefill"),
        ("metadata.labels['not-there']", ""),
        ("spec.nodeName", "local"),
        ("spec.serviceAccountName", "default"),
        ("status.podIP", "127.20.30.2"),
        ("status.hostIP", "127.20.30.1"),
    ],
)
def test_field_references(path: str, value: str) -> None:
    planned = only_container(
        pod_template(container("sh", env=[field_ref("X", path)]), labels={"kvloop.io/role": "prefill"})
    )

    assert planned.environment["X"] == value


def test_variables_refer_to_earlier_ones_only() -> None:
    env = [
        {"name": "EARLY", "value": "$(LATE)"},
        field_ref("LATE", "status.podIP"),
        {"name": "URL", "value": "http://$(LATE):8000/$$(LATE)"},
    ]

    assert environment(env) == {"EARLY": "$(LATE)", "LATE": "127.20.30.2", "URL": "http://127.20.30.2:8000/$(LATE)"}


def test_own_variables_win_over_those_of_objects_and_of_the_image() -> None:
    env_from = [{"configMapRef": {"name": "c"}}, {"secretRef": {"name": "s"}, "prefix": "S_"}]
    env = [{"name": "B", "value": "own, not $(B)"}, {"name": "D", "value": "$(A) and $(S_A)"}]

    variables = environment(env, config_map("c", A="1", B="2"), secret("s", A="3"), envFrom=env_from)

    assert variables == {"A": "1", "B": "own, not 2", "S_A": "3", "D": "1 and 3"}


def test_key_references_and_optional_ones() -> None:
    env = [
        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "a"}}},
        {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "b"}}},
        {"name": "NO_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "x", "optional": True}}},
        {"name": "NO_OBJECT", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "x", "optional": True}}},
    ]

    assert environment(env, config_map("c", a="1"), secret("s", b="2")) == {"A": "1", "S": "2"}


def test_command_and_args_are_expanded_with_the_containers_variables() -> None:
    env = [field_ref("POD_IP", "status.podIP")]

    planned = only_container(
        pod_template(container("sh", "-c", args=["--host=$(POD_IP)", "$(SET_BY)", "$$(POD_IP)"], env=env))
    )

    assert planned.argv[1:] == ("-c", "--host=127.20.30.2", "$(SET_BY)", "$(POD_IP)")


def test_the_entrypoint_runs_where_there_is_no_command() -> None:
    planned = only_container(pod_template(container(args=["--port", "1"])))

    assert planned.argv == (str(PYTHON), "-m", "engine", "--port", "1")


def test_the_machines_environment_does_not_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK", "1")

    planned = only_container(pod_template(container("sh")))

    assert set(planned.environment) == {"PATH", "HOME", "HOSTNAME", "LANG", "SET_BY"}


def mounted(*volumes: Manifest, mounts: dict[str, str], **fields: Any) -> Manifest:
    volume_mounts = [{"name": name, "mountPath": path} for path, name in mounts.items()]
    return pod_template(container("sh", volumeMounts=volume_mounts, **fields), volumes=list(volumes))


def test_mount_paths_become_the_pods_directories_wherever_they_occur() -> None:
    template = mounted(
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s"}},
        mounts={"/etc/kvloop": "config", "/etc/kvloop/secret": "secret"},
        args=["--config=/etc/kvloop/router.yaml", "/etc/kvloop-other"],
        env=[{"name": "TOKEN_FILE", "value": "/etc/kvloop/secret/token"}],
        readinessProbe={"exec": {"command": ["cat", "/etc/kvloop/router.yaml"]}},
    )

    planned = plan(
        template, config_map("c", **{"router.yaml": "token: /etc/kvloop/secret/token"}), secret("s", token="t")
    )

    [main] = planned.containers
    assert main.argv[1:] == (f"--config={POD}/volumes/config/router.yaml", "/etc/kvloop-other")
    assert main.environment["TOKEN_FILE"] == f"{POD}/volumes/secret/token"
    assert f"{POD}/volumes/config/router.yaml" in str(main.probes.readiness)
    assert {file.path: file.content for file in planned.files} == {
        POD / "volumes/config/router.yaml": f"token: {POD}/volumes/secret/token".encode(),
        POD / "volumes/secret/token": b"t",
    }


def test_secrets_are_written_byte_for_byte() -> None:
    template = mounted({"name": "v", "secret": {"secretName": "s"}}, mounts={"/etc/x": "v"})

    [file] = plan(template, secret("s", text="/etc/x/y")).files

    assert file.content == b"/etc/x/y"


def test_projected_volumes_gather_objects_and_fields() -> None:
    sources = [
        {"configMap": {"name": "c", "items": [{"key": "a", "path": "sub/a.txt"}]}},
        {"secret": {"name": "s", "optional": True}},
        {"downwardAPI": {"items": [{"path": "ip", "fieldRef": {"fieldPath": "status.podIP"}}]}},
    ]
    template = mounted({"name": "all", "projected": {"sources": sources, "defaultMode": 0o400}}, mounts={"/all": "all"})

    files = plan(template, config_map("c", a="1", b="2")).files

    assert {str(file.path.relative_to(POD / "volumes/all")): file.content for file in files} == {
        "sub/a.txt": b"1",
        "ip": b"127.20.30.2",
    }
    assert {file.mode for file in files} == {0o400}


def test_sub_paths_point_to_the_part_and_missing_ones_are_made() -> None:
    mount = {"name": "data", "mountPath": "/cache", "subPath": "hub"}
    template = pod_template(
        container("sh", volumeMounts=[mount], env=[{"name": "HF_HOME", "value": "/cache"}]),
        volumes=[{"name": "data", "emptyDir": {}}],
    )

    planned = plan(template)

    assert planned.containers[0].environment["HF_HOME"] == f"{POD}/volumes/data/hub"
    assert POD / "volumes/data/hub" in planned.directories


def test_paths_of_the_machine_are_left_alone_even_below_a_mount() -> None:
    rewrite = path_rewriter({"/tmp": Path("/state/pods/p/volumes/tmp")}, [Path("/state"), Path("/tmp/model")])

    assert rewrite("/tmp/x /tmp/model/tmp/x '/state/tmp' /tmp") == (
        "/state/pods/p/volumes/tmp/x /tmp/model/tmp/x '/state/tmp' /state/pods/p/volumes/tmp"
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/data", "/v"),
        ("/data/", "/v/"),
        ('{"dir":"/data/x"}', '{"dir":"/v/x"}'),
        ("a:/data:/data/b", "a:/v:/v/b"),
        ("--dir=/data", "--dir=/v"),
        ("/database", "/database"),
        ("/data.old", "/data.old"),
        ("/srv/data", "/srv/data"),
        ("http://host/data", "http://host/data"),
    ],
)
def test_only_whole_paths_are_rewritten(text: str, wanted: str) -> None:
    assert path_rewriter({"/data": Path("/v")}, [])(text) == wanted


def test_init_containers_are_planned_like_the_others() -> None:
    template = pod_template(container("sh"), initContainers=[{**container("sh", "-c", "x"), "name": "init"}])

    [init] = plan(template).init_containers

    assert (init.name, init.argv[1:]) == ("init", ("-c", "x"))


@pytest.mark.parametrize(
    ("template", "path", "words"),
    [
        (pod_template({**container("sh"), "image": "other"}), "image", "no process stands for the image 'other'"),
        (pod_template(container("no-such-program")), "command", "not on the path of the image"),
        (
            pod_template(container("sh", env=[field_ref("X", "status.phase")])),
            "env[0].valueFrom.fieldRef.fieldPath",
            "does not know the field 'status.phase'",
        ),
        (
            pod_template(container("sh", envFrom=[{"configMapRef": {"name": "gone"}}])),
            "envFrom[0].configMapRef",
            "there is no ConfigMap 'gone'",
        ),
        (
            mounted({"name": "v", "secret": {"secretName": "gone"}}, mounts={"/v": "v"}),
            "volumes[0].secret",
            "there is no Secret 'gone'",
        ),
    ],
    ids=["image", "program", "field", "object", "volume"],
)
def test_references_that_lead_nowhere_are_refused(template: Manifest, path: str, words: str) -> None:
    with pytest.raises(UnsupportedManifest) as caught:
        plan(template)

    assert caught.value.path.endswith(path)
    assert words in caught.value.reason


def test_one_path_for_two_volumes_is_refused_for_a_text_that_both_read() -> None:
    mounts = [[{"name": "a", "mountPath": "/x"}], [{"name": "b", "mountPath": "/x"}]]
    shared = {"name": "c", "mountPath": "/c"}
    template = pod_template(
        *({**container("sh", volumeMounts=[*own, shared]), "name": own[0]["name"]} for own in mounts),
        volumes=[
            {"name": "a", "emptyDir": {}},
            {"name": "b", "emptyDir": {}},
            {"name": "c", "configMap": {"name": "c"}},
        ],
    )

    with pytest.raises(UnsupportedManifest, match="mounted from two places"):
        plan(template, config_map("c", text="/x"))
