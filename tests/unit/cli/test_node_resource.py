"""A resource for the local node: what is rendered, and what is changed for real engines on a CPU."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvloop import cpu_engine
from kvloop.node.resource import InvalidFile, fit_to_cpu, prepare
from kvloop.node.stand_in import EngineEnvironment, EngineKind, NoEngineEnvironment
from kvloop.node.workloads import read_manifests
from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.desired import desired
from kvloop_operator.facts import OperatorSettings, resolve

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return document


@pytest.mark.parametrize("name", ["demo.yaml", "minimal.yaml"])
def test_every_manifest_of_an_example_is_understood_by_the_node(name: str, tmp_path: Path) -> None:
    deployment = prepare(EXAMPLES / name, engine=EngineKind.SIM, state_dir=tmp_path)

    wanted = read_manifests(deployment.manifests)

    assert [workload.kind for workload in wanted.workloads] == ["StatefulSet", "StatefulSet", "Deployment"]
    assert set(deployment.images) == {
        container.image for workload in wanted.workloads for container in workload.template.containers
    }
    assert "SIMULATED" in deployment.notices[0]


def test_pods_listen_on_their_own_addresses_and_the_router_reads_the_nodes_file(tmp_path: Path) -> None:
    deployment = prepare(EXAMPLES / "demo.yaml", engine=EngineKind.SIM, state_dir=tmp_path)

    [config] = [m for m in deployment.manifests if m["kind"] == "ConfigMap"]
    router = yaml.safe_load(config["data"]["router.yaml"])
    assert router["listen"]["host"] == router["admin"]["host"] == "$(POD_IP)"
    assert router["discovery"] == {"file": str(tmp_path.resolve() / "engines.json")}


def test_secrets_are_new_each_time(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        manifests = prepare(EXAMPLES / "demo.yaml", engine=EngineKind.SIM, state_dir=tmp_path).manifests
        found += [m["stringData"] for m in manifests if m["kind"] == "Secret"]

    assert len({secret["admin-token"] for secret in found}) == len({secret["digest-key"] for secret in found}) == 2


def test_settings_take_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    settings = {"prefill": {"replicas": 2}}

    deployment = prepare(EXAMPLES / "demo.yaml", engine=EngineKind.SIM, state_dir=tmp_path, settings=settings)

    replicas = {w.name: w.replicas for w in read_manifests(deployment.manifests).workloads}
    assert replicas == {"demo-prefill": 2, "demo-decode": 1, "demo-router": 1}


def test_a_bad_file_is_refused_with_a_line_a_fault(tmp_path: Path) -> None:
    document = example("demo.yaml")
    document["spec"]["unheardOf"] = 1
    document["spec"]["prefill"]["misspelt"] = 1
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(document))

    with pytest.raises(InvalidFile) as caught:
        prepare(file, engine=EngineKind.SIM, state_dir=tmp_path)

    assert len(str(caught.value).splitlines()) == 2


def test_two_resources_in_a_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(yaml.safe_dump_all([example("demo.yaml"), example("minimal.yaml")]))

    with pytest.raises(InvalidFile, match="2 resources; a local node runs one"):
        prepare(file, engine=EngineKind.SIM, state_dir=tmp_path)


@pytest.mark.parametrize("name", ["demo.yaml", "minimal.yaml"])
def test_an_example_fitted_to_a_cpu_can_be_deployed_there(name: str) -> None:
    before = example(name)
    untouched = deepcopy(before)

    fitted, changes = fit_to_cpu(before, model=Path("/models/tiny"), version="0.32.0")

    assert before == untouched
    resource = DisaggregatedInference.parse(fitted)
    for manifest in desired(resource, resolve(resource, OperatorSettings())):
        if manifest["kind"] == "StatefulSet":
            [engine] = manifest["spec"]["template"]["spec"]["containers"]
            arguments = " ".join(engine["args"])
            assert "serve /models/tiny" in arguments
            assert "--enforce-eager" in arguments
            assert f"--block-size {cpu_engine.BLOCK_SIZE}" in arguments
            assert "--dtype float32" in arguments
            assert '"num_threads":1' in arguments
            assert "LIBFABRIC" not in arguments
            assert not engine["resources"]
    assert changes[0] == "the model is tiny, with random weights: what it says means nothing"


def test_a_context_that_takes_a_cpu_minutes_is_cut_and_told() -> None:
    fitted, changes = fit_to_cpu(example("demo.yaml"), model=Path("/models/tiny"), version="0.32.0")

    assert fitted["spec"]["engine"]["maxModelLen"] == 8192
    assert "spec.engine.maxModelLen is 8192: a CPU takes seconds for a thousand tokens" in changes


def test_the_served_name_stays_that_of_the_resource() -> None:
    fitted, _ = fit_to_cpu(example("demo.yaml"), model=Path("/models/tiny"), version="0.32.0")

    assert fitted["spec"]["model"] == {"id": "/models/tiny", "servedName": "demo"}


@pytest.mark.parametrize(
    ("value", "words"), [(None, "is not set"), ("", "is not set"), ("/nowhere", "no bin/vllm in /nowhere")]
)
def test_a_missing_engine_environment_is_told_with_its_remedy(
    value: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("KVLOOP_ENGINE_ENVIRONMENT", raising=False)
    else:
        monkeypatch.setenv("KVLOOP_ENGINE_ENVIRONMENT", value)

    with pytest.raises(NoEngineEnvironment, match="make engine-environment") as caught:
        EngineEnvironment.find()

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("version", "told", "said"),
    [("0.32.0+cpu", "0.32.0", False), ("0.33.0+cpu.unofficial", "0.33.0 (unofficial)", True)],
)
def test_what_is_put_together_from_two_releases_says_so(
    version: str, told: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python", "vllm"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("KVLOOP_ENGINE_ENVIRONMENT", str(tmp_path))
    document = example("demo.yaml")
    document["spec"]["model"]["id"] = str(tmp_path)
    file = tmp_path / "resource.yaml"
    file.write_text(yaml.safe_dump(document))

    deployment = prepare(file, engine=EngineKind.VLLM, state_dir=tmp_path)

    assert deployment.engine_version == told
    assert any("UNOFFICIAL" in notice for notice in deployment.notices) is said


def test_simulated_engines_do_not_pretend_to_have_kvloops_connector(tmp_path: Path) -> None:
    file = tmp_path / "resource.yaml"
    text = (EXAMPLES / "demo.yaml").read_text()
    file.write_text(text.replace("  kvTransfer:\n", "  kvTransfer:\n    connector: KvloopConnector\n"))

    with pytest.raises(InvalidFile, match="simulated engines have NixlConnector only"):
        prepare(file, engine=EngineKind.SIM, state_dir=tmp_path)
