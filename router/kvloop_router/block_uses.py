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

    A block's count stands upright: bit n of it is in the nth number of its page, at the block's place. So all blocks of
    a page that a handle holds are counted at once, and one number is enough where no block is held twice.
    """

    __slots__ = ("_pages", "distinct")

    def __init__(self) -> None:
        self._pages: dict[int, list[int]] = {}
        self.distinct = 0

    def add(self, runs: Runs) -> None:
        """One more handle holds these blocks."""
        pages = self._pages
        for number, mask in _masks(runs).items():
            page = pages.get(number)
            if page is None:
                pages[number] = [mask]
                self.distinct += mask.bit_count()
                continue
            if len(page) == 1 and not page[0] & mask:
                page[0] |= mask
                self.distinct += mask.bit_count()
                continue
            self.distinct += (mask & ~_held(page)).bit_count()
            carry = mask
            for place, bits in enumerate(page):
                page[place], carry = bits ^ carry, bits & carry
                if not carry:
                    break
            else:
                page.append(carry)

    def remove(self, runs: Runs) -> None:
        """One of the handles that held these blocks does not any more."""
        for number, mask in _masks(runs).items():
            page, borrow = self._pages[number], mask
            if len(page) == 1:
                page[0] ^= mask
                self.distinct -= mask.bit_count()
                if not page[0]:
                    del self._pages[number]
                continue
            for place, bits in enumerate(page):
                page[place], borrow = bits ^ borrow, borrow & ~bits
                if not borrow:
                    break
            while page and not page[-1]:
                page.pop()
            if not page:
                del self._pages[number]
            self.distinct -= mask.bit_count() - (_held(page) & mask).bit_count()


def _held(page: list[int]) -> int:
    """The blocks that anybody holds."""
    held = 0
    for bits in page:
        held |= bits
    return held


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
