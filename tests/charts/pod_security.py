"""The pod security standard "restricted", as far as a pod of this chart can offend against it."""

from __future__ import annotations

from typing import Any

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def offences(pod: dict[str, Any]) -> list[str]:
    """What a pod's specification does that the level refuses; empty where it is admitted."""
    found = [field for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field)]
    found += [f"volume {volume['name']}" for volume in pod.get("volumes", []) if not _VOLUMES & volume.keys()]
    of_pod = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        capabilities = own.get("capabilities", {})
        effective = of_pod | own
        checks = {
            "privileged": not own.get("privileged", False),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": "ALL" in capabilities.get("drop", [])
            and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": effective.get("runAsNonRoot") is True,
            "runAsUser": effective.get("runAsUser") != 0,
            "seccompProfile": effective.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "hostPort": all("hostPort" not in port for port in container.get("ports", [])),
        }
        found += [f"{container['name']}: {name}" for name, kept in checks.items() if not kept]
    return found
