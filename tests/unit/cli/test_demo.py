"""The demonstration's script, its two arms, and what it says of what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from kvloop.demo import report
from kvloop.demo.arms import Arm, router_workload, with_both_arms
from kvloop.demo.result import Measured, Played, Row, faults, rows
from kvloop.demo.script import Sizes, sizes, write_script
from kvloop.node.resource import LocalDeployment, prepare
from kvloop.node.stand_in import EngineKind
from kvloop.node.workloads import read_manifests

EXAMPLE = Path(__file__).parents[3] / "examples" / "demo.yaml"


def measured(prompt: int, reused: int = 0, path: str = "cold", seconds: float = 1.0) -> Measured:
    return Measured(
        ttft_seconds=seconds, prompt_tokens=prompt, answer_tokens=10, path=path, reason="miss", reused_tokens=reused
    )


OFF = (measured(100), measured(200), measured(300))
ON = (measured(100), measured(200, 110, "warm"), measured(300, 210, "warm"))
GOOD = Played(off=OFF, on=ON)


def changed(played: Played, arm: Arm, index: int, **fields: Any) -> Played:
    turns = list(played.arm(arm))
    turns[index] = replace(turns[index], **fields)
    return replace(played, **{arm.value: tuple(turns)})


def test_a_conversation_that_reuses_everything_has_no_fault() -> None:
    assert faults([GOOD, GOOD]) == []


@pytest.mark.parametrize(
    ("played", "words"),
    [
        (changed(GOOD, Arm.ON, 1, path="cold"), "turn 2 with reuse on: path cold (miss), not warm"),
        (changed(GOOD, Arm.ON, 2, path="local"), "turn 3 with reuse on: path local (miss), not warm"),
        (changed(GOOD, Arm.ON, 2, reused_tokens=188), "turn 3 with reuse on: 188 of 210 tokens reused, less than 90%"),
        (changed(GOOD, Arm.OFF, 1, path="warm"), "turn 2 with reuse off: path warm, 0 tokens reused"),
        (changed(GOOD, Arm.OFF, 0, reused_tokens=32), "turn 1 with reuse off: path cold, 32 tokens reused"),
    ],
)
def test_each_fault_is_told(played: Played, words: str) -> None:
    assert faults([played]) == [words]
    assert faults([GOOD, played]) == [words.replace(" with", " of repetition 2 with")]


def test_just_enough_reuse_is_enough() -> None:
    assert faults([changed(GOOD, Arm.ON, 2, reused_tokens=189)]) == []


def test_rows_are_medians_of_times_and_the_worst_of_reuse() -> None:
    slow = changed(GOOD, Arm.ON, 1, ttft_seconds=9.0, reused_tokens=105)
    fast = changed(GOOD, Arm.ON, 1, ttft_seconds=0.5)

    row = rows([GOOD, slow, fast])[1]

    assert (row.turn, row.on_seconds, row.off_seconds, row.reused_tokens, row.left_tokens) == (2, 1.0, 1.0, 105, 110)


def test_a_row_is_warm_only_where_every_repetition_was() -> None:
    cold = changed(GOOD, Arm.ON, 1, path="cold")

    assert [row.path for row in rows([GOOD, cold])] == ["cold", "cold", "warm"]


def test_the_document_has_the_promised_shape() -> None:
    document = report.document(rows([GOOD]), EngineKind.SIM, {"answer tokens": 10})

    assert document["engine"] == "sim"
    assert document["simulated"] is True
    assert document["turns"][1] == {
        "turn": 2,
        "prompt_tokens": 200,
        "left_by_turn_before": 110,
        "path": "warm",
        "reused_tokens": 110,
        "ttft_ms": {"off": 1000.0, "on": 1000.0},
    }


def test_titles_say_what_is_simulated() -> None:
    assert "SIMULATED" in report.title(EngineKind.SIM, "0.33.0")
    assert "vLLM 0.32.0" in report.title(EngineKind.VLLM, "0.32.0")


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    row = Row(turn=1, prompt_tokens=10, left_tokens=0, path="cold", reused_tokens=0, off_seconds=0.2, on_seconds=0.1)

    report.picture([row, replace(row, turn=2, prompt_tokens=20)], "title", {"a": 1}, tmp_path / "demo.png")

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@given(context=st.integers(2048, 131072), turns=st.integers(2, 20), answer=st.integers(1, 64))
def test_the_whole_conversation_fits_into_the_context(context: int, turns: int, answer: int) -> None:
    wanted = sizes(context=context, turns=turns, answer=answer)

    total = wanted.system + turns * (wanted.tool_output + wanted.answer)
    assert total <= 0.9 * context or wanted.tool_output == 32


def test_a_script_has_the_wanted_sizes_and_grows() -> None:
    script = write_script(Sizes(system=400, tool_output=300, answer=32), turns=3, characters_per_token=4)

    assert len(script.system) == pytest.approx(1600, rel=0.15)
    assert [len(output) for output in script.outputs] == pytest.approx([1200] * 3, rel=0.15)
    first = script.opening("a")
    second = script.next_turn(first, "answer", 2)
    assert second[: len(first)] == first
    assert second[len(first)] == {"role": "assistant", "content": "answer"}
    assert len(set(script.outputs)) == 3


def test_two_conversations_differ_from_their_first_words_on() -> None:
    script = write_script(Sizes(system=64, tool_output=32, answer=8), turns=2, characters_per_token=4)

    one, other = script.opening("one")[0]["content"], script.opening("two")[0]["content"]
    assert one[:20] != other[:20]
    assert one.partition("\n")[2] == other.partition("\n")[2]


@pytest.fixture
def deployment(tmp_path: Path) -> LocalDeployment:
    return prepare(EXAMPLE, engine=EngineKind.SIM, state_dir=tmp_path)


def router_yaml(deployment: LocalDeployment, arm: Arm) -> Any:
    wanted = read_manifests(deployment.manifests)
    [data] = [
        keys for (kind, _, name), keys in wanted.objects.data.items()
        if (kind, name) == ("ConfigMap", router_workload(deployment, arm))
    ]  # fmt: skip
    return yaml.safe_load(data["router.yaml"])


def test_the_arms_differ_in_reuse_only(deployment: LocalDeployment) -> None:
    both = with_both_arms(deployment)

    off, on = router_yaml(both, Arm.OFF), router_yaml(both, Arm.ON)
    assert (off.pop("reuse"), on.pop("reuse")) == (False, True)
    assert off == on
    names = [workload.name for workload in read_manifests(both.manifests).workloads]
    assert names == ["demo-prefill", "demo-decode", "demo-router", "demo-router-reuse-off"]


def test_each_arms_router_reads_its_own_configuration_and_the_shared_secret(deployment: LocalDeployment) -> None:
    routers = [m for m in with_both_arms(deployment).manifests if m["kind"] == "Deployment"]

    read = [
        [source.get("configMap", source.get("secret"))["name"] for source in volume["projected"]["sources"]]
        for router in routers
        for volume in router["spec"]["template"]["spec"]["volumes"]
        if "projected" in volume
    ]

    assert read == [["demo-router", "demo-router"], ["demo-router-reuse-off", "demo-router"]]
