"""Kubernetes quantities: ``500m``, ``1Gi``, ``1e3``."""

from __future__ import annotations

import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]{1,3}))?"
)
_SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{suffix: Fraction(10 ** (3 * (power + 1))) for power, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Fraction(2 ** (10 * (power + 1))) for power, suffix in enumerate("KMGTPE")},
}


def amount(quantity: object) -> Fraction | None:
    """The number that ``quantity`` stands for; None where it is no quantity."""
    if isinstance(quantity, bool) or not isinstance(quantity, int | float | str):
        return None
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None:
        return None
    number = Fraction(found["number"])
    if found["exponent"]:
        return number * Fraction(10) ** int(found["exponent"])
    return number * _SUFFIXES.get(found["suffix"] or "", Fraction(1))
