"""The troubleshooting guide has what people look up in it."""

from __future__ import annotations

import re
from pathlib import Path

from kvloop_operator.status import ConditionType, Reason

GUIDE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
REASON_TABLE = "| reason | means | look at | do |"


def rows(heading: str) -> list[list[str]]:
    """The cells of all rows of the tables with this heading."""
    found = []
    inside = False
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and inside and not line.startswith("|--"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
        inside = line == heading or (inside and line.startswith("|"))
    return found


def test_every_reason_has_one_row_and_every_row_a_reason() -> None:
    told = [row[0].strip("`") for row in rows(REASON_TABLE)]
    assert sorted(told) == sorted(reason.value for reason in Reason)


def test_every_row_says_what_the_reason_means() -> None:
    for reason, means, *_ in rows(REASON_TABLE):
        assert len(means) > 20, reason


def test_every_reason_that_needs_a_person_says_what_to_do() -> None:
    quiet = ("Serving", "AllReady", "Verified", "AsExpected", "UpToDate", "PartlyReady")
    for reason, _, _, do in rows(REASON_TABLE):
        assert bool(do) is (reason.strip("`") not in quiet), reason


def test_every_condition_is_explained() -> None:
    told = [name for row in rows("| condition | says |") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(kind.value for kind in ConditionType)
