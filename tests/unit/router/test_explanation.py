"""The reasons that an explanation puts into words."""

from __future__ import annotations

import re
from pathlib import Path

from kvloop_connector.verdict import Outcome
from kvloop_router.explanation import WHY
from kvloop_router.kept import Absence

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "router.md"


def test_every_reason_that_a_turn_can_have_is_put_into_words() -> None:
    table = DOCUMENTATION.read_text(encoding="utf-8").split("| reason | meaning |")[1].split("\n\n")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))

    assert len(documented) > 10
    assert documented | set(Absence) | set(Outcome) - {Outcome.READ} <= set(WHY)
