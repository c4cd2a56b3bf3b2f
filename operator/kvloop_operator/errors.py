"""Errors of the operator package.

OperatorError
└── InvalidResource   a document that the API server would refuse
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with a resource.

    field: path of wire names, as in ``spec.prefill.args[0]``.
    value: what stands there, as JSON, shortened; ``(absent)`` where nothing does.
    """

    field: str
    value: str
    fault: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: {self.value}: {self.fault}; {self.remedy}"


class OperatorError(Exception):
    """Base of every error of this package."""


class InvalidResource(OperatorError):
    """A document that is not a valid DisaggregatedInference. ``faults`` holds at least one."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("\n".join(str(fault) for fault in faults))
        self.faults = faults
