"""Keys and their tenants, from each form that the file may have; and how much a tenant may ask."""

from __future__ import annotations

import pytest

from kvloop_router import scope
from kvloop_router.api_keys import ApiKeys, Caller
from kvloop_router.errors import InvalidConfig, RequestError
from kvloop_router.tenant_limits import TenantLimits

SECRET = b"s" * 32


def caller(text: str, key: str) -> Caller | None:
    return ApiKeys(SECRET, text).caller((key,))


@pytest.mark.parametrize(
    "text",
    [
        "# team a\nkey-a\n\n key-b \n",
        "key-b",
        "b: key-b\n",
        '{"b": "key-b"}',
        "a: key-a\nb: {key: key-b}\n",
        "'%key-a'\nkey-b\n@strange\n",
    ],
)
def test_each_form_of_the_file_gives_the_tenant_of_the_key(text: str) -> None:
    found = caller(text, "key-b")

    assert found is not None
    assert found.tenant == scope.tenant(SECRET, "key-b")
    assert caller(text, "key-c") is None
    assert caller(text, "") is None


def test_names_and_limits_come_with_their_keys() -> None:
    text = "a: key-a\nb: {key: key-b, concurrentRequests: 2}\n"

    assert caller(text, "key-a") == Caller(scope.tenant(SECRET, "key-a"), "a")
    assert caller(text, "key-b") == Caller(scope.tenant(SECRET, "key-b"), "b", 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nobody\n\n",
        "two words\n",
        "- a\n- b\n",
        '{"a": ',
        "a: 5\n",
        "a:\n",
        "a: ''\n",
        "5: key\n",
        "a: {key: x, limit: 1}\n",
        "a: {key: x, concurrentRequests: many}\n",
        "a: {key: x, concurrentRequests: true}\n",
        "a: {key: x, concurrentRequests: -1}\n",
        "a: {concurrentRequests: 1}\n",
        "a: one\nb: one\n",
    ],
)
def test_a_file_that_is_unclear_is_refused_and_changes_nothing(text: str) -> None:
    keys = ApiKeys(SECRET, "key")

    with pytest.raises(InvalidConfig, match="apiKeysFile"):
        keys.replace(text)

    assert keys.caller(("key",)) is not None


def test_no_fault_tells_a_key() -> None:
    with pytest.raises(InvalidConfig) as fault:
        ApiKeys(SECRET, "a: sk-secret\nb: sk-secret\n")

    assert "sk-secret" not in str(fault.value)


def test_without_a_file_everybody_is_one_tenant() -> None:
    keys = ApiKeys(SECRET)

    assert keys.caller(()) == keys.caller(("any",)) == Caller(scope.tenant(SECRET, None))


def test_replaced_keys_are_no_longer_valid() -> None:
    keys = ApiKeys(SECRET, "old")
    keys.replace("new")

    assert keys.caller(("old",)) is None
    assert keys.caller(("old", "new")) is not None


def test_a_tenant_at_its_limit_is_refused_until_a_request_has_ended() -> None:
    refused: list[None] = []
    limits = TenantLimits(1, lambda: refused.append(None))
    a, b, free = Caller(b"a"), Caller(b"b"), Caller(b"c", concurrent_requests=2)

    for runs in (a, b, free, free):
        limits.begins(runs)
    for over in (a, free):
        with pytest.raises(RequestError) as error:
            limits.begins(over)
        assert (error.value.status, error.value.retry_after) == (429, 1)
    assert len(refused) == 2

    limits.ends(a)
    limits.begins(a)

    assert len(refused) == 2


def test_none_may_run_where_the_limit_is_none() -> None:
    with pytest.raises(RequestError):
        TenantLimits(None, lambda: None).begins(Caller(b"a", concurrent_requests=0))
