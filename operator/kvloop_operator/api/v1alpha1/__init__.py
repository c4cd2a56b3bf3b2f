"""``kvloop.io/v1alpha1``: the models of the resource, saying exactly what the CRD says."""

from __future__ import annotations

from kvloop_operator.api.v1alpha1.resource import DisaggregatedInference, Metadata
from kvloop_operator.api.v1alpha1.roles import Accelerator, RoleSpec
from kvloop_operator.api.v1alpha1.spec import (
    ConnectorChoice,
    DisaggregatedInferenceSpec,
    EFAMode,
    EnginePlugin,
    PlacementMode,
    SecurityProfile,
)
from kvloop_operator.api.v1alpha1.status import DisaggregatedInferenceStatus

__all__ = [
    "Accelerator",
    "ConnectorChoice",
    "DisaggregatedInference",
    "DisaggregatedInferenceSpec",
    "DisaggregatedInferenceStatus",
    "EFAMode",
    "EnginePlugin",
    "Metadata",
    "PlacementMode",
    "RoleSpec",
    "SecurityProfile",
]
