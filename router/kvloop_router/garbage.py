"""When Python looks for objects that only hold each other."""

from __future__ import annotations

import gc

_YOUNG = 50_000
"""So many more objects there may be than at the last look. A turn makes none that only hold each other, and leaves some
that stay, such as its report and its handle: with Python's own 700, nearly every turn pays for a look that finds
nothing."""
_MIDDLE = 20


def look_seldom() -> None:
    """Leave out what is there by now, for ever, and look at the rest seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _MIDDLE)
