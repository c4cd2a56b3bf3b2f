"""Every reason is brought about on a real cluster: the tests there fail where one that they declare does not come."""

from __future__ import annotations

from kvloop_operator.status import Reason
from tests.control_plane import test_reasons as on_a_control_plane
from tests.e2e import test_reasons as on_a_node


def test_every_reason_is_brought_about_on_a_real_cluster() -> None:
    tests = [*vars(on_a_control_plane).items(), *vars(on_a_node).items()]
    marks = [mark for name, test in tests if name.startswith("test_") for mark in getattr(test, "pytestmark", ())]
    assert {reason for mark in marks if mark.name == "produces" for reason in mark.args} == set(Reason)
