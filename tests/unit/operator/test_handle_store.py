"""Where several routers share handles."""

from __future__ import annotations

from typing import Any

import yaml

from kvloop_operator import names
from kvloop_operator.credentials import material_of
from kvloop_operator.facts import OperatorSettings
from kvloop_operator.status import ConditionType, assess
from kvloop_router.config import HandleStore, parse
from tests.unit.operator.documents import child, manifests
from tests.unit.operator.scenes import Scene, pod, scene

MATERIAL = material_of(None)
NAMED: dict[str, Any] = {
    "router__replicas": 2,
    "router__handleStore": {
        "url": "valkeys://user@store:6380/1",
        "passwordSecretRef": {"name": "store", "key": "word"},
        "caSecretRef": {"name": "trust", "key": "ca.crt"},
        "maxBytes": 2000000,
    },
}


def told(**changes: Any) -> HandleStore:
    """What the router is told."""
    text = child(manifests(**changes), "ConfigMap", "demo-router")["data"]["router.yaml"]
    return parse(text, {"POD_IP": "10.0.0.1", "POD_NAMESPACE": "team"}).handle_store


def kinds_of_store(**changes: Any) -> list[str]:
    return [each["kind"] for each in manifests(**changes) if each["metadata"]["name"] == "demo-store"]


def router_files(**changes: Any) -> dict[str, str]:
    """The Secrets behind the files that a router sees, by path."""
    spec = child(manifests(**changes), "Deployment", "demo-router")["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    return {
        f"{mounts[volume['name']]}/{item['path']}": f"{source['secret']['name']}/{item['key']}"
        for volume in spec["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
        for item in source.get("secret", {}).get("items", ())
    }


def test_one_router_keeps_handles_in_its_memory() -> None:
    assert kinds_of_store() == []
    assert told().kind == "memory"
    assert "store-password" not in yaml.safe_dump_all(manifests(OperatorSettings(secret_material=MATERIAL)))


def test_several_get_a_server_of_their_own() -> None:
    assert kinds_of_store(router__replicas=2) == ["NetworkPolicy", "Service", "Deployment"]
    assert kinds_of_store(router__replicas=2, network__policy={"enabled": False}) == ["Service", "Deployment"]

    assert kinds_of_store(router__workers=2) == ["NetworkPolicy", "Service", "Deployment"]

    store = told(router__replicas=2)

    assert told(router__workers=2) == store
    assert (store.kind, store.url, store.name) == ("valkey", "valkey://demo-store:6379", "default/demo")
    assert store.password_file is not None
    assert router_files(router__replicas=2)[store.password_file] == "demo-router/store-password"


def test_a_server_that_is_named_is_used_and_none_is_made() -> None:
    assert kinds_of_store(**NAMED) == []

    store = told(**NAMED)

    assert (store.kind, store.url, store.max_bytes) == ("valkey", "valkeys://user@store:6380/1", 2000000)
    files = router_files(**NAMED)
    assert (files[store.password_file or ""], files[store.ca_file or ""]) == ("store/word", "trust/ca.crt")


def test_one_router_may_use_a_server_too() -> None:
    assert told(router__handleStore={"url": "redis://store"}).kind == "valkey"


def test_the_password_is_made_once_and_is_in_no_argument() -> None:
    settings = OperatorSettings(secret_material=MATERIAL)
    children = manifests(settings, router__replicas=2)

    secret = child(children, "Secret", "demo-router")["stringData"]
    assert secret[names.STORE_PASSWORD_KEY] == MATERIAL.store_password
    assert secret[names.STORE_SETTINGS_KEY] == f"requirepass {MATERIAL.store_password}\n"
    rest = [each for each in children if each["kind"] != "Secret"]
    assert MATERIAL.store_password not in yaml.safe_dump_all(rest)
    assert len(MATERIAL.store_password) == 64


def test_only_this_resources_routers_reach_it() -> None:
    policy = child(manifests(router__replicas=2), "NetworkPolicy", "demo-store")["spec"]

    assert policy["podSelector"]["matchLabels"] == names.selector("demo", names.STORE)
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": names.selector("demo", names.ROUTER)}}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 6379}]


def test_its_memory_follows_what_handles_may_take() -> None:
    def container(**store: Any) -> Any:
        children = manifests(router__replicas=2, router__handleStore=store)
        return child(children, "Deployment", "demo-store")["spec"]["template"]["spec"]["containers"][0]

    large = container(maxBytes=2**30)
    assert large["args"][large["args"].index("--maxmemory") + 1] == str(2 * 2**30)
    assert int(large["resources"]["limits"]["memory"]) > 2 * 2**30
    own = container(resources={"limits": {"memory": "2Gi"}}, image="my-registry/valkey:9")
    assert (own["image"], own["resources"]) == ("my-registry/valkey:9", {"limits": {"memory": "2Gi"}})


def test_a_server_that_is_away_degrades_and_nothing_more() -> None:
    def told_of(shown: Scene) -> dict[str, Any]:
        conditions = assess(shown.situation()).status["conditions"]
        return {each["type"]: each for each in conditions}

    without = scene(router__replicas=2)
    missing = told_of(without)

    assert missing[ConditionType.READY]["status"] == "True"
    assert missing[ConditionType.DEGRADED]["status"] == "True"
    assert missing[ConditionType.DEGRADED]["message"].startswith(
        "demo-store 0/1 ready, and every turn is computed anew"
    )
    there = without.with_pods(*without.pods, pod("demo-store-0", names.STORE))
    assert told_of(there)[ConditionType.DEGRADED]["status"] == "False"
