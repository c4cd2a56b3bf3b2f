"""Leases with a planted fault each: a test that does not find them proves nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from kvloop_connector.leases import Claim, Freed, Leases, LeaseTerms, Renewal, Retained
from kvloop_connector.lifecycle import State


class ReleaseDuringRead(Leases):
    """Frees at once, whoever reads."""

    def release(self, turn: str, now: float) -> Freed:
        held = self._held.get(turn)
        if held is not None:
            self._held[turn] = replace(held, lease=held.lease._replace(state=State.ISSUED))
        return super().release(turn, now)


class RevokedIsGranted(Leases):
    """A put back makes a revoked lease what it was."""

    def put_back(self, turn: str, grant: int, now: float) -> Freed:
        held = self._held.get(turn)
        if held is not None:
            self._held[turn] = replace(held, revoked=False)
        return super().put_back(turn, grant, now)


class RevokedStays(Leases):
    """Forgets to revoke what is being read."""

    def release(self, turn: str, now: float) -> Freed:
        held = self._held.get(turn)
        return () if held is not None and held.lease.state is State.TAKEN else super().release(turn, now)


class AnyNumber(Leases):
    """Believes whoever says that a read has ended."""

    def read(self, turn: str, grant: int, now: float) -> Freed:
        held = self._held.get(turn)
        return super().read(turn, held.lease.grants if held is not None else grant, now)


class AnyPutBack(Leases):
    """Believes whoever puts back."""

    def put_back(self, turn: str, grant: int, now: float) -> Freed:
        held = self._held.get(turn)
        return super().put_back(turn, held.lease.grants if held is not None else grant, now)


class RenewsForEver(Leases):
    """Knows no longest time."""

    def renew(self, turn: str, seconds: float, now: float) -> Renewal | None:
        held = self._held.get(turn)
        if held is not None:
            self._held[turn] = replace(held, ends=float("inf"))
        return super().renew(turn, seconds, now)


class RenewsWhatIsRead(Leases):
    """Renews although the one read was granted."""

    def renew(self, turn: str, seconds: float, now: float) -> Renewal | None:
        held = self._held.get(turn)
        if held is not None and held.lease.state is State.TAKEN:
            self._held[turn] = replace(held, lease=held.lease._replace(deadline=now + seconds))
            return Renewal(now + seconds, 1)
        return super().renew(turn, seconds, now)


class RenewalKeepsIdle(Leases):
    """A renewal does not count as use."""

    def renew(self, turn: str, seconds: float, now: float) -> Renewal | None:
        order = list(self._held)
        renewal = super().renew(turn, seconds, now)
        self._held = {name: self._held[name] for name in order}
        return renewal


class RenewsTheExpired(Leases):
    """Looks at the state only."""

    def renew(self, turn: str, seconds: float, now: float) -> Renewal | None:
        held = self._held.get(turn)
        return super().renew(turn, seconds, min(now, held.lease.deadline - 1) if held is not None else now)


class GrantsAtTheEnd(Leases):
    """Grants a read that could not end in time."""

    def claim(self, turn: str, now: float) -> Claim:
        held = self._held.get(turn)
        if held is not None:
            self._held[turn] = replace(held, lease=held.lease._replace(margin=0))
        return super().claim(turn, now)


class NewestGoesFirst(Leases):
    """Gives up the one that was used last."""

    def retain(self, turn: str, blocks: Any, now: float) -> Retained:
        self._held = dict(reversed(self._held.items()))
        retained = super().retain(turn, blocks, now)
        new = {turn: self._held.pop(turn)} if turn in self._held else {}
        self._held = {**dict(reversed(self._held.items())), **new}
        return retained


class GivesUpWhatIsRead(Leases):
    """Takes what is being read for idle."""

    def retain(self, turn: str, blocks: Any, now: float) -> Retained:
        for other, held in self._held.items():
            self._held[other] = replace(held, lease=held.lease._replace(state=State.ISSUED))
        return super().retain(turn, blocks, now)


class GivesUpAll(Leases):
    """Makes more room than is needed."""

    def retain(self, turn: str, blocks: Any, now: float) -> Retained:
        wanted, freed = frozenset(blocks), self.expire(now)
        if len(self._uses.keys() | wanted) > (self._terms.most_blocks or 99):
            for other in [name for name, held in self._held.items() if held.lease.state is State.ISSUED]:
                freed += self.release(other, now)
        retained = super().retain(turn, wanted, now)
        return Retained(retained.deadline, freed + retained.freed)


class NoCap(Leases):
    """Retains whatever comes."""

    def __init__(self, terms: LeaseTerms) -> None:
        super().__init__(replace(terms, most_blocks=None))


class CountsSharedTwice(Leases):
    """Adds up the leases instead of their blocks."""

    def retain(self, turn: str, blocks: Any, now: float) -> Retained:
        wanted, freed = frozenset(blocks), self.expire(now)
        cap = self._terms.most_blocks or 99
        idle = [name for name, held in self._held.items() if held.lease.state is State.ISSUED]
        while idle and len(wanted) + sum(len(held.blocks) for held in self._held.values()) > cap:
            freed += self.release(idle.pop(0), now)
        retained = super().retain(turn, wanted, now)
        return Retained(retained.deadline, freed + retained.freed)


class NeverExpires(Leases):
    """Waits for somebody to release."""

    def expire(self, now: float) -> Freed:
        return super().expire(min(now, 0.0))


class ExpiresEarly(Leases):
    """Ends at the margin."""

    def expire(self, now: float) -> Freed:
        return super().expire(now + self._terms.margin)


MUTANTS: Final[list[type[Leases]]] = [
    ReleaseDuringRead,
    RevokedIsGranted,
    RevokedStays,
    AnyNumber,
    AnyPutBack,
    RenewsForEver,
    RenewsWhatIsRead,
    RenewalKeepsIdle,
    RenewsTheExpired,
    GrantsAtTheEnd,
    NewestGoesFirst,
    GivesUpWhatIsRead,
    GivesUpAll,
    NoCap,
    CountsSharedTwice,
    NeverExpires,
    ExpiresEarly,
]
