"""Desired state: what each child is for, and what must never be in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from kvloop_connector.settings import Role
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.desired import desired
from kvloop_operator.facts import OPTIONAL_APIS, POD_MONITOR_API, OperatorSettings, SecretMaterial
from tests.unit.operator.documents import (
    argument,
    child,
    document,
    engine,
    engine_pod,
    environment,
    facts_of,
    fixtures,
    manifests,
    read,
    resource,
)

ROLES = [role.value for role in Role]


def transfer_config(children: list[dict[str, Any]], role: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(argument(engine(children, role), "--kv-transfer-config"))
    return parsed


def containers(node: Any) -> Iterator[Any]:
    if isinstance(node, dict | list):
        yield node
        for below in node.values() if isinstance(node, dict) else node:
            yield from containers(below)


@pytest.mark.parametrize("file", fixtures("good"), ids=lambda file: file.stem)
def test_it_is_the_same_every_time_and_shares_nothing(file: Any) -> None:
    parsed = DisaggregatedInference.parse(read(file))
    first, second = desired(parsed, facts_of(parsed)), desired(parsed, facts_of(parsed))
    assert first == second
    seen = [id(node) for node in containers([*first, *second])]
    assert len(seen) == len(set(seen))
    # An anchor in the dump is a dictionary that two manifests share.
    assert "&id" not in yaml.safe_dump_all(first)


def test_the_resource_is_never_changed() -> None:
    before = document(decode__podTemplate={"spec": {"containers": [{"name": "engine", "env": [{"name": "A"}]}]}})
    parsed = DisaggregatedInference.parse(before)
    desired(parsed, facts_of(parsed))
    assert parsed == DisaggregatedInference.parse(before)


def test_children_come_in_an_order_in_which_they_can_be_applied() -> None:
    kinds = [each["kind"] for each in manifests()]
    assert kinds.index("ConfigMap") < kinds.index("StatefulSet") < kinds.index("Deployment")
    assert kinds.index("ServiceAccount") < kinds.index("RoleBinding") < kinds.index("Deployment")


def test_children_belong_to_the_resource_where_it_has_a_uid() -> None:
    owned = document()
    owned["metadata"] |= {"uid": "42", "namespace": "serving"}
    parsed = DisaggregatedInference.parse(owned)
    for each in desired(parsed, facts_of(parsed)):
        assert each["metadata"]["namespace"] == "serving"
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("DisaggregatedInference", "42", True)


def test_the_resources_own_labels_are_not_copied() -> None:
    labelled = document()
    labelled["metadata"]["labels"] = {"app.kubernetes.io/instance": "argo"}
    labelled["metadata"]["annotations"] = {"argocd.argoproj.io/tracking-id": "x"}
    parsed = DisaggregatedInference.parse(labelled)
    assert "argo" not in yaml.safe_dump_all(desired(parsed, facts_of(parsed)))


def test_both_roles_get_the_same_settings_and_their_own_role() -> None:
    children = manifests(kvTransfer__decoderKvBlocksTtlSeconds=300, kvTransfer__extraConfig={"num_threads": 2})
    prefill, decode = (transfer_config(children, role) for role in ROLES)
    assert prefill["kv_connector_extra_config"] == decode["kv_connector_extra_config"]
    assert prefill["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 300
    assert prefill["kv_connector_extra_config"]["num_threads"] == 2
    assert (prefill["kv_role"], prefill["kv_load_failure_policy"]) == ("kv_producer", "fail")
    assert (decode["kv_role"], decode["kv_load_failure_policy"]) == ("kv_consumer", "recompute")


def test_texts_that_mean_booleans_become_booleans() -> None:
    extra = {"enforce_handshake_compat": "true", "a": "false", "b": "1"}
    config = transfer_config(manifests(kvTransfer__extraConfig=extra), "decode")["kv_connector_extra_config"]
    assert (config["enforce_handshake_compat"], config["a"], config["b"]) == (True, False, "1")


@pytest.mark.parametrize("file", fixtures("good"), ids=lambda file: file.stem)
def test_no_engine_ever_gets_an_identity_that_outlives_its_process(file: Any) -> None:
    parsed = DisaggregatedInference.parse(read(file))
    text = yaml.safe_dump_all(desired(parsed, facts_of(parsed)))
    for key in ("engine_id", "kv_rank", "kv_parallel_size"):
        assert key not in text


def test_prefill_alone_runs_without_asynchronous_scheduling() -> None:
    children = manifests()
    assert "--no-async-scheduling" in engine(children, "prefill")["args"]
    assert "--no-async-scheduling" not in engine(children, "decode")["args"]


def test_the_side_channel_is_told_the_pods_own_address() -> None:
    for role in ROLES:
        variables = environment(engine(manifests(), role))
        assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"


def test_each_data_parallel_rank_has_a_side_channel_port_of_its_own() -> None:
    children = manifests(decode__tensorParallelSize=2, decode__dataParallelSize=4)
    container = engine(children, "decode")
    assert [port["containerPort"] for port in container["ports"]] == [8000, 5600, 5601, 5602, 5603]
    assert argument(container, "--data-parallel-size") == "4"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    policy = child(children, "NetworkPolicy", "demo-decode")
    assert {"protocol": "TCP", "port": 5600, "endPort": 5603} in policy["spec"]["ingress"][1]["ports"]


def test_with_efa_kv_goes_by_libfabric() -> None:
    container = engine(manifests(), "prefill")
    assert environment(container)["FI_PROVIDER"] == "efa"
    assert transfer_config(manifests(), "prefill")["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 16}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}


def test_without_efa_nothing_of_it_is_left() -> None:
    text = yaml.safe_dump_all(manifests(network__efa__mode="Disabled", engine__image="vllm:v0.33.0"))
    for word in ("amazonaws", "LIBFABRIC", "FI_PROVIDER", "IPC_LOCK"):
        assert word not in text


def test_interfaces_can_be_claimed_instead() -> None:
    children = manifests(network__efa__mode="DRA", decode__tensorParallelSize=4)
    template = child(children, "ResourceClaimTemplate", "demo-decode-efa")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 8
    assert request["exactly"]["deviceClassName"] == "efa.networking.k8s.aws"
    pod = engine_pod(children, "decode")
    assert pod["resourceClaims"] == [{"name": "kvloop-efa", "resourceClaimTemplateName": "demo-decode-efa"}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "kvloop-efa"}]
    assert "vpc.amazonaws.com/efa" not in pod["containers"][0]["resources"]["limits"]
    assert environment(pod["containers"][0])["FI_PROVIDER"] == "efa"


@pytest.mark.parametrize(
    ("profile", "context"),
    [
        ("privileged", {"privileged": True}),
        ("ipcLock", {"allowPrivilegeEscalation": False, "capabilities": {"add": ["IPC_LOCK"]}}),
        ("none", {"allowPrivilegeEscalation": False}),
    ],
)
def test_the_security_profile_can_be_chosen(profile: str, context: dict[str, Any]) -> None:
    assert engine(manifests(security__profile=profile), "decode")["securityContext"] == context


def test_pods_stay_on_their_instance_type_and_in_one_zone() -> None:
    wanted = engine_pod(manifests(), "prefill")["affinity"]
    (term,) = wanted["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["p5en.48xlarge", "ml.p5en.48xlarge"]
    (near,) = wanted["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near["topologyKey"] == "topology.kubernetes.io/zone"
    assert near["labelSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]


def test_without_efa_one_zone_is_only_preferred() -> None:
    wanted = engine_pod(manifests(network__efa__mode="Disabled"), "prefill")["affinity"]["podAffinity"]
    assert list(wanted) == ["preferredDuringSchedulingIgnoredDuringExecution"]


def test_placement_can_be_switched_off() -> None:
    affinity = engine_pod(manifests(network__placement__mode="Disabled"), "prefill")["affinity"]
    assert "podAffinity" not in affinity


def test_the_users_affinity_stands_beside_kvloops() -> None:
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["us-west-2a"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchFields": []}]}
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    affinity = engine_pod(manifests(prefill__affinity=own), "prefill")["affinity"]
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    keys = [[each["key"] for each in term["matchExpressions"]] for term in required]
    assert keys == [
        ["topology.kubernetes.io/zone", "node.kubernetes.io/instance-type"],
        ["node.kubernetes.io/instance-type"],
    ]


def test_accelerator_taints_are_tolerated() -> None:
    own = {"key": "dedicated", "operator": "Exists"}
    keys = [each["key"] for each in engine_pod(manifests(prefill__tolerations=[own]), "prefill")["tolerations"]]
    assert keys == ["nvidia.com/gpu", "vpc.amazonaws.com/efa", "dedicated"]


def test_a_load_of_forty_minutes_is_survived() -> None:
    container = engine(manifests(), "prefill")
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 40 * 60
    # vLLM gives up on its own engine process too.
    assert int(environment(container)["VLLM_ENGINE_READY_TIMEOUT_S"]) >= 40 * 60


@pytest.mark.parametrize("grace", [None, 60, 3600])
def test_an_engine_drains_within_its_grace_period(grace: int | None) -> None:
    pod = engine_pod(manifests(decode__terminationGracePeriodSeconds=grace), "decode")
    container = pod["containers"][0]
    before, drain = (
        container["lifecycle"]["preStop"]["sleep"]["seconds"],
        int(argument(container, "--shutdown-timeout")),
    )
    assert drain > 0
    assert before + drain < pod["terminationGracePeriodSeconds"]


def test_the_default_grace_period_covers_the_drain() -> None:
    pod = engine_pod(manifests(rollout__drainTimeoutSeconds=1200), "decode")
    assert int(argument(pod["containers"][0], "--shutdown-timeout")) >= 1200


def test_pods_that_crash_come_back_at_the_revision_they_had() -> None:
    spec = child(manifests(decode__replicas=3), "StatefulSet", "demo-decode")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"partition": 3}}
    assert spec["podManagementPolicy"] == "Parallel"


def test_engine_pods_get_no_token_and_no_service_links() -> None:
    pod = engine_pod(manifests(), "decode")
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False


def test_shared_memory_is_in_memory_and_its_size_can_be_chosen() -> None:
    (volume,) = [each for each in engine_pod(manifests(), "decode")["volumes"] if each["name"] == "kvloop-shm"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    chosen = engine_pod(manifests(engine__sharedMemory="120Gi"), "decode")["volumes"][0]
    assert chosen["emptyDir"]["sizeLimit"] == "120Gi"


def test_both_roles_carry_the_same_kv_revision() -> None:
    children = manifests()
    templates = [child(children, "StatefulSet", f"demo-{role}")["spec"]["template"] for role in ROLES]
    revisions = {template["metadata"]["labels"]["kvloop.io/kv-revision"] for template in templates}
    assert len(revisions) == 1


def test_kvloops_arguments_come_last_so_that_they_win() -> None:
    arguments = engine(manifests(engine__args=["--a"], prefill__args=["--b"]), "prefill")["args"]
    assert arguments[:4] == ["serve", "Qwen/Qwen3-32B", "--a", "--b"]


def test_a_roles_environment_wins_over_both_roles_and_those_over_defaults() -> None:
    both = [{"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": "1"}, {"name": "B", "value": "both"}]
    children = manifests(engine__env=both, prefill__env=[{"name": "B", "value": "prefill"}])
    assert environment(engine(children, "prefill"))["B"] == "prefill"
    assert environment(engine(children, "decode"))["B"] == "both"
    assert environment(engine(children, "decode"))["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "1"
    names = [each["name"] for each in engine(children, "prefill")["env"]]
    assert len(names) == len(set(names))


def test_the_prefix_cache_is_switched_per_role() -> None:
    children = manifests(prefill__prefixCaching=False)
    assert "--no-enable-prefix-caching" in engine(children, "prefill")["args"]
    assert "--enable-prefix-caching" in engine(children, "decode")["args"]


def test_what_both_roles_have_to_agree_on_is_on_both_command_lines() -> None:
    children = manifests(
        engine__dtype="bfloat16", engine__blockSize=64, engine__maxModelLen=4096, engine__kvCacheDtype="fp8"
    )
    for role in ROLES:
        container = engine(children, role)
        assert argument(container, "--dtype") == "bfloat16"
        assert argument(container, "--block-size") == "64"
        assert argument(container, "--max-model-len") == "4096"
        assert argument(container, "--kv-cache-dtype") == "fp8"


def test_on_a_cpu_the_block_size_is_one_that_a_cpu_has() -> None:
    container = engine(manifests(prefill={"accelerator": "cpu"}, decode={"accelerator": "cpu"}), "prefill")
    assert argument(container, "--block-size") == "32"
    assert container["resources"] == {}


def test_weights_on_a_volume_are_mounted_read_only_and_nothing_is_downloaded() -> None:
    model = {"servedName": "qwen", "source": {"pvc": {"claimName": "models", "path": "a/b"}}}
    pod = engine_pod(manifests(model=model), "decode")
    container = pod["containers"][0]
    assert container["args"][1] == "/models/a/b"
    assert argument(container, "--served-model-name") == "qwen"
    assert environment(container)["HF_HUB_OFFLINE"] == "1"
    assert {"name": "kvloop-model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}


def test_weights_in_a_bucket_are_streamed() -> None:
    s3 = {"uri": "s3://models/qwen", "region": "us-west-2", "credentialsSecretRef": {"name": "keys"}}
    container = engine(manifests(model__source={"s3": s3}), "decode")
    assert container["args"][1] == "s3://models/qwen"
    assert argument(container, "--load-format") == "runai_streamer"
    variables = environment(container)
    assert variables["AWS_REGION"] == "us-west-2"
    assert variables["AWS_SECRET_ACCESS_KEY"]["secretKeyRef"] == {"name": "keys", "key": "AWS_SECRET_ACCESS_KEY"}


def test_the_hugging_face_token_comes_from_its_secret() -> None:
    container = engine(manifests(model__tokenSecretRef={"name": "hf", "key": "token"}), "prefill")
    assert environment(container)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({}, {"emptyDir": {}}),
        ({"sizeLimit": "1Ti"}, {"emptyDir": {"sizeLimit": "1Ti"}}),
        ({"claimName": "weights"}, {"persistentVolumeClaim": {"claimName": "weights"}}),
        ({"hostPath": "/mnt"}, {"hostPath": {"path": "/mnt", "type": "DirectoryOrCreate"}}),
    ],
)
def test_downloaded_weights_are_kept_where_the_user_says(cache: dict[str, Any], volume: dict[str, Any]) -> None:
    assert engine_pod(manifests(model__cache=cache), "decode")["volumes"][1] == {"name": "kvloop-cache", **volume}


def test_neuron_pods_ask_for_whole_chips() -> None:
    trainium = {"instanceType": "trn2.48xlarge", "tensorParallelSize": 32}
    container = engine(manifests(prefill=trainium, decode=trainium), "prefill")
    assert container["resources"]["limits"] == {"aws.amazon.com/neuron": 8, "vpc.amazonaws.com/efa": 8}
    assert argument(container, "--tensor-parallel-size") == "32"


def test_a_suspended_deployment_keeps_its_router_and_nothing_else() -> None:
    children = manifests(suspend=True, decode__replicas=4)
    for role in ROLES:
        spec = child(children, "StatefulSet", f"demo-{role}")["spec"]
        assert (spec["replicas"], spec["updateStrategy"]["rollingUpdate"]["partition"]) == (0, 0)
    assert child(children, "Deployment", "demo-router")["spec"]["replicas"] == 1


def test_a_role_can_be_at_zero() -> None:
    assert child(manifests(prefill__replicas=0), "StatefulSet", "demo-prefill")["spec"]["replicas"] == 0


def test_engines_are_reached_only_by_the_router_and_by_the_other_role() -> None:
    children = manifests()
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        ingress = child(children, "NetworkPolicy", f"demo-{role}")["spec"]["ingress"]
        sources = [rule["from"][0]["podSelector"]["matchLabels"]["kvloop.io/role"] for rule in ingress]
        assert sources == ["router", other]
        assert [port["port"] for port in ingress[0]["ports"]] == [8000]
        assert [port["port"] for port in ingress[1]["ports"]] == [5600, 32768]


def test_prometheus_is_let_through_where_it_is_named() -> None:
    policy = child(manifests(monitoring__namespace="monitoring"), "NetworkPolicy", "demo-prefill")
    assert policy["spec"]["ingress"][2]["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]


def test_the_admin_port_is_for_the_operators_namespace() -> None:
    policy = child(manifests(OperatorSettings(operator_namespace="kvloop-system")), "NetworkPolicy", "demo-router")
    admin = policy["spec"]["ingress"][1]
    assert admin["ports"][0]["port"] == 8081
    assert admin["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kvloop-system"}


def test_network_policies_can_be_left_out() -> None:
    assert not [each for each in manifests(network__policy__enabled=False) if each["kind"] == "NetworkPolicy"]


def test_the_router_may_look_at_pods_and_do_nothing_else() -> None:
    assert child(manifests(), "Role", "demo-router")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


def test_the_router_is_confined() -> None:
    pod = child(manifests(), "Deployment", "demo-router")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    container = pod["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_secret_is_made_only_of_material_that_is_given() -> None:
    assert not [each for each in manifests() if each["kind"] == "Secret"]
    material = SecretMaterial(admin_token="a" * 32, digest_key="b" * 64, seal_key="c" * 64)
    secret = child(manifests(OperatorSettings(secret_material=material)), "Secret", "demo-router")
    assert secret["stringData"] == {"admin-token": "a" * 32, "digest-key": "b" * 64, "seal-key": "c" * 64}


def test_engines_get_an_account_of_their_own_only_where_asked_for() -> None:
    assert engine_pod(manifests(), "decode")["serviceAccountName"] == "default"
    assert engine_pod(manifests(serviceAccount={"name": "mine"}), "decode")["serviceAccountName"] == "mine"
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::111122223333:role/models"}
    children = manifests(serviceAccount={"create": True, "annotations": role})
    assert engine_pod(children, "decode")["serviceAccountName"] == "demo-engine"
    assert child(children, "ServiceAccount", "demo-engine")["metadata"]["annotations"] == role


def test_one_pod_of_a_role_may_be_disrupted_unless_said_otherwise() -> None:
    children = manifests(decode__disruptionBudget={"minAvailable": "50%"})
    assert child(children, "PodDisruptionBudget", "demo-prefill")["spec"]["maxUnavailable"] == 1
    spec = child(children, "PodDisruptionBudget", "demo-decode")["spec"]
    assert (spec["minAvailable"], "maxUnavailable" in spec) == ("50%", False)


def test_pod_monitors_are_made_where_asked_for_and_possible() -> None:
    def monitors(settings: OperatorSettings, **changes: Any) -> list[str]:
        return [each["metadata"]["name"] for each in manifests(settings, **changes) if each["kind"] == "PodMonitor"]

    everything, without = OperatorSettings(), OperatorSettings(apis=OPTIONAL_APIS - {POD_MONITOR_API})
    assert monitors(everything) == []
    assert monitors(without, monitoring__podMonitor=True) == []
    assert monitors(everything, monitoring__podMonitor=True) == ["demo-prefill", "demo-decode", "demo-router"]


def test_servers_listen_where_the_settings_say() -> None:
    children = manifests(OperatorSettings(bind_address="$(POD_IP)"))
    assert argument(engine(children, "decode"), "--host") == "$(POD_IP)"
    config = yaml.safe_load(child(children, "ConfigMap", "demo-router")["data"]["router.yaml"])
    assert config["listen"]["host"] == config["admin"]["host"] == "$(POD_IP)"
    # What the address is taken from stands before it in the pod's environment.
    assert engine(children, "decode")["env"][0]["name"] == "POD_IP"


def test_a_changed_configuration_makes_new_router_pods() -> None:
    def template(**changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = child(manifests(**changes), "Deployment", "demo-router")["spec"]["template"]
        return found

    assert template() == template()
    assert template() != template(router__handleTtlSeconds=100)


def test_resource_without_id_is_served_under_its_name() -> None:
    parsed = resource(model={"servedName": "qwen", "source": {"s3": {"uri": "s3://models/qwen"}}})
    config = child(desired(parsed, facts_of(parsed)), "ConfigMap", "demo-router")["data"]["router.yaml"]
    assert yaml.safe_load(config)["model"] == {"id": "s3://models/qwen", "servedName": "qwen"}
