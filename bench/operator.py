"""How fast the operator makes many resources what they should be, and what it takes: ``bench/results/operator.json``.

A real control plane without nodes: the children and pod objects are real, no pod runs. Load generator, API server,
controllers and operator share this machine's cores, so that the times are upper bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.charts.helm import Helm
from tests.cluster import cluster
from tests.cluster.cluster import Cluster
from tests.cluster.paths import REPOSITORY
from tests.harness.kube import Kube
from tests.harness.operator_process import OperatorProcess, install_rights

RESULTS: Final = Path(__file__).parent / "results" / "operator.json"
SIZES: Final = (100, 1000)
CHANGES: Final = 100
NAMESPACE: Final = "bench"
_CREATORS: Final = 4
_COUNT_SECONDS: Final = 0.25
_POLL_SECONDS: Final = 0.002
_QUIET_LOOKS: Final = 10


def main() -> None:
    """Measure each size on a control plane of its own, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resources", type=int, nargs="+", default=SIZES, metavar="COUNT")
    sizes = parser.parse_args().resources
    rows = []
    for count in sizes:
        rows.append(measure(count))
        _write(rows)
    table = Table("resources", "s to all applied", "ms p50", "ms p99", "RSS MiB", "requests/pass")
    for row in rows:
        change = row["change_to_applied_ms"]
        told = (row["resources"], row["seconds_to_all_applied"], change["p50"], change["p99"], row["rss_mib"])
        table.add_row(*map(str, (*told, row["requests_per_reconcile"])))
    Console().print(table)


def _write(rows: list[dict[str, Any]]) -> None:
    result = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cluster": "control plane only: no pod runs",
        "results": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


def measure(count: int) -> dict[str, Any]:
    """One size."""
    with cluster.running("control-plane") as place, tempfile.TemporaryDirectory() as folder:
        place.define(REPOSITORY / "crds" / "kvloop.io_disaggregatedinferences.yaml")
        account = install_rights(place, Helm(Path(folder)))
        place.kubectl("create", "namespace", NAMESPACE)
        kube = Kube(place.kubeconfig)
        with OperatorProcess(account, log=Path(folder) / "operator.log") as operator, Progress() as progress:
            operator.wait_until_ready()
            before = _counts(operator)
            seconds = _apply_all(place, kube, count, progress)
            requests, passes = (now - then for now, then in zip(_counts(operator), before, strict=True))
            _wait_for_rest(operator, progress)
            changes = _change(kube, count, progress)
            return {
                "resources": count,
                "seconds_to_all_applied": round(seconds, 1),
                "change_to_applied_ms": {"p50": _percentile(changes, 50), "p99": _percentile(changes, 99)},
                "rss_mib": round(operator.resident_bytes() / 2**20),
                "requests_per_reconcile": round(requests / passes, 2),
            }


def _document(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvloop.io/v1alpha1",
        "kind": "DisaggregatedInference",
        "metadata": {"name": name},
        "spec": {
            "model": {"id": "Qwen/Qwen3-32B", "servedName": "qwen3-32b"},
            "engine": {"image": "registry.example.org/vllm:v0.33.0"},
            "prefill": {"instanceType": "p5en.48xlarge", "tensorParallelSize": 8},
            "decode": {"instanceType": "p5en.48xlarge", "tensorParallelSize": 8},
        },
    }


def _apply_all(place: Cluster, kube: Kube, count: int, progress: Progress) -> float:
    """Create all resources; gives the seconds until the last of their StatefulSets, which come last, is there."""
    task = progress.add_task(f"{count} resources applied", total=2 * count)
    started = time.monotonic()
    with ThreadPoolExecutor(_CREATORS) as pool:
        made = pool.map(lambda index: kube.create(_document(f"demo-{index}"), NAMESPACE), range(count))
        for _ in made:
            progress.update(task, completed=_statefulsets(kube))
    while (there := _statefulsets(kube)) < 2 * count:
        progress.update(task, completed=there)
        # To count them is work for the API server that grows with their number.
        time.sleep(_COUNT_SECONDS)
    progress.update(task, completed=2 * count)
    return time.monotonic() - started


def _statefulsets(kube: Kube) -> int:
    answer = kube.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets", limit="1")
    return len(answer.body["items"]) + int(answer.body["metadata"].get("remainingItemCount", 0))


def _wait_for_rest(operator: OperatorProcess, progress: Progress) -> None:
    """Until no resource waits for a pass, for so many looks in a row: what follows is measured at rest.

    Passes never end altogether: whose pods have no node is looked at again.
    """
    task = progress.add_task("waiting for rest", total=None)
    quiet = 0
    while quiet < _QUIET_LOOKS:
        quiet = quiet + 1 if not operator.metric("kvloop_operator_queue_length") else 0
        time.sleep(1)
    progress.remove_task(task)


def _change(kube: Kube, count: int, progress: Progress) -> list[float]:
    """Milliseconds from a change of a spec to the change of the child that follows from it, one after the other."""
    found = []
    for index in progress.track(range(CHANGES), description="changes"):
        name, size = f"demo-{index % count}", 1_000_000 + index
        kube.patch("DisaggregatedInference", NAMESPACE, name, {"spec": {"router": {"limits": {"bodyBytes": size}}}})
        started = time.monotonic()
        while f"bodyBytes: {size}" not in _configuration(kube, name):
            time.sleep(_POLL_SECONDS)
        found.append((time.monotonic() - started) * 1000)
    return found


def _configuration(kube: Kube, name: str) -> str:
    child = kube.get("ConfigMap", NAMESPACE, f"{name}-router")
    return str(child["data"]["router.yaml"]) if child is not None else ""


def _counts(operator: OperatorProcess) -> tuple[float, float]:
    return operator.metric("kvloop_operator_api_requests"), operator.metric("kvloop_operator_reconciles_total")


def _percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 1)


if __name__ == "__main__":
    main()
