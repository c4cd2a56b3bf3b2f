"""Finding names of handles by keys."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvloop_router.key_index import KeyIndex

KEYS = st.lists(st.sampled_from([b"", b"a", b"b", b"c"]), max_size=3)


class Indexing(RuleBasedStateMachine):
    """What is found is what was put there and is not gone, the newest first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KeyIndex()
        self.there: dict[str, list[bytes]] = {}
        self.made = 0

    @rule(keys=KEYS)
    def add(self, keys: list[bytes]) -> None:
        self.made += 1
        ident = f"handle {self.made}"
        self.index.add(keys, ident)
        self.there[ident] = keys

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        ident = data.draw(st.sampled_from(list(self.there)))
        self.index.remove(self.there.pop(ident), ident)

    @invariant()
    def finds_what_is_there(self) -> None:
        for key in (b"a", b"b", b"c"):
            expected = [ident for ident, keys in self.there.items() if key in keys][::-1]
            assert list(self.index.under(key)) == expected
            assert (key in self.index) == bool(expected)
        assert b"" not in self.index
        assert list(self.index.under(b"")) == []


TestIndexing = Indexing.TestCase
TestIndexing.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
