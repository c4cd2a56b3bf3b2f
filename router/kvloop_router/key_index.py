"""Which handles can be found by a key, in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class KeyIndex(dict[bytes, str | dict[str, None]]):
    """Names of handles by keys. Most keys are of one handle only, whose name stands alone. An empty key is none."""

    __slots__ = ()

    def under(self, key: bytes) -> Iterator[str]:
        """The handles of a key, the newest first."""
        idents = self.get(key, {})
        return iter((idents,)) if isinstance(idents, str) else reversed(idents)

    def add(self, keys: Iterable[bytes], ident: str) -> None:
        """A handle that is new can be found by these, of which one may be there twice."""
        for key in keys:
            if key:
                known = self.setdefault(key, ident)
                if known is not ident:
                    if isinstance(known, str):
                        known = self[key] = {known: None}
                    known[ident] = None

    def remove(self, keys: Iterable[bytes], ident: str) -> None:
        """It cannot be found by these any more."""
        for key in keys:
            known = self.get(key)
            if known == ident:
                del self[key]
            elif isinstance(known, dict):
                known.pop(ident, None)
                if not known:
                    del self[key]
