"""Engines from the pods of a deployment, as a list and the watch that follows it tell of them.

A pod is an engine once its container is up, and for as long as that container runs. While it is not ready it gets no
turns, but what runs there and what it retains is not forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvloop_connector.settings import Role
from kvloop_router.engine_spec import EngineSpec

DEPLOYMENT_LABEL = "kvloop.io/deployment"
ROLE_LABEL = "kvloop.io/role"
REVISION_LABEL = "kvloop.io/kv-revision"
DRAINING_LABEL = "kvloop.io/draining"
ZONE_LABEL = "topology.kubernetes.io/zone"
ENGINE_CONTAINER = "engine"
ENGINE_PORT = 8000

_ENDED_PHASES = ("Succeeded", "Failed")
_EXPIRED = 410


class WatchExpired(Exception):
    """The API server does not remember the changes since the version that was asked for."""


class WatchFailed(Exception):
    """The watch cannot be gone on with: the API server says so, or what it sends cannot be read."""


@dataclass(frozen=True, slots=True)
class Pods:
    """What is known of a deployment's pods at ``version``, from which a watch goes on.

    by_uid: the engine in each pod, in the order in which the pods were made known; None for a pod without one.
    """

    version: str
    by_uid: Mapping[str, EngineSpec | None]

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        """The engines, by name. Of two pods with one name the newer, since the older has to be gone."""
        by_name = {engine.name: engine for engine in self.by_uid.values() if engine is not None}
        return tuple(by_name[name] for name in sorted(by_name))


def selector(deployment: str) -> str:
    """The label selector of a deployment's engines."""
    return f"{DEPLOYMENT_LABEL}={deployment},{ROLE_LABEL} in ({','.join(role.value for role in Role)})"


def listed(answer: Any) -> Pods:
    """The pods in the answer to a list. Raises WatchFailed where it is none."""
    try:
        return Pods(
            version=str(answer["metadata"]["resourceVersion"]),
            by_uid={pod["metadata"]["uid"]: engine_of(pod) for pod in answer["items"]},
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise WatchFailed(f"a list that cannot be read ({type(error).__name__})") from error


def observed(pods: Pods, event: Any) -> Pods:
    """The pods after an event of the watch. Raises WatchExpired or WatchFailed."""
    try:
        kind, thing = event["type"], event["object"]
        if kind == "ERROR":
            raise _failure(thing)
        meta = thing["metadata"]
        version = str(meta["resourceVersion"])
        if kind == "BOOKMARK":
            return replace(pods, version=version)
        if kind == "DELETED":
            return Pods(version, {uid: engine for uid, engine in pods.by_uid.items() if uid != meta["uid"]})
        return Pods(version, {**pods.by_uid, meta["uid"]: engine_of(thing)})
    except (AttributeError, KeyError, TypeError) as error:
        raise WatchFailed(f"an event that cannot be read ({type(error).__name__})") from error


def engine_of(pod: Mapping[str, Any]) -> EngineSpec | None:
    """The engine in a pod; None where none runs in it, or none whose start-up probe has succeeded yet."""
    meta, status = pod["metadata"], pod.get("status") or {}
    labels, address = meta.get("labels") or {}, status.get("podIP")
    role, revision = labels.get(ROLE_LABEL), labels.get(REVISION_LABEL)
    if role not in tuple(Role) or not revision or not address or status.get("phase") in _ENDED_PHASES:
        return None
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    container = _engine_container(status)
    if not (ready if container is None else _runs(container) and (ready or container.get("started"))):
        return None
    labelled, deleted = DRAINING_LABEL in labels, bool(meta.get("deletionTimestamp"))
    host = f"[{address}]" if ":" in address else address
    return EngineSpec(
        name=meta["name"],
        role=Role(role),
        url=f"{_scheme(pod)}://{host}:{ENGINE_PORT}",
        pod_uid=meta["uid"],
        process=f"{meta['uid']}/{(container or {}).get('containerID') or ''}",
        kv_revision=revision,
        zone=labels.get(ZONE_LABEL, ""),
        ready=ready,
        # The kubelet's probe is the router's own. Without it an engine that is ready would get no turns before the
        # router has asked it too, while the operator, who sees that it is ready, already drains the one before it.
        checked=ready,
        draining=labelled or deleted,
        # One that was deleted without draining first still has turns to be continued from what it retains.
        ending=labelled and deleted,
    )


def _engine_container(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    containers = status.get("containerStatuses") or ()
    return next((container for container in containers if container.get("name") == ENGINE_CONTAINER), None)


def _scheme(pod: Mapping[str, Any]) -> str:
    """Of the engine's own address: what the kubelet is told to speak to it."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    own: Mapping[str, Any] = next(
        (container for container in containers if container.get("name") == ENGINE_CONTAINER), {}
    )
    probe = (own.get("readinessProbe") or {}).get("httpGet") or {}
    return "https" if probe.get("scheme") == "HTTPS" else "http"


def _runs(container: Mapping[str, Any]) -> bool:
    return "running" in (container.get("state") or {})


def _failure(status: Any) -> Exception:
    message = f"{status.get('code')} {status.get('reason')}: {status.get('message')}"
    return WatchExpired(message) if status.get("code") == _EXPIRED else WatchFailed(message)
