"""The operator's command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How the operator runs. Times are in seconds.

    namespaces: that it watches; empty: all. operator_namespace: its own; None outside of a cluster.
    resync_seconds: how often everything is read anew. workers: resources that are worked on at the same time.
    unschedulable_seconds: how long a pod may wait for a node before that counts as a failure: an autoscaler may be
    bringing one. probe_port, metrics_port: 0 lets the system choose.
    """

    namespaces: tuple[str, ...]
    operator_namespace: str | None
    router_image: str
    probe_host: str
    probe_port: int
    metrics_port: int
    resync_seconds: float
    workers: int
    unschedulable_seconds: float
    log_level: str


def parse(arguments: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> RunSettings:
    """The settings of a command line; ends the program where it is not understood."""
    parser = argparse.ArgumentParser(prog="kvloop-operator", description="Reconciles DisaggregatedInference resources.")
    scope = parser.add_mutually_exclusive_group(required=True)
    scope.add_argument("--all-namespaces", action="store_true", help="watch the whole cluster")
    scope.add_argument(
        "--namespace", action="append", default=[], metavar="NAME", help="watch this one; may be repeated"
    )
    parser.add_argument("--router-image", required=True, metavar="IMAGE", help="where a resource names none")
    parser.add_argument("--host", default="0.0.0.0", help="address of probes and metrics")  # noqa: S104
    parser.add_argument("--probe-port", type=int, default=8080, metavar="PORT", help="of /healthz")
    parser.add_argument("--metrics-port", type=int, default=9090, metavar="PORT", help="of /metrics")
    parser.add_argument("--resync-seconds", type=_positive, default=600.0, metavar="SECONDS")
    parser.add_argument("--workers", type=int, choices=range(1, 65), default=8, metavar="COUNT")
    parser.add_argument("--unschedulable-seconds", type=_positive, default=600.0, metavar="SECONDS")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    given = parser.parse_args(arguments)
    return RunSettings(
        namespaces=tuple(sorted(set(given.namespace))),
        operator_namespace=environment.get("POD_NAMESPACE") or None,
        router_image=given.router_image,
        probe_host=given.host,
        probe_port=given.probe_port,
        metrics_port=given.metrics_port,
        resync_seconds=given.resync_seconds,
        workers=given.workers,
        unschedulable_seconds=given.unschedulable_seconds,
        log_level=given.log_level,
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: more than 0 is needed")
    return value
