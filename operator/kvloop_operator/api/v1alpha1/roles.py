"""What may differ between prefill and decode engines."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvloop_operator.api.v1alpha1.arguments import EQUAL_ARGUMENTS, OWN_ARGUMENTS, OWN_ENV
from kvloop_operator.api.v1alpha1.base import (
    Arguments,
    CountOrPercent,
    Part,
    Quantity,
    Rule,
    ShortText,
    defaulted,
)
from kvloop_operator.api.v1alpha1.kubernetes import (
    Affinity,
    EnvVars,
    PodTemplateOverlay,
    Resources,
    SpreadConstraints,
    Tolerations,
    VolumeMounts,
    Volumes,
)
from kvloop_operator.api.v1alpha1.patterns import INSTANCE_TYPE


class Accelerator(StrEnum):
    """What an engine computes on."""

    GPU = "gpu"
    NEURON = "neuron"
    CPU = "cpu"


class DisruptionBudget(Part):
    """How many pods a voluntary disruption may take at a time."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.maxUnavailable) && has(self.minAvailable))",
            holds=lambda it: it.max_unavailable is None or it.min_available is None,
            field="minAvailable",
            fault="maxUnavailable is set too",
            remedy="keep one of them",
        ),
    )
    max_unavailable: CountOrPercent | None = None
    """Default, where minAvailable is not set either: 1."""
    min_available: CountOrPercent | None = None


class AutoscalingMetric(Part):
    """A metric of the role's pods and the value that each pod should have on average."""

    name: ShortText
    average_value: Quantity


class Autoscaling(Part):
    """A HorizontalPodAutoscaler for the role."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.minReplicas <= self.maxReplicas",
            holds=lambda it: it.min_replicas <= it.max_replicas,
            field="minReplicas",
            fault="minReplicas is greater than maxReplicas",
            remedy="lower minReplicas or raise maxReplicas",
        ),
    )
    min_replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    max_replicas: Annotated[int, Field(ge=1, le=1000)]
    metrics: Annotated[tuple[AutoscalingMetric, ...], Field(min_length=1, max_length=8)]


class RoleSpec(Part):
    """The engines of one role."""

    rules: ClassVar[tuple[Rule, ...]] = (OWN_ARGUMENTS, EQUAL_ARGUMENTS, OWN_ENV)

    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Number of engines. With 0 the deployment is suspended: the router answers 503."""
    instance_type: Annotated[str, Field(min_length=1, max_length=63, pattern=INSTANCE_TYPE)] | None = None
    """EC2 instance type to run on, with or without the prefix ``ml.``; gives accelerator, device and EFA counts."""
    accelerator: Accelerator | None = None
    """Default: what instanceType has; gpu without one."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """``--tensor-parallel-size``: devices (on Neuron: cores) that one copy of the model is spread over. Those of the
    two roles have to divide one another."""
    data_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """``--data-parallel-size``: copies of the model in one engine. Each takes tensorParallelSize devices and a port of
    its own for the side channel."""
    efa_interfaces: Annotated[int, Field(ge=0, le=64)] | None = None
    """EFA interfaces of each pod. Default: the share of the instance's interfaces that belongs to the pod's devices."""
    prefix_caching: bool = True
    """Whether engines of this role keep a prefix cache of their own."""
    resources: Resources = defaulted(Resources)
    args: Arguments = ()
    """Further arguments of ``vllm serve`` for this role. What kvloop sets, or has to be equal on both roles, is
    refused."""
    env: EnvVars = ()
    """Further environment of this role; wins over engine.env."""
    node_selector: Annotated[Mapping[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    tolerations: Tolerations = ()
    """Added to those for the accelerator and for EFA."""
    affinity: Affinity | None = None
    """Joined with kvloop's own: instance type, and the topology domain of the other role."""
    topology_spread_constraints: SpreadConstraints = ()
    volumes: Volumes = ()
    volume_mounts: VolumeMounts = ()
    """Where the engine's container sees the volumes."""
    pod_template: PodTemplateOverlay | None = None
    disruption_budget: DisruptionBudget = defaulted(DisruptionBudget)
    autoscaling: Autoscaling | None = None
    termination_grace_period_seconds: Annotated[int, Field(ge=60, le=86400)] | None = None
    """From the wish to stop a pod to its end, including 15 s in which routers stop sending turns to it. Default:
    rollout.drainTimeoutSeconds + 60."""
