"""Accelerators and EFA interfaces of EC2 instance types.

From Karpenter's generated reference (aws/karpenter-provider-aws 1d92708,
``website/content/en/docs/reference/instance-types.md``). GB200 and GB300 are not listed there: set ``accelerator`` and
``efaInterfaces`` by hand for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvloop_operator.api.v1alpha1 import Accelerator

HYPERPOD_PREFIX = "ml."
"""SageMaker HyperPod's nodes carry the same types under this prefix."""


@dataclass(frozen=True, slots=True)
class InstanceType:
    """What one instance has.

    devices: GPUs, or Neuron chips.
    cores: tensor-parallel ranks that a device takes: 1 for a GPU; for a Neuron chip its cores, on Trainium 2 logical
        ones, two physical ones each, which is Neuron's default there.
    """

    accelerator: Accelerator
    devices: int
    efa: int
    cores: int = 1


def _gpu(devices: int, efa: int) -> InstanceType:
    return InstanceType(Accelerator.GPU, devices, efa)


def _neuron(devices: int, efa: int, cores: int) -> InstanceType:
    return InstanceType(Accelerator.NEURON, devices, efa, cores)


_TYPES: Mapping[str, InstanceType] = {
    "g4dn.xlarge": _gpu(1, 0),
    "g4dn.2xlarge": _gpu(1, 0),
    "g4dn.4xlarge": _gpu(1, 0),
    "g4dn.8xlarge": _gpu(1, 1),
    "g4dn.12xlarge": _gpu(4, 1),
    "g4dn.16xlarge": _gpu(1, 1),
    "g4dn.metal": _gpu(8, 1),
    "g5.xlarge": _gpu(1, 0),
    "g5.2xlarge": _gpu(1, 0),
    "g5.4xlarge": _gpu(1, 0),
    "g5.8xlarge": _gpu(1, 1),
    "g5.12xlarge": _gpu(4, 1),
    "g5.16xlarge": _gpu(1, 1),
    "g5.24xlarge": _gpu(4, 1),
    "g5.48xlarge": _gpu(8, 1),
    "g6.xlarge": _gpu(1, 0),
    "g6.2xlarge": _gpu(1, 0),
    "g6.4xlarge": _gpu(1, 0),
    "g6.8xlarge": _gpu(1, 1),
    "g6.12xlarge": _gpu(4, 1),
    "g6.16xlarge": _gpu(1, 1),
    "g6.24xlarge": _gpu(4, 1),
    "g6.48xlarge": _gpu(8, 1),
    "g6e.xlarge": _gpu(1, 0),
    "g6e.2xlarge": _gpu(1, 0),
    "g6e.4xlarge": _gpu(1, 0),
    "g6e.8xlarge": _gpu(1, 1),
    "g6e.12xlarge": _gpu(4, 1),
    "g6e.16xlarge": _gpu(1, 1),
    "g6e.24xlarge": _gpu(4, 2),
    "g6e.48xlarge": _gpu(8, 4),
    "g7.2xlarge": _gpu(1, 0),
    "g7.4xlarge": _gpu(1, 0),
    "g7.8xlarge": _gpu(1, 1),
    "g7.12xlarge": _gpu(2, 1),
    "g7.24xlarge": _gpu(4, 1),
    "g7.48xlarge": _gpu(8, 2),
    "g7e.2xlarge": _gpu(1, 0),
    "g7e.4xlarge": _gpu(1, 0),
    "g7e.8xlarge": _gpu(1, 1),
    "g7e.12xlarge": _gpu(2, 1),
    "g7e.24xlarge": _gpu(4, 2),
    "g7e.48xlarge": _gpu(8, 4),
    "gr6.4xlarge": _gpu(1, 0),
    "gr6.8xlarge": _gpu(1, 1),
    "inf2.xlarge": _neuron(1, 0, 2),
    "inf2.8xlarge": _neuron(1, 0, 2),
    "inf2.24xlarge": _neuron(6, 0, 2),
    "inf2.48xlarge": _neuron(12, 0, 2),
    "p4d.24xlarge": _gpu(8, 4),
    "p4de.24xlarge": _gpu(8, 4),
    "p5.4xlarge": _gpu(1, 1),
    "p5.48xlarge": _gpu(8, 32),
    "p5e.48xlarge": _gpu(8, 32),
    "p5en.48xlarge": _gpu(8, 16),
    "p6-b200.48xlarge": _gpu(8, 8),
    "p6-b300.48xlarge": _gpu(8, 16),
    "trn1.2xlarge": _neuron(1, 0, 2),
    "trn1.32xlarge": _neuron(16, 8, 2),
    "trn1n.32xlarge": _neuron(16, 16, 2),
    "trn2.48xlarge": _neuron(16, 16, 4),
}


def instance_type(name: str) -> InstanceType | None:
    """What ``name`` has, with or without HyperPod's prefix; None where it is not known."""
    return _TYPES.get(name.removeprefix(HYPERPOD_PREFIX))


def node_label_values(name: str) -> list[str]:
    """The values of a node's instance-type label that mean ``name``: EC2's and HyperPod's."""
    plain = name.removeprefix(HYPERPOD_PREFIX)
    return [plain, HYPERPOD_PREFIX + plain]
