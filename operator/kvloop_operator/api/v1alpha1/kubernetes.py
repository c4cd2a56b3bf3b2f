"""The parts of Kubernetes' own pod API that the resource takes over, word for word.

Field meanings are those of ``core/v1``; they are not described again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvloop_operator.api.v1alpha1.base import (
    AbsolutePath,
    Annotations,
    Key,
    Labels,
    ObjectName,
    Part,
    Quantity,
    Rule,
    ShortText,
    VolumeName,
    keyed_list,
    unique,
)
from kvloop_operator.api.v1alpha1.patterns import ENV_NAME


def _one_of(*names: str) -> str:
    return "[" + ", ".join(f"has(self.{name})" for name in names) + "].filter(set, set).size() == 1"


class SecretKeyRef(Part):
    """A key of a Secret in the resource's namespace."""

    name: ObjectName
    key: Key


class LocalReference(Part):
    """An object in the resource's namespace."""

    name: ObjectName


class KeySelector(Part):
    name: ObjectName
    key: Key
    optional: bool | None = None


class FieldSelector(Part):
    field_path: ShortText


class EnvSource(Part):
    """Exactly one source of an environment variable's value."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=_one_of("secretKeyRef", "configMapKeyRef", "fieldRef"),
            holds=lambda it: sum(x is not None for x in (it.secret_key_ref, it.config_map_key_ref, it.field_ref)) == 1,
            field="",
            fault="exactly one of secretKeyRef, configMapKeyRef and fieldRef is needed",
            remedy="keep one of them",
        ),
    )
    secret_key_ref: KeySelector | None = None
    config_map_key_ref: KeySelector | None = None
    field_ref: FieldSelector | None = None


class EnvVar(Part):
    """An environment variable of the engine's container."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.value) && has(self.valueFrom))",
            holds=lambda it: it.value is None or it.value_from is None,
            field="valueFrom",
            fault="value is set too",
            remedy="keep one of value and valueFrom",
        ),
    )
    name: Annotated[str, Field(min_length=1, max_length=253, pattern=ENV_NAME)]
    value: Annotated[str, Field(max_length=4096)] | None = None
    value_from: EnvSource | None = None


EnvVars = Annotated[tuple[EnvVar, ...], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"})]


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Part):
    key: Annotated[str, Field(max_length=316)] | None = None
    operator: TolerationOperator | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: TaintEffect | None = None
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


Tolerations = Annotated[
    tuple[Toleration, ...], Field(max_length=32, json_schema_extra={"x-kubernetes-list-type": "atomic"})
]


class SelectorOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class NodeOperator(StrEnum):
    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GREATER_THAN = "Gt"
    LESS_THAN = "Lt"


_Values = Annotated[tuple[Annotated[str, Field(max_length=63)], ...], Field(max_length=64)]
_Key = Annotated[str, Field(min_length=1, max_length=316)]


class LabelRequirement(Part):
    key: _Key
    operator: SelectorOperator
    values: _Values = ()


class LabelSelector(Part):
    match_labels: Labels = Field(default_factory=dict)
    match_expressions: Annotated[tuple[LabelRequirement, ...], Field(max_length=16)] = ()


class NodeRequirement(Part):
    key: _Key
    operator: NodeOperator
    values: _Values = ()


class NodeSelectorTerm(Part):
    match_expressions: Annotated[tuple[NodeRequirement, ...], Field(max_length=16)] = ()
    match_fields: Annotated[tuple[NodeRequirement, ...], Field(max_length=4)] = ()


class NodeSelector(Part):
    node_selector_terms: Annotated[tuple[NodeSelectorTerm, ...], Field(min_length=1, max_length=16)]


_Weight = Annotated[int, Field(ge=1, le=100)]


class PreferredNodeTerm(Part):
    weight: _Weight
    preference: NodeSelectorTerm


class NodeAffinity(Part):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredNodeTerm, ...], Field(max_length=16)
    ] = ()


class PodAffinityTerm(Part):
    topology_key: _Key
    label_selector: LabelSelector | None = None
    namespaces: Annotated[tuple[ObjectName, ...], Field(max_length=16)] = ()
    namespace_selector: LabelSelector | None = None


