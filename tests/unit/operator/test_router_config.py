"""The contract between the operator, which writes ``router.yaml``, and the router, which reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.desired import desired
from kvloop_operator.facts import OperatorSettings
from kvloop_router import pod_discovery
from kvloop_router.config import Config, parse
from tests.unit.operator.documents import child, document, facts_of, fixtures, manifests, read

ENVIRONMENT = {"POD_IP": "127.0.10.2", "POD_NAMESPACE": "team"}


def config(settings: OperatorSettings | None = None, **changes: object) -> Config:
    text = child(manifests(settings, **changes), "ConfigMap", "demo-router")["data"]["router.yaml"]
    return parse(text, ENVIRONMENT)


@pytest.mark.parametrize("file", fixtures("good"), ids=lambda file: file.stem)
def test_the_router_takes_every_configuration_that_the_operator_writes(file: Path) -> None:
    parsed = DisaggregatedInference.parse(read(file))
    (text,) = [each["data"]["router.yaml"] for each in desired(parsed, facts_of(parsed)) if each["kind"] == "ConfigMap"]
    parse(text, ENVIRONMENT)


def test_every_setting_of_the_router_is_written() -> None:
    assert config().model_fields_set == set(Config.model_fields)


def test_the_handle_ttl_follows_from_the_decoders() -> None:
    assert config(kvTransfer__decoderKvBlocksTtlSeconds=100).handle_ttl_seconds == 70
    assert config(router__handleTtlSeconds=50).handle_ttl_seconds == 50


@pytest.mark.parametrize(
    ("version", "can"),
    [("0.30.0", (False, False, False)), ("0.32.0", (True, False, True)), ("0.33.0", (True, True, True))],
)
def test_the_router_is_told_what_the_engines_can_do(version: str, can: tuple[bool, bool, bool]) -> None:
    told = config(engine__version=version, kvTransfer__connector="NixlConnector").engine
    assert (told.prompt_token_ids, told.stream_handles, told.multi_group_reuse) == can


def test_streams_carry_handles_where_the_plug_in_is_brought() -> None:
    brought: list[dict[str, Any]] = [
        {"kvTransfer__connector": "KvloopConnector"},
        {"kvTransfer__enginePlugin": "Enabled"},
    ]
    for changes in brought:
        assert config(**changes, engine__version="0.32.0").engine.stream_handles
        assert not config(**changes, engine__version="0.31.0").engine.stream_handles


def test_limits_of_what_is_retained_are_the_routers_own_where_nobody_set_them() -> None:
    assert config().kv_transfer.model_fields_set.isdisjoint({"longest_lease_seconds", "retained_share_limit"})
    limits: dict[str, Any] = {"kvTransfer__longestLeaseSeconds": 900, "kvTransfer__retainedShareLimit": 1}
    told = config(**limits).kv_transfer
    assert (told.longest_lease_seconds, told.retained_share_limit) == (900, 1)


def test_the_users_settings_arrive() -> None:
    told = config(
        router={
            "reuse": False,
            "cacheSalt": False,
            "sessionHeaders": ["X-A"],
            "limits": {
                "bodyBytes": 2048,
                "turnsPerEngine": 6,
                "waitingTurnsPerEngine": 0,
                "concurrentRequestsPerTenant": 7,
            },
            "timeouts": {
                "connectSeconds": 1,
                "prefillSeconds": 2,
                "decodeSeconds": 7,
                "decodeStallSeconds": 8,
                "keepAliveSeconds": 6,
            },
            "healthChecks": {"failures": 9, "suspectSeconds": 10},
            "handleStore": {"maxHandles": 3},
            "canary": {"enabled": False},
            "pathChoice": {"mode": "Cold", "decodeDelayWeight": 2.5},
            "apiKeysSecretRef": {"name": "keys", "key": "list"},
        },
        rollout__drainTimeoutSeconds=4,
        kvTransfer__kvRecomputeThreshold=5,
    )
    assert (told.reuse, told.cache_salt, told.session_headers) == (False, False, ("X-A",))
    assert (told.limits.body_bytes, told.handle_store.max_handles, told.canary.enabled) == (2048, 3, False)
    assert (told.timeouts.connect_seconds, told.timeouts.prefill_seconds, told.timeouts.drain_seconds) == (1, 2, 4)
    assert (told.limits.turns_per_engine, told.limits.waiting_turns_per_engine) == (6, 0)
    assert (told.timeouts.decode_seconds, told.timeouts.decode_stall_seconds) == (7, 8)
    assert (told.health_checks.failures, told.health_checks.suspect_seconds) == (9, 10)
    assert (told.timeouts.keep_alive_seconds, told.limits.concurrent_requests_per_tenant) == (6, 7)
    assert told.kv_transfer.kv_recompute_threshold == 5
    assert (told.path_choice.mode, told.path_choice.decode_delay_weight) == ("Cold", 2.5)
    assert told.api_keys_file == "/etc/kvloop/api-keys/list"


def test_files_that_the_configuration_names_are_mounted() -> None:
    children = manifests(router__apiKeysSecretRef={"name": "keys", "key": "list"})
    told = config(router__apiKeysSecretRef={"name": "keys", "key": "list"})
    pod = child(children, "Deployment", "demo-router")["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    projected = volumes[mounts["/etc/kvloop"]]["projected"]["sources"]
    files = {
        f"/etc/kvloop/{item['path']}" for source in projected for each in source.values() for item in each["items"]
    }
    assert files == {"/etc/kvloop/router.yaml", told.admin.token_file, told.digest_key_file}
    assert volumes[mounts["/etc/kvloop/api-keys"]]["secret"]["items"] == [{"key": "list", "path": "list"}]
    assert "kvloop-engines" not in volumes


def test_what_nobody_limited_is_left_to_the_router() -> None:
    assert "keep_alive_seconds" not in config().timeouts.model_fields_set
    assert "concurrent_requests_per_tenant" not in config().limits.model_fields_set
    assert config().listen.tls is None


def test_a_router_with_a_certificate_is_probed_scraped_and_called_over_tls() -> None:
    changes: dict[str, Any] = {"security__tls": {"router": {"secretName": "mine"}}, "monitoring__podMonitor": True}
    children = manifests(**changes)
    told = config(**changes).listen.tls
    assert told is not None
    pod = child(children, "Deployment", "demo-router")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = volumes[mounts["/etc/kvloop/tls"]]["secret"]
    assert mounted["secretName"] == "mine"
    assert {f"/etc/kvloop/tls/{item['path']}" for item in mounted["items"]} == {told.certificate_file, told.key_file}
    probes = [container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "readiness", "liveness")]
    assert probes == ["HTTPS"] * 3
    (port,) = child(children, "Service", "demo-router")["spec"]["ports"]
    assert port["name"] == "https"
    (scraped,) = child(children, "PodMonitor", "demo-router")["spec"]["podMetricsEndpoints"]
    assert (scraped["scheme"], scraped["tlsConfig"]) == ("https", {"insecureSkipVerify": True})


def engines_of(**changes: Any) -> list[Any]:
    return [child(manifests(**changes), "StatefulSet", f"demo-{role}") for role in Role]


def test_a_certificate_of_the_routers_changes_no_engine() -> None:
    assert engines_of(security__tls={"router": {"secretName": "mine"}}) == engines_of()


def engine_tls(**changes: Any) -> dict[str, Any]:
    return {"security__tls": {"engines": {"secretName": "mine", **changes}}, "monitoring__podMonitor": True}


def mounted(pod: dict[str, Any], directory: str) -> tuple[str, set[str]]:
    """The Secret that is mounted there, and the files of it."""
    (volume,) = [mount["name"] for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == directory]
    (secret,) = [each["secret"] for each in pod["volumes"] if each["name"] == volume]
    return secret["secretName"], {item["path"] for item in secret["items"]}


def test_the_router_trusts_engines_by_a_name_and_an_authority_and_never_sees_their_key() -> None:
    told = config(**engine_tls()).engine_tls
    assert told is not None
    assert (told.server_name, told.certificate_file) == ("demo-engines.default.svc", None)
    router = child(manifests(**engine_tls()), "Deployment", "demo-router")["spec"]["template"]["spec"]
    assert mounted(router, "/etc/kvloop/engine-ca") == ("mine", {Path(told.ca_file).name})
    assert Path(told.ca_file).parent == Path("/etc/kvloop/engine-ca")
    named = config(**engine_tls(serverName="vllm.internal")).engine_tls
    assert named is not None
    assert named.server_name == "vllm.internal"
    assert config().engine_tls is None


def test_the_name_that_is_asked_for_tells_resources_and_namespaces_apart() -> None:
    placed = document(security__tls={"engines": {"secretName": "mine"}})
    placed["metadata"] |= {"namespace": "team"}
    parsed = DisaggregatedInference.parse(placed)
    text = child(desired(parsed, facts_of(parsed)), "ConfigMap", "demo-router")["data"]["router.yaml"]
    told = parse(text, ENVIRONMENT).engine_tls
    assert told is not None
    assert told.server_name == "demo-engines.team.svc"


@pytest.mark.parametrize("role", Role)
def test_engines_with_a_certificate_are_probed_scraped_and_called_over_tls(role: Role) -> None:
    children = manifests(**engine_tls())
    pod = child(children, "StatefulSet", f"demo-{role}")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert mounted(pod, "/etc/kvloop/tls") == ("mine", {"tls.crt", "tls.key", "ca.crt"})
    arguments = container["args"]
    for flag, file in (("--ssl-certfile", "tls.crt"), ("--ssl-keyfile", "tls.key")):
        assert arguments[arguments.index(flag) + 1] == f"/etc/kvloop/tls/{file}"
    assert "--enable-ssl-refresh" in arguments
    probes = [container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "readiness", "liveness")]
    assert probes == ["HTTPS"] * 3
    spec = {"containers": [container]}
    assert pod_discovery.engine_of({**running_pod(role), "spec": spec}).url == "https://10.0.0.1:8000"  # type: ignore[union-attr]
    (scraped,) = child(children, "PodMonitor", f"demo-{role}")["spec"]["podMetricsEndpoints"]
    assert scraped["scheme"] == "https"
    assert scraped["tlsConfig"] == {
        "ca": {"secret": {"name": "mine", "key": "ca.crt"}},
        "serverName": "demo-engines.default.svc",
    }
    (of_router,) = child(children, "PodMonitor", "demo-router")["spec"]["podMetricsEndpoints"]
    assert "scheme" not in of_router


def running_pod(role: Role) -> dict[str, Any]:
    labels = {names.LABEL_ROLE: str(role), names.LABEL_KV_REVISION: "abc"}
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": "a", "uid": "b", "labels": labels}, "status": status}


def test_on_the_way_back_engines_are_as_without_certificates_and_the_router_still_trusts_the_rest() -> None:
    assert engines_of(**engine_tls(serve=False)) == engines_of(monitoring__podMonitor=True)
    monitors = [child(manifests(**engine_tls(serve=False)), "PodMonitor", f"demo-{role}") for role in Role]
    assert monitors == [child(manifests(monitoring__podMonitor=True), "PodMonitor", f"demo-{role}") for role in Role]
    assert config(**engine_tls(serve=False)).engine_tls == config(**engine_tls()).engine_tls


def test_a_router_in_a_cluster_asks_the_api_server_for_the_pods_of_its_deployment() -> None:
    children = manifests()
    pods = config().discovery.kubernetes
    assert pods is not None
    assert (pods.deployment, pods.namespace) == ("demo", "team")
    pod = child(children, "Deployment", "demo-router")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is True
    sources = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in pod["containers"][0]["env"]}
    assert sources["POD_NAMESPACE"] == "metadata.namespace"
    (rule,) = child(children, "Role", "demo-router")["rules"]
    assert (rule["resources"], set(rule["verbs"])) == (["pods"], {"get", "list", "watch"})


def test_the_router_finds_the_pods_that_the_operator_makes_by_their_labels_container_and_port() -> None:
    wanted = pod_discovery.selector("demo")
    assert f"{names.LABEL_DEPLOYMENT}=demo" in wanted
    assert wanted.split(",", 1)[1].startswith(f"{names.LABEL_ROLE} in ")
    for role in Role:
        template = child(manifests(), "StatefulSet", f"demo-{role}")["spec"]["template"]
        statuses = [
            {"name": container["name"], "state": {"running": {}}, "started": True, "containerID": f"x://{index}"}
            for index, container in enumerate(template["spec"]["containers"])
        ]
        pod = {
            "metadata": {**template["metadata"], "name": f"demo-{role}-0", "uid": "u"},
            "status": {"podIP": "10.0.0.1", "containerStatuses": statuses},
        }
        pod["metadata"]["labels"][names.LABEL_DRAINING] = "1"
        engine = pod_discovery.engine_of(pod)
        assert engine is not None
        assert (engine.role, engine.draining, engine.process) == (role, True, "u/x://0")
        assert engine.kv_revision == template["metadata"]["labels"][names.LABEL_KV_REVISION]
        (container,) = [one for one in template["spec"]["containers"] if one["name"] == pod_discovery.ENGINE_CONTAINER]
        assert engine.url == f"http://10.0.0.1:{container['ports'][0]['containerPort']}"


def test_a_router_on_the_local_node_reads_the_engines_file() -> None:
    settings = OperatorSettings(discovery="file", engines_file="/run/kvloop/engines.json")
    assert config(settings).discovery.file == "/run/kvloop/engines.json"
    pod = child(manifests(OperatorSettings(discovery="file")), "Deployment", "demo-router")["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts[names.ENGINES_DIRECTORY] == "kvloop-engines"
    assert pod["automountServiceAccountToken"] is False
    assert "lifecycle" not in pod["containers"][0]


def test_the_local_nodes_address_is_expanded_by_the_router() -> None:
    told = config(OperatorSettings(bind_address="$(POD_IP)"))
    assert told.listen.host == told.admin.host == "127.0.10.2"


def test_an_image_of_a_version_that_can_do_the_same_leaves_the_routers_as_they_are() -> None:
    before, after = (
        manifests(engine__version="0.33.0"),
        manifests(engine__version="0.33.1", engine__image="a/b:v0.33.1"),
    )
    for kind in ("ConfigMap", "Deployment"):
        (one,), (other,) = ([each for each in children if each["kind"] == kind] for children in (before, after))
        assert one == other
