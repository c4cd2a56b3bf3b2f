"""Real vLLM engines in pods: KV moves over the pod network, and the operator and the router know it."""

from __future__ import annotations

import ctypes.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvloop import cpu_engine
from kvloop.engine_plugin import make_plugin_directory
from kvloop.tiny_model import write_model
from kvloop_connector.settings import Role
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterUnavailableError
from tests.cluster.fixtures import skip_where_unavailable
from tests.harness.deployment import MODEL, Deployment
from tests.harness.engines import START_SECONDS, engine_environment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800), pytest.mark.usefixtures("operator_is_well")]

_ENVIRONMENT: Final = "/opt/vllm"
_FILES: Final = "/opt/files"
_CONTEXT: Final = 4096
_LIBRARIES: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64")

_VLLM: Final = """#!/usr/bin/python3
import sys
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
# Each engine pins itself to the same core for its transfers (`cpu_engine.free_affinity`).
_FREE: Final = "os.sched_setaffinity = lambda *_: None\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """What an image with vLLM has beside the environment: the command, a system library, kvloop's plug-in; a model."""
    write_model(tmp_path / "model")
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(_VLLM)
    command.chmod(0o755)
    # Copied: a link would lead out of the volume.
    shutil.copytree(make_plugin_directory(tmp_path / "links", patient=True), tmp_path / "python")
    with (tmp_path / "python" / "sitecustomize.py").open("a") as site:
        site.write(_FREE)
    (tmp_path / "lib").mkdir()
    name = ctypes.util.find_library("numa")
    found = [Path(folder, name) for folder in _LIBRARIES if name and Path(folder, name).exists()]
    with skip_where_unavailable():
        if not found:
            raise ClusterUnavailableError("libnuma is not there (Debian: libnuma1), which vLLM needs on a CPU")
    shutil.copy(found[0], tmp_path / "lib")
    return tmp_path


@pytest.fixture
def volumes(node: Cluster, deployment: Deployment, files: Path) -> Iterator[None]:
    """The claims ``environment`` and ``files``, each bound to a read-only folder of the node."""
    folders = {"environment": engine_environment(), "files": files}
    names = {claim: f"{deployment.namespace}-{claim}" for claim in folders}
    for claim, folder in folders.items():
        common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": names[claim]},
            "spec": {
                **common,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": deployment.namespace, "name": claim},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        }
        wanted = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": {**common, "volumeName": names[claim], "resources": {"requests": {"storage": "1Gi"}}},
        }
        node.kubectl.apply(volume)
        deployment.kubectl.apply(wanted)
    yield
    node.kubectl("delete", "persistentvolume", *names.values(), "--wait=false")


def _spec(image: str) -> dict[str, Any]:
    environment = cpu_engine.environment(Path(_FILES, "python"))
    environment["PYTHONPATH"] += f":{_ENVIRONMENT}/lib/python3.11/site-packages"
    environment |= {"PATH": f"{_FILES}/bin:/usr/bin:/bin", "LD_LIBRARY_PATH": f"{_FILES}/lib"}
    # The operator sets these itself, to the same.
    for name in ("UCX_TLS", "VLLM_CPU_OMP_THREADS_BIND", "HF_HUB_OFFLINE"):
        environment.pop(name)
    claims = ("environment", "files")
    role = {
        "accelerator": "cpu",
        "prefixCaching": False,
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}},
        "terminationGracePeriodSeconds": 60,
        "volumes": [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in claims],
        "volumeMounts": [
            {"name": "environment", "mountPath": _ENVIRONMENT, "readOnly": True},
            {"name": "files", "mountPath": _FILES, "readOnly": True},
        ],
    }
    return {
        "model": {"servedName": MODEL, "source": {"pvc": {"claimName": "files", "path": "model"}}},
        "engine": {
            "image": image,
            "version": "0.32.0",
            "dtype": "float32",
            "blockSize": cpu_engine.BLOCK_SIZE,
            "maxModelLen": _CONTEXT,
            "args": [
                "--enforce-eager",
                f"--max-num-batched-tokens={4 * _CONTEXT}",
                "--num-gpu-blocks-override=256",
            ],
            "env": [{"name": name, "value": value} for name, value in environment.items()],
        },
        "kvTransfer": {"extraConfig": dict(cpu_engine.EXTRA_TRANSFER_CONFIG)},
        "prefill": role,
        "decode": role,
        "router": {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}},
        "rollout": {"honourHandlesSeconds": 3},
    }


def test_real_engines_serve_and_a_second_turn_reuses_what_decode_retained(
    deployment: Deployment, volumes: None, base_image: str
) -> None:
    deployment.apply(_spec(base_image))
    deployment.wait_until_served(seconds=START_SECONDS)
    assert deployment.resource()["status"]["kvTransfer"]["connector"] == "KvloopConnector"
    assert deployment.conditions()["KVTransferVerified"]["message"] == "KV was seen to move in both directions"
    (prefill,) = deployment.engines(Role.PREFILL)
    work = " ".join(["The agent reads the ticket, looks at the code and runs the tests."] * 12)
    sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}

    history = [{"role": "user", "content": work}]
    first = deployment.chat(history, **sampling)
    assert first.headers["x-kvloop-path"] == "cold"
    before = deployment.metrics(prefill)
    history += [first.json["choices"][0]["message"], {"role": "user", "content": "Now look at the second file. " * 6}]
    history = [{"role": each["role"], "content": each["content"]} for each in history]
    second = deployment.chat(history, **sampling)
    assert second.headers["x-kvloop-path"] == "warm"
    reused = int(second.headers["x-kvloop-reused-tokens"])
    assert reused > 0
    # Engines count with a delay.
    deployment.wait_until(
        lambda: (deployment.metrics(prefill) - before).external_hits == reused, what="prefill to count what it pulled"
    )

    cold = deployment.chat(history, cache_salt="of its own", **sampling)
    assert cold.headers["x-kvloop-path"] == "cold"
    texts = [answer.json["choices"][0]["message"]["content"] for answer in (second, cold)]
    assert texts[0] == texts[1]
