"""Release and renewal through vLLM's own server, workers and schedulers, without starting an engine."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.lease_requests import WORKER_EXTENSION
from tests.engine.inside import answer_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Cases = dict[str, Any]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """What came of each case of ``lease_side.py``."""
    return answer_of("lease_side.py", tmp_path_factory.mktemp("leases"))


def outcomes(answer: dict[str, Any]) -> list[str]:
    assert answer["status"] == 200
    return [entry["outcome"] for entry in answer["handles"]]


def test_vllms_worker_has_none_of_the_names_that_it_is_given(cases: Cases) -> None:
    assert cases["names taken"] == []


def test_a_released_lease_is_given_up_at_the_next_step_and_no_other(cases: Cases) -> None:
    release = cases["release"]

    assert outcomes(release["answer"]) == ["released"]
    assert release["given up"]
    assert release["left"] == [True, True]


def test_what_is_gone_is_neither_released_nor_renewed(cases: Cases) -> None:
    assert outcomes(cases["release"]["again"]) == ["not_held"]
    assert outcomes(cases["release"]["renewed after it"]) == ["not_held"]


def test_a_renewed_handle_is_read_when_its_first_deadline_is_over(cases: Cases) -> None:
    renewal = cases["renewal"]

    # 480 s were retained, 900 s asked for.
    assert 420 <= renewal["seconds"] <= 900
    assert renewal["ranks keep it"]
    assert renewal["before"] == ["expired", "declined"]
    assert renewal["after"] == ["read", "read"]


def test_a_renewed_handle_of_the_stock_connector_is_not_declined(cases: Cases) -> None:
    renewal = cases["renewal, stock"]

    assert not renewal["has a term"]
    assert (renewal["before"][1], renewal["after"][1]) == ("declined", "read")


def test_no_renewal_goes_past_the_longest_lease(cases: Cases) -> None:
    assert cases["longest lease"] == pytest.approx(10)


def test_what_one_rank_does_not_hold_stays_as_it_was_on_the_other(cases: Cases) -> None:
    torn = cases["one rank holds it"]

    assert torn["outcome"] == "not_held"
    assert torn["moved by"] < 1e-6


def test_a_turn_past_the_cap_has_no_handle_until_another_is_released(cases: Cases) -> None:
    capped = cases["past the cap"]

    assert capped["retained"] == [True] * 7 + [False]
    assert outcomes(capped["release"]) == ["not_held", "released"]
    assert (capped["then"], capped["and then"]) == (True, False)


def test_the_engines_key_is_asked_for(cases: Cases) -> None:
    assert cases["wrong key"]["status"] == 401


@pytest.mark.parametrize(("case", "field"), [("unknown field", "force"), ("no seconds", "seconds")])
def test_a_request_that_is_none_is_refused_and_the_field_named(cases: Cases, case: str, field: str) -> None:
    assert cases[case]["status"] == 400
    assert cases[case]["error"]["param"] == field


@pytest.mark.parametrize(
    ("case", "why"), [("another vLLM", "otherwise than the versions"), ("another connector", "not vLLM's NIXL pull")]
)
def test_workers_that_are_not_as_they_were_answer_with_an_error(cases: Cases, case: str, why: str) -> None:
    assert cases[case]["status"] == 500
    assert why in cases[case]["error"]["message"]


def test_an_engine_without_the_extension_is_not_asked(cases: Cases) -> None:
    told = cases["no extension"]

    assert (told["status"], told["calls"]) == (501, 0)
    assert f"--worker-extension-cls {WORKER_EXTENSION}" in told["error"]["message"]


def test_the_paths_are_not_there_unless_they_are_allowed(cases: Cases) -> None:
    assert cases["not allowed"] == 404
