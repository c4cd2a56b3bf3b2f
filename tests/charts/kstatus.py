"""kstatus' judgement of a custom resource: what Flux, `helm --wait` and `kubectl`'s friends go by.

After cli-utils' ``pkg/kstatus/status``, for kinds that it has no rules of their own for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def kstatus(resource: Mapping[str, Any]) -> str:
    """InProgress, Failed, Current or Terminating."""
    metadata, status = resource["metadata"], resource.get("status", {})
    if "deletionTimestamp" in metadata:
        return "Terminating"
    # Where the field is absent nothing is compared.
    if status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return "InProgress"
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    return "Current" if conditions.get("Ready", "True") == "True" else "InProgress"
