"""Whether KV moves between the engines, by the routers' canaries, and whether it is the right one.

Latched: once KV has been seen to move at a KV revision, an engine that is restarted takes nothing away, until its own
canary fails. One pair that reuses wrong KV does, whatever others do: nobody can tell which answers it has spoilt.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from kvloop_operator.api.v1alpha1.status import ConditionStatus
from kvloop_operator.live import text
from kvloop_operator.reports import PairReport, Verdict
from kvloop_operator.status.groups import Engines, Group
from kvloop_operator.status.reasons import ConditionType, Reason
from kvloop_operator.status.situation import Situation, previous_condition

ENOUGH_BYTES = 8 * 1024 * 1024
"""Fewer are moved in a time that is mostly waiting, and say nothing about the transport."""

SLOW_BYTES_A_SECOND = 100_000_000
"""Below it KV does not travel over EFA: a tenth of what one TCP connection between EC2 instances carries, which the
slowest EFA interface exceeds a hundred times. Never measured on EFA."""

FAILED_ATTEMPTS = 3
"""Canaries that have to fail before a retry is no longer expected to help; they come after 5, 10 and 20 s."""

_KEPT = frozenset({Reason.VERIFIED, Reason.SLOW_TRANSPORT, Reason.TRANSFER_FAILED, Reason.WRONG_REUSE})


@dataclass(frozen=True, slots=True)
class Transfer:
    """The verdict.

    verified_revision: the KV revision at which KV was last seen to move; empty for none.
    grave: it fails, and a retry is not expected to help.
    failed: in words, where some pairs fail and others do not. slow: the same for slow ones.
    """

    status: ConditionStatus
    reason: Reason
    message: str
    verified_revision: str
    grave: bool = False
    failed: str = ""
    slow: str = ""

    @property
    def verified(self) -> bool:
        return self.status is ConditionStatus.TRUE


def judge(situation: Situation, roles: Sequence[Engines], router: Group) -> Transfer:
    """The verdict on the pairs of the engines that are there now."""
    revision, latched = situation.wanted_revision, text(situation.previous, "kvTransfer", "verifiedRevision")
    wrong = _wrong_pairs(situation, roles)
    if wrong:
        return _wrong(wrong, latched)
    known = _current_pairs(situation, roles)
    verified = [pair for pair in known if pair.verdict is Verdict.VERIFIED]
    failed = [pair for pair in known if pair.verdict is Verdict.FAILED]
    if verified:
        return _verified(situation, verified, failed)
    if failed:
        return _failed(failed, latched)
    kept = _kept(situation, latched, any_known=bool(known))
    if kept is not None:
        return kept
    if revision and latched == revision:
        return Transfer(ConditionStatus.TRUE, Reason.VERIFIED, _words(situation), latched)
    return _unknown(situation, latched, suspended=any(role.wanted == 0 for role in roles), routed=router.ready > 0)


def _current_pairs(situation: Situation, roles: Sequence[Engines]) -> list[PairReport]:
    """Those that serve; where none does, those that may again."""
    serving = [{pod.uid for pod in role.living if pod.ready} for role in roles]
    return _pairs_of(situation, set().union(*serving) if all(serving) else _living(roles))


def _wrong_pairs(situation: Situation, roles: Sequence[Engines]) -> list[PairReport]:
    """Those that reuse wrong KV, whether or not they are ready at this moment."""
    return [pair for pair in _pairs_of(situation, _living(roles)) if pair.verdict is Verdict.WRONG]


def _living(roles: Sequence[Engines]) -> set[str]:
    return {pod.uid for role in roles for pod in role.living}


def _pairs_of(situation: Situation, uids: Set[str]) -> list[PairReport]:
    pairs = [
        pair
        for (prefill, decode), pair in situation.pairs.items()
        if prefill in uids and decode in uids and pair.kv_revision == situation.wanted_revision
    ]
    return sorted(pairs, key=lambda pair: (pair.prefill, pair.decode))


def _wrong(wrong: list[PairReport], latched: str) -> Transfer:
    first = wrong[0]
    others = f" and in {len(wrong) - 1} more pairs" if len(wrong) > 1 else ""
    message = (
        f"what was reused between {first.prefill} and {first.decode}{others} was wrong: {first.detail}; nothing is"
        " reused there any more, but answers until then may be wrong, and what was computed from it lies in the"
        " engines' prefix caches: delete both pods"
    )
    return Transfer(ConditionStatus.FALSE, Reason.WRONG_REUSE, message, latched, grave=True)


def _verified(situation: Situation, verified: list[PairReport], failed: list[PairReport]) -> Transfer:
    slow = _slow(situation, verified)
    return Transfer(
        ConditionStatus.TRUE,
        Reason.SLOW_TRANSPORT if slow else Reason.VERIFIED,
        slow or _words(situation),
        situation.wanted_revision,
        failed=_failures(failed) if failed else "",
        slow=slow,
    )


def _failed(failed: list[PairReport], latched: str) -> Transfer:
    grave = any(pair.attempts >= FAILED_ATTEMPTS for pair in failed)
    message = (
        f"{_failures(failed)}; see the engines' logs for NIXL, and whether security groups and network policies let"
        " the engines reach one another"
    )
    return Transfer(ConditionStatus.FALSE, Reason.TRANSFER_FAILED, message, latched, grave=grave)


def _kept(situation: Situation, latched: str, *, any_known: bool) -> Transfer | None:
    """What was said before, where nothing is known of the engines that are there, as after a restart."""
    previous = previous_condition(situation.previous, ConditionType.KV_TRANSFER_VERIFIED)
    reason, status = text(previous, "reason"), text(previous, "status")
    if reason not in _KEPT or status not in set(ConditionStatus):
        return None
    failed_before = reason in (Reason.TRANSFER_FAILED, Reason.WRONG_REUSE)
    of_this_revision = text(situation.previous, "decode", "revision") == situation.wanted_revision
    if latched != situation.wanted_revision and not (failed_before and of_this_revision and not any_known):
        return None
    known = Reason(reason)
    message = text(previous, "message")
    return Transfer(
        ConditionStatus(status),
        known,
        message,
        latched,
        grave=failed_before and bool(previous_condition(situation.previous, ConditionType.STALLED)),
        slow=message if known is Reason.SLOW_TRANSPORT else "",
    )


def _unknown(situation: Situation, latched: str, *, suspended: bool, routed: bool) -> Transfer:
    reason, message = Reason.VERIFYING_KV_TRANSFER, "the router has yet to see KV move between a pair of engines"
    resource = situation.resource
    if resource is not None and not resource.spec.router.canary.enabled:
        reason = Reason.CANARY_DISABLED
        message = "whether KV moves cannot be known without the canary; set router.canary.enabled"
    elif suspended:
        reason, message = Reason.SUSPENDED, "no pair of engines is wanted"
    elif situation.unreachable and routed:
        # A router that is still starting has a reason of its own.
        reason = Reason.ROUTER_UNREACHABLE
        message = ", ".join(sorted(situation.unreachable))
    return Transfer(ConditionStatus.UNKNOWN, reason, message, latched)


def _words(situation: Situation) -> str:
    resource = situation.resource
    both = resource is None or resource.spec.kv_transfer.bidirectional_kv_xfer
    return f"KV was seen to move {'in both directions' if both else 'from prefill to decode'}"


def _failures(failed: list[PairReport]) -> str:
    first = failed[0]
    others = f" and in {len(failed) - 1} more pairs" if len(failed) > 1 else ""
    return f"the canary fails between {first.prefill} and {first.decode}{others}: {first.detail or 'no KV moves'}"


def _slow(situation: Situation, verified: list[PairReport]) -> str:
    if situation.facts is None or not situation.facts.efa:
        return ""
    for pair in verified:
        moved = pair.to_decode_bytes + pair.to_prefill_bytes
        took = pair.to_decode_seconds + pair.to_prefill_seconds
        if moved >= ENOUGH_BYTES and took > 0 and moved / took < SLOW_BYTES_A_SECOND:
            return (
                f"KV moves at {moved / took / 1e6:.0f} MB/s between {pair.prefill} and {pair.decode}, too slow for EFA;"
                " see whether the engines have their EFA devices, and libfabric in their image"
            )
    return ""