class PreferredPodTerm(Part):
    weight: _Weight
    pod_affinity_term: PodAffinityTerm


class PodAffinity(Part):
    required_during_scheduling_ignored_during_execution: Annotated[
        tuple[PodAffinityTerm, ...], Field(max_length=16)
    ] = ()
    preferred_during_scheduling_ignored_during_execution: Annotated[
        tuple[PreferredPodTerm, ...], Field(max_length=16)
    ] = ()


class Affinity(Part):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class WhenUnsatisfiable(StrEnum):
    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class TopologySpreadConstraint(Part):
    max_skew: Annotated[int, Field(ge=1, le=2**31 - 1)]
    topology_key: _Key
    when_unsatisfiable: WhenUnsatisfiable
    label_selector: LabelSelector | None = None
    min_domains: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


SpreadConstraints = Annotated[tuple[TopologySpreadConstraint, ...], Field(max_length=8)]

ResourceList = Annotated[Mapping[str, Quantity], Field(max_length=32)]


class Resources(Part):
    """Requests and limits of the container. Accelerators and EFA interfaces are added by kvloop."""

    requests: ResourceList = Field(default_factory=dict)
    limits: ResourceList = Field(default_factory=dict)


class Medium(StrEnum):
    DISK = ""
    MEMORY = "Memory"


class EmptyDirVolume(Part):
    medium: Medium | None = None
    size_limit: Quantity | None = None


class HostPathVolume(Part):
    path: AbsolutePath
    type: Annotated[str, Field(max_length=32)] | None = None


class ClaimVolume(Part):
    claim_name: ObjectName
    read_only: bool | None = None


class KeyToPath(Part):
    key: Key
    path: ShortText


_Items = Annotated[tuple[KeyToPath, ...], Field(max_length=64)]


class ConfigMapVolume(Part):
    name: ObjectName
    items: _Items = ()
    optional: bool | None = None


class SecretVolume(Part):
    secret_name: ObjectName
    items: _Items = ()
    optional: bool | None = None


class CSIVolume(Part):
    driver: ShortText
    read_only: bool | None = None
    volume_attributes: Annotated[Mapping[str, Annotated[str, Field(max_length=1024)]], Field(max_length=32)] = Field(
        default_factory=dict
    )


_VOLUME_SOURCES = ("emptyDir", "hostPath", "persistentVolumeClaim", "configMap", "secret", "csi")


class Volume(Part):
    """A volume of the pod; exactly one source."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=_one_of(*_VOLUME_SOURCES),
            holds=lambda it: (
                sum(
                    source is not None
                    for source in (
                        it.empty_dir,
                        it.host_path,
                        it.persistent_volume_claim,
                        it.config_map,
                        it.secret,
                        it.csi,
                    )
                )
                == 1
            ),
            field="",
            fault=f"exactly one of {', '.join(_VOLUME_SOURCES)} is needed",
            remedy="keep one of them",
        ),
        Rule(
            cel="!self.name.startsWith('kvloop-')",
            holds=lambda it: not it.name.startswith("kvloop-"),
            field="name",
            fault="names that start with kvloop- are kvloop's own",
            remedy="choose another name",
        ),
    )
    name: VolumeName
    empty_dir: EmptyDirVolume | None = None
    host_path: HostPathVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    csi: CSIVolume | None = None


Volumes = Annotated[tuple[Volume, ...], keyed_list("name", 32), unique("name")]


class VolumeMount(Part):
    name: VolumeName
    mount_path: AbsolutePath
    sub_path: Annotated[str, Field(max_length=1024)] | None = None
    read_only: bool | None = None


VolumeMounts = Annotated[tuple[VolumeMount, ...], keyed_list("mount_path", 32), unique("mount_path")]


class OverlayMetadata(Part):
    labels: Labels = Field(default_factory=dict)
    annotations: Annotations = Field(default_factory=dict)


class PodTemplateOverlay(Part):
    """What kvloop has no field for, merged into the pod template last. Maps are merged, lists of named entries are
    merged by name, other lists replace. What kvloop sets itself cannot be changed here."""

    metadata: OverlayMetadata | None = None
    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] = Field(
        default_factory=dict
    )
    """Any part of ``core/v1`` PodSpec."""
