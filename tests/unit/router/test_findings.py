"""What workers tell each other of pairs of engines."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import orjson
import pytest
from hypothesis import given, strategies as st

from kvloop_connector.settings import Role
from kvloop_router.engine_spec import EngineSpec
from kvloop_router.exchange import Exchange
from kvloop_router.findings import Finding, Findings, together
from kvloop_router.pairs import PairReport, Pairs, Verdict
from kvloop_router.state import State

PAIR = ("prefill-0/1", "decode-0/1")
UNKNOWN = Finding(Verdict.UNKNOWN, 0, 0, 0.0, 0.0, None, 0, "")
VERIFIED = Finding(Verdict.VERIFIED, 9, 8, 0.5, 0.25, True, 1, "")
FAILED = replace(UNKNOWN, verdict=Verdict.FAILED, attempts=1, detail="no KV moved")
WRONG = replace(VERIFIED, verdict=Verdict.WRONG, detail="other log-probabilities")


def told(finding: Finding, epoch: bytes = b"") -> Findings:
    return Findings(epoch, {PAIR: finding})


def specs(process: str = "1") -> tuple[EngineSpec, EngineSpec]:
    prefill, decode = (
        EngineSpec(name=f"{role}-0", role=role, url="", pod_uid="u", process=f"{role}-0/{process}", kv_revision="a")
        for role in (Role.PREFILL, Role.DECODE)
    )
    return prefill, decode


class Worker:
    """A worker's part, over one pair. ``forgot``: processes of which it was to release all."""

    def __init__(self, heard: Findings = Findings(), *, discovered: bool = True) -> None:  # noqa: B008  it is frozen
        self.state = State(0.0, Random(1))
        self.pairs = Pairs()
        self.forgot: list[str] = []
        if discovered:
            self.pairs.update(specs())
        self.exchange = Exchange(state=self.state, pairs=self.pairs, forget=self.forget, heard=heard, plays=False)

    async def forget(self, process: str) -> None:
        self.forgot.append(process)

    @property
    def report(self) -> PairReport:
        (report,) = self.pairs.reports()
        return report


@pytest.mark.parametrize(
    ("known", "heard", "believed"),
    [
        pytest.param(UNKNOWN, VERIFIED, VERIFIED, id="one has played the canary"),
        pytest.param(FAILED, replace(VERIFIED, attempts=2), replace(VERIFIED, attempts=2), id="the last one played"),
        pytest.param(replace(VERIFIED, attempts=5), WRONG, WRONG, id="what is wrong stays so"),
        pytest.param(WRONG, replace(VERIFIED, attempts=5), WRONG, id="whatever a canary says"),
        pytest.param(VERIFIED, FAILED, FAILED, id="two that were played at once: the worse"),
    ],
)
def test_of_two_findings_one_is_believed(known: Finding, heard: Finding, believed: Finding) -> None:
    assert together(told(known), [told(heard)]).pairs == {PAIR: believed}
    assert together(told(heard), [told(known)]).pairs == {PAIR: believed}
    assert together(Findings(), [told(known), told(heard)]).pairs == {PAIR: believed}


def test_a_pair_that_nobody_has_any_more_is_forgotten_unless_it_was_wrong() -> None:
    assert together(told(VERIFIED), [Findings()]).pairs == {}
    assert together(told(WRONG), [Findings()]).pairs == {PAIR: WRONG}
    assert together(told(VERIFIED), []).pairs == {PAIR: VERIFIED}


findings = st.builds(
    lambda epoch, verdict, attempts: told(replace(UNKNOWN, verdict=verdict, attempts=attempts), epoch),
    st.binary(max_size=2),
    st.sampled_from(list(Verdict)),
    st.integers(0, 3),
)


@given(st.lists(findings, min_size=1, max_size=4), st.randoms())
def test_who_is_asked_first_makes_no_difference_and_asking_again_neither(said: list[Findings], random: Random) -> None:
    known = together(Findings(), said)

    assert together(Findings(), random.sample(said, len(said))) == known
    assert together(known, said) == together(known, [known]) == known


@given(findings)
def test_findings_come_over_as_they_are(said: Findings) -> None:
    assert Findings.heard(orjson.loads(orjson.dumps(said.told()))) == said


async def test_what_another_found_counts_here_too() -> None:
    worker = Worker()

    before = worker.exchange.state_of_knowledge
    await worker.exchange.hear(told(VERIFIED))

    assert worker.report == VERIFIED.about(worker.report)
    assert worker.exchange.state_of_knowledge != before
    assert worker.exchange.tell().pairs == {PAIR: VERIFIED}
    assert worker.forgot == []


async def test_what_another_found_wrong_is_used_here_no_more() -> None:
    finder, worker = Worker(), Worker()
    finder.state.begin_epoch()
    finder.pairs.record_wrong(*PAIR, "other log-probabilities")

    await worker.exchange.hear(finder.exchange.tell())
    await worker.exchange.hear(finder.exchange.tell())

    assert not worker.pairs.usable("prefill-0", "decode-0")
    assert worker.state.salt_epoch == finder.state.salt_epoch != b""
    assert worker.forgot == ["decode-0/1"], "once"


async def test_one_that_is_started_knows_it_before_its_first_turn() -> None:
    worker = Worker(told(WRONG, b"\0\0\0\1x"), discovered=False)
    worker.pairs.update(specs())
    await worker.exchange.apply()

    assert worker.report.verdict is Verdict.WRONG
    assert worker.state.salt_epoch == b"\0\0\0\1x"


async def test_nothing_is_said_of_another_process() -> None:
    worker = Worker(told(WRONG))
    worker.pairs.update(specs("2"))

    await worker.exchange.apply()

    assert worker.report.verdict is Verdict.UNKNOWN


def test_each_epoch_comes_after_the_one_before() -> None:
    state, epochs = State(0.0, Random(1)), [b""]
    for _ in range(300):
        state.begin_epoch()
        epochs.append(state.salt_epoch)

    assert epochs == sorted(set(epochs))
