"""What the fixtures and examples say about themselves holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloop_operator.api.v1alpha1 import DisaggregatedInference
from kvloop_operator.check import check
from kvloop_operator.errors import InvalidResource
from tests.unit.operator.documents import EXAMPLES, expected_field, facts_of, fixtures, read


def named(file: Path) -> str:
    return file.stem


@pytest.mark.parametrize("file", fixtures("good"), ids=named)
def test_good_resources_are_valid_and_pass_every_check(file: Path) -> None:
    parsed = DisaggregatedInference.parse(read(file))
    assert check(parsed, facts_of(parsed)) == []


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=named)
def test_examples_are_valid_and_pass_every_check(file: Path) -> None:
    parsed = DisaggregatedInference.parse(read(file))
    assert check(parsed, facts_of(parsed)) == []


@pytest.mark.parametrize("file", fixtures("bad"), ids=named)
def test_bad_resources_are_refused_at_the_field_that_they_name(file: Path) -> None:
    with pytest.raises(InvalidResource) as refused:
        DisaggregatedInference.parse(read(file))
    assert [fault.field for fault in refused.value.faults] == [expected_field(file)]


@pytest.mark.parametrize("file", fixtures("stalled"), ids=named)
def test_stalled_resources_are_valid_and_a_check_names_the_field(file: Path) -> None:
    parsed = DisaggregatedInference.parse(read(file))
    assert expected_field(file) in [fault.field for fault in check(parsed, facts_of(parsed))]


@pytest.mark.parametrize("file", [*fixtures("bad"), *fixtures("stalled")], ids=named)
def test_every_fault_says_what_is_wrong_and_what_to_write_instead(file: Path) -> None:
    try:
        parsed = DisaggregatedInference.parse(read(file))
    except InvalidResource as error:
        faults = list(error.faults)
    else:
        faults = check(parsed, facts_of(parsed))
    for fault in faults:
        assert fault.value, fault
        assert fault.fault, fault
        assert fault.remedy not in ("", "correct it"), fault
        assert "\n" not in str(fault)


def test_the_commonest_mistakes_have_a_fixture_each() -> None:
    names = {file.stem for kind in ("bad", "stalled") for file in fixtures(kind)}
    assert names >= {
        "unknown-field",
        "text-for-number",
        "decoder-ttl-zero",
        "router-ttl-too-near",
        "tensor-parallel-does-not-divide",
        "engine-too-old",
        "tag-without-version",
        "name-with-dot",
        "kv-transfer-config-in-args",
        "unknown-instance-type",
    }
