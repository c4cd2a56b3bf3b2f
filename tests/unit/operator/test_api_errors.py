"""Why the API server refuses something, told apart by its own words."""

from __future__ import annotations

import pytest

from kvloop_operator.cluster.errors import Forbidden, error_of


@pytest.mark.parametrize(
    ("message", "lacks_right"),
    [
        ('User "operator" cannot patch resource "deployments" in API group "apps" in the namespace "team"', True),
        ('user "operator" is attempting to grant RBAC permissions not currently held: {pods [get]}', True),
        ("cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on", True),
        ('services "demo-router" is forbidden: exceeded quota: team, requested: services=1, used: services=5', False),
        ('admission webhook "guard.example.com" denied the request: no Service like this is wanted', False),
    ],
)
def test_a_right_that_lacks_is_told_from_what_is_let_in_for_nobody(message: str, lacks_right: bool) -> None:
    error = error_of("PATCH /x", status=403, reason="Forbidden", message=message, retry_after=None)
    assert isinstance(error, Forbidden)
    assert error.lacks_right == lacks_right
