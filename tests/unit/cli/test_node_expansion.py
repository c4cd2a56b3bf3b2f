"""``$(NAME)`` references, as Kubernetes expands them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvloop.node.expansion import expand

VALUES = {"VAR_A": "A", "VAR_B": "B", "VAR_C": "C", "VAR_REF": "$(VAR_A)", "VAR_EMPTY": ""}

# The table of ``expansion/expand_test.go``, as far as it differs in kind.
CASES = [
    ("whole string", "$(VAR_A)", "A"),
    ("repeated", "$(VAR_A)-$(VAR_A)", "A-A"),
    ("beginning, middle and end", "$(VAR_A)-1-$(VAR_B)-2-$(VAR_C)", "A-1-B-2-C"),
    ("a value is not expanded again", "$(VAR_REF)", "$(VAR_A)"),
    ("empty value", "f00-$(VAR_EMPTY)-", "f00--"),
    ("escaped", "$$(VAR_A)", "$(VAR_A)"),
    ("escaped twice", "$$$$(VAR_A)", "$$(VAR_A)"),
    ("escape before a reference", "$$$(VAR_A)", "$A"),
    ("escaped in the middle", "foo$$(VAR_A)bar", "foo$(VAR_A)bar"),
    ("unknown stays", "$(VAR_UNKNOWN)", "$(VAR_UNKNOWN)"),
    ("unknown beside known", "foo-$(NO)-$(VAR_A)", "foo-$(NO)-A"),
    ("empty name stays", "$()", "$()"),
    ("unclosed", "$(VAR_A", "$(VAR_A"),
    ("unclosed, then closed", "$(VAR_A-$(VAR_B)", "$(VAR_A-$(VAR_B)"),
    ("closer without opener", "VAR_A)$(VAR_B)", "VAR_A)B"),
    ("dollar at the end", "foo$", "foo$"),
    ("two dollars at the end", "foo$$", "foo$"),
    ("shell reference stays", "$VAR_A ${VAR_B}", "$VAR_A ${VAR_B}"),
    ("nested", "$($(VAR_A))", "$($(VAR_A))"),
]


@pytest.mark.parametrize(("text", "wanted"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_expands_as_kubernetes(text: str, wanted: str) -> None:
    assert expand(text, VALUES) == wanted


@given(st.text(alphabet="$()AB x"))
def test_a_text_whose_dollars_are_doubled_stands_for_itself(text: str) -> None:
    assert expand(text.replace("$", "$$"), {"A": "1", "B": "2"}) == text


@given(st.text().filter(lambda text: "$" not in text))
def test_a_text_without_a_dollar_is_left_alone(text: str) -> None:
    assert expand(text, VALUES) == text
