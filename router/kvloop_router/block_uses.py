"""How many handles hold each KV block of an engine process, at little more than a bit a block. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PAGE_BITS = 11
_PAGE = 1 << _PAGE_BITS
_LAST = _PAGE - 1
_SINGLE = tuple(1 << place for place in range(_PAGE))
_ONES = tuple((1 << count) - 1 for count in range(_PAGE + 1))

Runs = Iterable[tuple[int, int]]
"""As ``kvloop_connector.handle.to_ranges`` gives them."""


class BlockUses:
    """Blocks that several handles share count once in ``distinct``: their memory is retained once.

    Of each page one number says which of its blocks anybody holds. How many more hold one is counted where there are
    any: the count stands upright, bit n of it in the nth number of its page, at the block's place. So all blocks of a
    page that a handle holds are counted at once.
    """

    __slots__ = ("_held", "_more", "distinct")

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._more: dict[int, list[int]] = {}
        self.distinct = 0

    def add(self, runs: Runs) -> None:
        """One more handle holds these blocks."""
        pages = self._held
        for number, mask in _masks(runs).items():
            held = pages.get(number, 0)
            pages[number] = held | mask
            again = held & mask
            if again:
                self._count(number, again)
                mask ^= again
            self.distinct += mask.bit_count()

    def remove(self, runs: Runs) -> None:
        """One of the handles that held these blocks does not any more."""
        pages = self._held
        for number, mask in _masks(runs).items():
            if number in self._more:
                mask ^= self._uncount(number, mask)
            left = pages[number] ^ mask
            if left:
                pages[number] = left
            else:
                del pages[number]
            self.distinct -= mask.bit_count()

    def _count(self, number: int, mask: int) -> None:
        """One more holds these blocks of a page, which another holds already."""
        page, carry = self._more.setdefault(number, []), mask
        for place, bits in enumerate(page):
            page[place], carry = bits ^ carry, bits & carry
            if not carry:
                return
        page.append(carry)

    def _uncount(self, number: int, mask: int) -> int:
        """One less holds these blocks of a page; gives those that others hold still."""
        page, shared = self._more[number], 0
        for bits in page:
            shared |= bits
        shared &= mask
        borrow = shared
        for place, bits in enumerate(page):
            page[place], borrow = bits ^ borrow, borrow & ~bits
        while page and not page[-1]:
            page.pop()
        if not page:
            del self._more[number]
        return shared


def _masks(runs: Runs) -> Mapping[int, int]:
    """For each page, its blocks that are in ``runs``."""
    masks: dict[int, int] = {}
    # Runs that follow one another are mostly of one page.
    page, mask = -1, 0
    for first, count in runs:
        if count == 1:
            if first >> _PAGE_BITS == page:
                mask |= _SINGLE[first & _LAST]
                continue
        elif count < 0:
            first, count = first + count + 1, -count
        while True:
            if first >> _PAGE_BITS != page:
                if mask:
                    masks[page] = mask
                page = first >> _PAGE_BITS
                mask = masks.get(page, 0)
            low = first & _LAST
            if low + count <= _PAGE:
                mask |= _ONES[count] << low
                break
            mask |= _ONES[_PAGE - low] << low
            first, count = first + _PAGE - low, count - _PAGE + low
    if mask:
        masks[page] = mask
    return masks
