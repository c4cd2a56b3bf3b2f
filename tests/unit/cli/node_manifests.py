"""Builders for the manifests of the node's tests."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]


def container(*command: str, **fields: Any) -> Manifest:
    return {"name": "main", "image": "image", **({"command": list(command)} if command else {}), **fields}


def pod_template(*containers: Manifest, labels: dict[str, str] | None = None, **spec: Any) -> Manifest:
    return {"metadata": {"labels": labels or {}}, "spec": {"containers": list(containers), **spec}}


def stateful_set(
    name: str, template: Manifest, *, replicas: int = 1, partition: int | None = None, **spec: Any
) -> Manifest:
    if partition is not None:
        spec["updateStrategy"] = {"type": "RollingUpdate", "rollingUpdate": {"partition": partition}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "podManagementPolicy": "Parallel", "template": template, **spec},
    }


def deployment(name: str, template: Manifest, *, replicas: int = 1, **spec: Any) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {"replicas": replicas, "template": template, **spec},
    }


def config_map(name: str, **data: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def secret(name: str, **data: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def field_ref(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
