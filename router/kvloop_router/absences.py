"""Why there is no handle of a history or under a conversation id, at nine bytes each. Pure."""

from __future__ import annotations

from struct import Struct

from kvloop_router.kept import Absence

_PLACES = 8
"""A key has one of so many places, those of its hash; of more keys that have the same ones the oldest goes."""

_HASH = Struct("q")
_RECORD = _HASH.size + 1
"""Bytes: a key's hash, and why."""
_GROUP = _PLACES * _RECORD
_WHYS = tuple(Absence)
_NUMBERS = {why: bytes([number]) for number, why in enumerate(_WHYS)}


class Absences:
    """Remembers about the ``most`` keys that were noted last, from the beginning in as much memory as ever: every turn
    leaves some, so that whatever grew with them would grow for hours.

    A key is known by its hash, and two of the same one are taken for each other: nothing but what a turn says of itself
    goes by this.
    """

    __slots__ = ("_groups", "_records")

    def __init__(self, most: int) -> None:
        self._groups = -(-most // _PLACES)
        # The newest of a group comes first.
        self._records = bytearray(_GROUP * self._groups)

    def note(self, key: bytes, why: Absence) -> None:
        """Remember why there is no handle under ``key``."""
        records, number = self._records, hash(key) or 1
        hashed, first = _HASH.pack(number), number % self._groups * _GROUP
        at = records.find(hashed, first, first + _GROUP)
        # Elsewhere it is parts of two records that happen to look like it.
        if at < 0 or at % _RECORD:
            at = first + _GROUP - _RECORD
        records[first : at + _RECORD] = hashed + _NUMBERS[why] + records[first:at]

    def get(self, key: bytes) -> Absence | None:
        """Why; None where nothing is remembered."""
        number = hash(key) or 1
        first = number % self._groups * _GROUP
        at = self._records.find(_HASH.pack(number), first, first + _GROUP)
        return None if at < 0 or at % _RECORD else _WHYS[self._records[at + _HASH.size]]
