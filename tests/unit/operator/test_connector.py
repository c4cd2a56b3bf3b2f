"""kvloop's connector and plug-in in engine pods: how they get there, what they are told, and that nothing else of the
pods changes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.engine.start import TRIED_VERSIONS, checked_start
from kvloop_connector.lease_requests import WORKER_EXTENSION
from kvloop_connector.settings import Role
from kvloop_operator.engine_versions import capabilities, version_of
from kvloop_operator.facts import LiveConnector, OperatorSettings
from kvloop_operator.manifests.overlay import own_paths
from kvloop_operator.observe import live_connector
from kvloop_operator.revision import kv_revision
from tests.unit.operator.documents import argument, child, engine, engine_pod, facts_of, manifests, resource

ROLES = [role.value for role in Role]

VERIFIED: dict[str, Any] = {"kvTransfer__connector": "KvloopConnector"}
PLUGIN: dict[str, Any] = {"kvTransfer__enginePlugin": "Enabled"}
CONNECTORS = [pytest.param(VERIFIED, id="verified"), pytest.param(PLUGIN, id="stock")]

SHARE = {"kvloop_retained_share_limit": 0.3}
LIMIT_KEYS = {"kvloop_longest_lease_seconds", *SHARE}


def rendered(settings: OperatorSettings | None = None, **changes: Any) -> list[dict[str, Any]]:
    return manifests(settings, **VERIFIED, **changes)


def named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [found] = [entry for entry in entries if entry["name"] == name]
    return found


@pytest.mark.parametrize("role", ROLES)
def test_engine_is_told_all_that_the_connector_demands_at_its_start(role: str) -> None:
    children = rendered()
    container, pod = engine(children, role), engine_pod(children, role)
    config = json.loads(argument(container, "--kv-transfer-config"))
    read: list[str] = []

    def read_key(path: str) -> bytes:
        read.append(path)
        return b"k" * 64

    start = checked_start(
        version="0.32.0",
        kv_role=config["kv_role"],
        extra=config["kv_connector_extra_config"],
        algorithm=argument(container, "--prefix-caching-hash-algo"),
        context_parallel=1,
        read_key=read_key,
    )

    assert (start.role.value, start.revision) == (role, revision_label(children, role))
    # The file is there: a key of the Secret, in a volume that the engine mounts.
    [path] = read
    mount = next(each for each in container["volumeMounts"] if path.startswith(each["mountPath"]))
    assert mount["readOnly"] is True
    secret = named(pod["volumes"], mount["name"])["secret"]
    assert secret["secretName"] == "demo-router"
    assert [f"{mount['mountPath']}/{item['path']}" for item in secret["items"]] == [path]
    assert [item["key"] for item in secret["items"]] == ["seal-key"]


@pytest.mark.parametrize("role", ROLES)
def test_package_is_copied_from_the_routers_image_to_where_the_engine_looks(role: str) -> None:
    children = rendered(OperatorSettings(router_image="registry/router:1"))
    pod, container = engine_pod(children, role), engine(children, role)
    [init] = pod["initContainers"]

    assert init["image"] == "registry/router:1"
    [written] = init["volumeMounts"]
    assert init["command"] == ["python3", "-m", "kvloop_connector.delivery", written["mountPath"]]
    mounted = named(container["volumeMounts"], written["name"])
    assert (mounted["mountPath"], mounted["readOnly"]) == (written["mountPath"], True)
    assert "emptyDir" in named(pod["volumes"], written["name"])
    assert init["securityContext"]["runAsNonRoot"] is True
    # Else a pod whose engine has limits equal to its requests would be evicted earlier.
    assert init["resources"]["limits"] == init["resources"]["requests"]


def seen_by_the_engine(directory: Path, container: dict[str, Any], **own: str) -> list[str]:
    """PYTHONPATH, VLLM_PLUGINS and the arguments with which a container starts an image's ``vllm``."""
    program = directory / "vllm"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "${VLLM_PLUGINS-(not set)}" "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{directory}:/usr/bin:/bin", **own}
    command = [*container["command"], "serve", "a b"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ({}, ["/opt/kvloop-connector", "(not set)"]),
        ({"PYTHONPATH": "/image's own"}, ["/opt/kvloop-connector:/image's own", "(not set)"]),
        ({"VLLM_PLUGINS": "neuron"}, ["/opt/kvloop-connector", "neuron,kvloop_stream_handle,kvloop_leases"]),
        ({"VLLM_PLUGINS": ""}, ["/opt/kvloop-connector", ",kvloop_stream_handle,kvloop_leases"]),
    ],
)
def test_engine_runs_with_its_arguments_and_what_the_image_or_the_user_set(
    tmp_path: Path, connector: dict[str, Any], own: dict[str, str], seen: list[str]
) -> None:
    container = engine(manifests(**connector), "decode")

    assert seen_by_the_engine(tmp_path, container, **own) == [*seen, "serve", "a b"]


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("role", ROLES)
def test_engine_is_told_to_load_and_to_do_what_leases_need(role: str, connector: dict[str, Any]) -> None:
    container = engine(manifests(**connector), role)

    assert argument(container, "--worker-extension-cls") == WORKER_EXTENSION
    assert {"name": "KVLOOP_LEASES", "value": "1"} in container["env"]
    # What is there is read by the engine, where nobody has said what may be loaded.
    assert "VLLM_PLUGINS" not in [variable["name"] for variable in container["env"]]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_worker_extension_of_the_users_stays_and_its_role_has_no_leases(
    tmp_path: Path, connector: dict[str, Any]
) -> None:
    children = manifests(**connector, decode__args=["--worker-extension-cls=mine.Extension"])
    decode, prefill = engine(children, "decode"), engine(children, "prefill")

    assert [word for word in decode["args"] if "extension" in word] == ["--worker-extension-cls=mine.Extension"]
    assert "KVLOOP_LEASES" not in json.dumps(decode["env"])
    assert seen_by_the_engine(tmp_path, decode, VLLM_PLUGINS="mine")[1] == "mine,kvloop_stream_handle"
    assert argument(prefill, "--worker-extension-cls") == WORKER_EXTENSION


