"""What the results of a container's probes mean. Pure; the rules are the kubelet's (``pkg/kubelet/prober``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kvloop.node.model import Probe, Probes


class ProbeKind(StrEnum):
    """The three probes of a container."""

    STARTUP = "startup"
    READINESS = "readiness"
    LIVENESS = "liveness"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The latest results in a row that were alike, and the verdict that the thresholds allow so far."""

    last: bool | None = None
    length: int = 0
    verdict: bool | None = None

    def after(self, probe: Probe, success: bool) -> Run:
        length = self.length + 1 if success is self.last else 1
        threshold = probe.success_threshold if success else probe.failure_threshold
        return Run(last=success, length=length, verdict=success if length >= threshold else self.verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A running container as its probes see it; a restart begins with a new value."""

    probes: Probes
    startup: Run = Run()
    readiness: Run = Run()
    liveness: Run = Run()

    def after(self, kind: ProbeKind, success: bool) -> Health:
        """The health once one more result is in. A result of a probe that is not due changes nothing."""
        probe = self.probe(kind)
        if probe is None or not self.is_due(kind):
            return self
        match kind:
            case ProbeKind.STARTUP:
                return replace(self, startup=self.startup.after(probe, success))
            case ProbeKind.READINESS:
                return replace(self, readiness=self.readiness.after(probe, success))
            case ProbeKind.LIVENESS:
                return replace(self, liveness=self.liveness.after(probe, success))

    def probe(self, kind: ProbeKind) -> Probe | None:
        found: Probe | None = getattr(self.probes, kind.value)
        return found

    def is_due(self, kind: ProbeKind) -> bool:
        """Startup runs until it succeeded once, the other two from then on; nothing runs once the container failed."""
        if self.failed is not None or self.probe(kind) is None:
            return False
        return not self.started if kind is ProbeKind.STARTUP else self.started

    @property
    def started(self) -> bool:
        return self.probes.startup is None or self.startup.verdict is True

    @property
    def ready(self) -> bool:
        if not self.started or self.failed is not None:
            return False
        return self.probes.readiness is None or self.readiness.verdict is True

    @property
    def failed(self) -> ProbeKind | None:
        """The probe whose failure ends the container; None while it may live."""
        if self.startup.verdict is False:
            return ProbeKind.STARTUP
        if self.liveness.verdict is False:
            return ProbeKind.LIVENESS
        return None


def hasten(probes: Probes, *, period_limit: float) -> Probes:
    """Startup and readiness probes asked at least every ``period_limit`` seconds.

    Thresholds for failure grow so that a container gets at least as long as before; the first delay and liveness stay.
    """

    def faster(probe: Probe | None) -> Probe | None:
        if probe is None or probe.period <= period_limit:
            return probe
        # -(-a // b) is the division rounded up.
        threshold = int(-(-probe.failure_threshold * probe.period // period_limit))
        return replace(probe, period=period_limit, failure_threshold=threshold)

    return replace(probes, startup=faster(probes.startup), readiness=faster(probes.readiness))
