"""Manifests -> what should run: workloads and the objects that they read. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvloop.node.errors import UnsupportedManifest
from kvloop.node.fields import Fields, Notices
from kvloop.node.model import Objects, PodTemplate
from kvloop.node.pod_template import read_pod_template

_RUN = ("StatefulSet", "Deployment")
_REFUSED = ("Pod", "Job", "CronJob", "DaemonSet", "ReplicaSet", "ReplicationController", "PersistentVolumeClaim")
_STRATEGIES = {"StatefulSet": ("RollingUpdate", "OnDelete"), "Deployment": ("RollingUpdate", "Recreate")}
_REVISION_DIGITS = 10
_DEFAULT_SHARE = "25%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A StatefulSet or Deployment.

    revision: digest of the template; pods of one revision are alike.
    strategy: RollingUpdate, OnDelete (StatefulSet) or Recreate (Deployment).
    partition: StatefulSet: ordinals below it stay at, and come back at, the current revision.
    max_surge, max_unavailable: Deployment: pods above, and ready pods below, ``replicas`` during an update.
    """

    kind: str
    namespace: str
    name: str
    replicas: int
    template: PodTemplate
    revision: str
    strategy: str = "RollingUpdate"
    partition: int = 0
    max_surge: int = 1
    max_unavailable: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.kind, self.namespace, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A whole list of manifests, read."""

    workloads: tuple[Workload, ...]
    objects: Objects
    notices: tuple[str, ...]


def read_manifests(manifests: Iterable[Mapping[str, Any]]) -> Wanted:
    """Raises ``UnsupportedManifest`` for anything that the node cannot honour and that matters."""
    workloads: dict[tuple[str, str, str], Workload] = {}
    data: dict[tuple[str, str, str], Mapping[str, bytes]] = {}
    notices = Notices()
    without_effect: dict[str, None] = {}
    for index, manifest in enumerate(manifests):
        fields = Fields(manifest, "")
        kind = fields.need("kind", str)
        metadata = Fields(fields.need("metadata", dict), "metadata")
        name, namespace = metadata.need("name", str), metadata.get("namespace", str, "default")
        fields.path = f"{kind}/{name}"
        key = (kind, namespace, name)
        if key in workloads or key in data:
            raise UnsupportedManifest(fields.path, f"manifest {index} repeats it")
        if kind in _RUN:
            workloads[key] = _workload(key, fields, notices)
        elif kind in ("ConfigMap", "Secret"):
            data[key] = _data(kind, fields)
        elif kind in _REFUSED:
            raise UnsupportedManifest(fields.path, f"the local node does not run a {kind}")
        elif kind == "Service":
            notices.add("names do not resolve: pods are reached at their own addresses")
        else:
            without_effect.setdefault(kind)
    if without_effect:
        notices.add(f"objects without effect: {', '.join(without_effect)}")
    return Wanted(workloads=tuple(workloads.values()), objects=Objects(data=data), notices=tuple(notices))


def template_revision(template: Mapping[str, Any]) -> str:
    """Digest of a pod template: equal templates, in whatever key order, give equal revisions."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:_REVISION_DIGITS]


def _workload(key: tuple[str, str, str], fields: Fields, notices: Notices) -> Workload:
    kind, namespace, name = key
    fields.ignore("apiVersion", "status")
    spec = Fields(fields.need("spec", dict), fields.at("spec"))
    fields.close()
    replicas = spec.get("replicas", int, 1)
    template = spec.need("template", dict)
    pod_template = read_pod_template(template, spec.at("template"), notices)
    if pod_template.restart_policy != "Always":
        raise UnsupportedManifest(spec.at("template.spec.restartPolicy"), f"must be Always in a {kind}")
    strategy_key = "updateStrategy" if kind == "StatefulSet" else "strategy"
    strategy = spec.sub(strategy_key) or Fields({}, spec.at(strategy_key))
    strategy_type = strategy.get("type", str, "RollingUpdate")
    if strategy_type not in _STRATEGIES[kind]:
        raise UnsupportedManifest(strategy.at("type"), f"{strategy_type!r} is not an update strategy of a {kind}")
    rolling = strategy.sub("rollingUpdate") or Fields({}, strategy.at("rollingUpdate"))
    workload = Workload(
        kind=kind,
        namespace=namespace,
        name=name,
        replicas=replicas,
        template=pod_template,
        revision=template_revision(template),
        strategy=strategy_type,
        partition=rolling.get("partition", int, 0) if kind == "StatefulSet" else 0,
        max_surge=_share(rolling, "maxSurge", replicas, up=True) if kind == "Deployment" else 0,
        max_unavailable=_share(rolling, "maxUnavailable", replicas, up=False) if kind == "Deployment" else 1,
    )
    rolling.close()
    strategy.close()
    if kind == "StatefulSet" and spec.get("podManagementPolicy", str, "OrderedReady") != "Parallel" and replicas > 1:
        notices.add("pods of a StatefulSet start side by side: podManagementPolicy OrderedReady is not honoured")
    if spec.ignore("minReadySeconds"):
        notices.add("minReadySeconds is not honoured: a ready pod counts at once")
    spec.refuse("volume claims are not supported by the local node", "volumeClaimTemplates")
    spec.refuse("other first ordinals are not supported by the local node", "ordinals")
    spec.refuse("a paused Deployment is not supported by the local node", "paused")
    spec.ignore("selector", "serviceName", "revisionHistoryLimit", "progressDeadlineSeconds")
    spec.ignore("persistentVolumeClaimRetentionPolicy")
    spec.close()
    return workload


def _share(fields: Fields, key: str, replicas: int, *, up: bool) -> int:
    """A number of pods, or a percentage of ``replicas``, rounded as Kubernetes rounds it."""
    value = fields.raw(key)
    if value is None:
        value = _DEFAULT_SHARE
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.removesuffix("%").isdigit() and value.endswith("%"):
        exact = replicas * int(value[:-1]) / 100
        return math.ceil(exact) if up else math.floor(exact)
    raise UnsupportedManifest(fields.at(key), f"{value!r} is neither a number nor a percentage")


def _data(kind: str, fields: Fields) -> Mapping[str, bytes]:
    text_key, encoded_key = ("data", "binaryData") if kind == "ConfigMap" else ("stringData", "data")
    data: dict[str, bytes] = {}
    for key, value in fields.string_map(encoded_key).items():
        try:
            data[key] = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise UnsupportedManifest(f"{fields.at(encoded_key)}.{key}", f"is not base64: {error}") from error
    data.update({key: value.encode() for key, value in fields.string_map(text_key).items()})
    fields.ignore("apiVersion", "immutable", "type")
    fields.close()
    return data
