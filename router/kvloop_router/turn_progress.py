"""How far a turn has come, and what is known of it by then. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvloop_router.choosing import Outlook
from kvloop_router.engine import Needs
from kvloop_router.kept import Query
from kvloop_router.leases import UNKNOWN, Pace
from kvloop_router.proof import Proof
from kvloop_router.request import Request
from kvloop_router.scope import Scope
from kvloop_router.turn_log import TurnReport


@dataclass(slots=True)
class Turn:
    """One turn on its way.

    query: without the history until that is digested. headers: of its legs.
    token_ids: of the prompt, that both legs use; None where the engine renders it.
    learning: whether the prefill leg is to say which ids it rendered.
    tried: names of engines at which a leg of this turn failed.
    needs: decode, until its leg is there; prefill, until decode has read from it.
    pace: of its conversation, as far as that is known. home: the engine id of what holds it.
    outlook: what it was thought to be, where there was a choice of how it goes.
    ended: its conversation was ended meanwhile.
    """

    request: Request
    scope: Scope
    query: Query
    headers: Mapping[str, str]
    report: TurnReport
    token_ids: Sequence[int] | None = None
    tokenized: Sequence[int] | None = None
    learning: bool = False
    tried: set[str] = field(default_factory=set)
    needs: Needs = field(default_factory=Needs)
    pace: Pace = UNKNOWN
    home: str = ""
    outlook: Outlook | None = None
    ended: bool = False
    _proof: Proof | None = None

    @property
    def proof(self) -> Proof | None:
        """What handles are compared with, once the token ids are known."""
        if self.token_ids is None:
            return None
        if self._proof is None or self._proof.token_ids is not self.token_ids:
            self._proof = Proof(self.scope, self.token_ids)
        return self._proof