@pytest.mark.parametrize("role", ROLES)
def test_the_plug_in_comes_to_the_stock_connector_without_the_seal_key(role: str) -> None:
    children, stock = manifests(**PLUGIN), manifests()
    container, pod = engine(children, role), engine_pod(children, role)

    assert argument(container, "--kv-transfer-config") == argument(engine(stock, role), "--kv-transfer-config")
    assert "--prefix-caching-hash-algo" not in container["args"]
    assert [each["name"] for each in pod["initContainers"]] == ["kvloop-connector"]
    assert "kvloop-seal" not in json.dumps(pod)
    # They can exchange KV with engines that do not have it.
    assert revision_label(children, role) == revision_label(stock, role)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (VERIFIED, {"kvloop_longest_lease_seconds": 900, **SHARE}),
        (PLUGIN, {"kvloop_longest_lease_seconds": 900}),
        ({}, {}),
    ],
)
@pytest.mark.parametrize("role", ROLES)
def test_limits_of_what_is_retained_reach_the_engines_that_keep_to_them(
    role: str, changes: dict[str, Any], told: dict[str, Any]
) -> None:
    limits: dict[str, Any] = {"kvTransfer__longestLeaseSeconds": 900, "kvTransfer__retainedShareLimit": 0.3}
    children = manifests(**changes, **limits)
    extra = json.loads(argument(engine(children, role), "--kv-transfer-config"))["kv_connector_extra_config"]

    assert {key: extra[key] for key in extra if key in LIMIT_KEYS} == told
    # Engines with other limits can exchange KV.
    assert revision_label(children, role) == revision_label(manifests(**changes), role)


def test_nothing_of_it_is_in_the_pods_of_the_stock_connector() -> None:
    children = manifests()
    for role in ROLES:
        assert engine(children, role)["command"] == ["vllm"]
        assert "initContainers" not in engine_pod(children, role)
    assert "kvloop-connector" not in json.dumps(children)
    assert "kvloop_key_file" not in json.dumps(children)
    assert "KVLOOP_LEASES" not in json.dumps(children)
    assert "worker-extension" not in json.dumps(children)


def test_engines_of_the_two_connectors_never_pair() -> None:
    for role in ROLES:
        assert revision_label(rendered(), role) != revision_label(manifests(), role)


@pytest.mark.parametrize("role", Role)
def test_a_newer_kvloop_restarts_no_engine_to_bring_its_own_copy(role: Role) -> None:
    parsed = resource(kvTransfer__connector="KvloopConnector")
    revision = kv_revision(parsed, facts_of(parsed))
    older = {role: LiveConnector(image="router:1", kv_revision=revision)}

    def image(live: dict[Role, LiveConnector]) -> str:
        settings = OperatorSettings(router_image="router:2", live_connectors=live)
        return str(engine_pod(rendered(settings), role.value)["initContainers"][0]["image"])

    assert image({}) == "router:2"
    assert image(older) == "router:1"
    # Engines that are replaced anyhow get the newer one.
    assert image({role: LiveConnector(image="router:1", kv_revision="another")}) == "router:2"


def test_what_engines_have_now_is_read_from_their_statefulset() -> None:
    settings = OperatorSettings(router_image="router:1")
    statefulset = child(rendered(settings), "StatefulSet", "demo-decode")

    assert live_connector(statefulset) == LiveConnector(
        image="router:1", kv_revision=revision_label(rendered(settings), "decode")
    )
    assert live_connector(child(manifests(), "StatefulSet", "demo-decode")) is None


def test_an_overlay_leaves_the_init_container_alone() -> None:
    children = rendered()
    template = child(children, "StatefulSet", "demo-decode")["spec"]["template"]
    overlay = {"spec": {"initContainers": [{"name": "mine"}, {"name": "kvloop-connector", "image": "other"}]}}

    assert list(own_paths(template, overlay)) == [("spec", "initContainers", 1)]


def test_the_table_of_engine_versions_says_on_which_it_starts() -> None:
    for text in ("0.26.0", "0.31.0", "0.32.0", "0.32.1", "0.33.0", "0.40.0"):
        version = version_of(text)
        assert version is not None
        assert capabilities(version).kvloop_connector is (text in TRIED_VERSIONS)


def revision_label(children: list[dict[str, Any]], role: str) -> str:
    template = child(children, "StatefulSet", f"demo-{role}")["spec"]["template"]
    return str(template["metadata"]["labels"]["kvloop.io/kv-revision"])
