"""What the operator says about a resource; the shape follows kstatus."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvloop_operator.api.v1alpha1.base import Part, keyed_list, unique


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Part):
    """One aspect of the resource's state."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Ready, Reconciling, Stalled (the latter two only while true), PrefillReady, DecodeReady, RouterReady,
    KVTransferVerified, Degraded, UpdateAvailable or Paused."""
    status: ConditionStatus
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Field(max_length=32768)]
    last_transition_time: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]
    observed_generation: Annotated[int, Field(ge=0)] | None = None


_Count = Annotated[int, Field(ge=0)]
_Text = Annotated[str, Field(max_length=253)]


class RoleStatus(Part):
    """Pods of one role."""

    replicas: _Count = 0
    """Pods that exist."""
    desired: _Count = 0
    ready: _Count = 0
    updated: _Count = 0
    """Pods at the wanted revision."""
    revision: _Text = ""
    """KV revision of the wanted pods."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of the role's pods, for autoscalers."""
    summary: Annotated[str, Field(max_length=32)] = ""
    """ready/desired."""


class EngineTemplateStatus(Part):
    """Engine pod templates that the operator knows."""

    current: _Text = ""
    offered: _Text = ""
    """A newer one; set rollout.engineTemplateVersion to it to take it."""


class KVTransferStatus(Part):
    """How KV travels, and what the routers' canaries have shown."""

    connector: _Text = ""
    """The connector of the engines that are wanted."""
    connector_message: Annotated[str, Field(max_length=1024)] = ""
    """Why kvTransfer.connector Auto is NixlConnector here; empty where it is not."""
    verified_revision: _Text = ""
    """KV revision at which KV was last seen to move; empty before it was."""


class DisaggregatedInferenceStatus(Part):
    """Observed state. Nothing here changes while nothing changes."""

    observed_generation: int = -1
    """Generation that the conditions are about; -1 before the operator has seen the resource."""
    conditions: Annotated[tuple[Condition, ...], keyed_list("type", 32), unique("type")] = ()
    prefill: RoleStatus | None = None
    decode: RoleStatus | None = None
    router: RoleStatus | None = None
    kv_transfer: KVTransferStatus | None = None
    engine_template: EngineTemplateStatus | None = None
    url: Annotated[str, Field(max_length=512)] = ""
    """Where clients in the cluster reach the router."""
