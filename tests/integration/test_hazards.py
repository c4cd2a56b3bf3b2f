"""The witness sees each thing that a router must not do."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.handle import COLD_PREFILL_PARAMS
from kvloop_connector.settings import Role
from tests.integration.hazards import Witness
from tests.integration.scripted_engine import BLOCK_SIZE, ScriptedEngine, handle

CHAT = "/v1/chat/completions"
TOKENS = list(range(1000, 1023))


def engine(name: str, role: Role, **facts: Any) -> ScriptedEngine:
    return ScriptedEngine(name, role, engine_id=f"id-{name}", **facts)


class Scene:
    """A prefill and a decode engine, and a handle of each for the same tokens."""

    def __init__(self) -> None:
        self.witness = Witness(watching=True)
        self.prefill = engine("prefill", Role.PREFILL)
        self.decode = engine("decode", Role.DECODE)
        self.retained = handle(self.decode, len(TOKENS) - 1)
        self.computed = handle(self.prefill, len(TOKENS))
        self.witness.gave(self.decode, self.retained, TOKENS, BLOCK_SIZE)
        self.witness.gave(self.prefill, self.computed, TOKENS, BLOCK_SIZE)

    def trimmed(self, tokens: int, **changes: Any) -> dict[str, Any]:
        (blocks,) = self.retained["remote_block_ids"]
        return {
            **self.retained,
            "remote_num_tokens": tokens,
            "remote_block_ids": [blocks[: tokens // BLOCK_SIZE]],
            **changes,
        }

    def to_prefill(self, params: Any, prompt: list[int] = TOKENS, **fields: Any) -> list[str]:
        body = {"max_tokens": 1, "stream": False, "n": 1, "kv_transfer_params": params, **fields}
        self.witness.asked(self.prefill, CHAT, body, prompt)
        return self.witness.hazards

    def to_decode(self, params: Any, prompt: list[int] = TOKENS, path: str = CHAT) -> list[str]:
        self.witness.asked(self.decode, path, {"kv_transfer_params": params}, prompt)
        return self.witness.hazards


def test_a_turn_as_it_should_be_is_none() -> None:
    scene = Scene()
    following = [*TOKENS, 7, 8]

    assert not scene.to_prefill(scene.trimmed(20), following)
    assert not scene.to_prefill({**COLD_PREFILL_PARAMS, "prompt_token_ids": following}, following)
    assert not scene.to_decode({**scene.computed, "prompt_token_ids": TOKENS})


def test_a_release_is_none() -> None:
    scene = Scene()

    assert not scene.to_prefill({**scene.retained, "remote_num_tokens": 0}, [1, 2, 3])


@pytest.mark.parametrize(
    ("change", "hazard"),
    [
        ({"do_remote_prefill": True}, "not a prefill leg's"),
        ({"remote_host": None}, "of what a pull needs"),
        ({"remote_request_id": "made-up"}, "no engine issued"),
        ({"remote_block_ids": [[100]]}, "1 blocks for 20 tokens"),
        ({"remote_block_ids": [[1, 2, 3, 4, 5]]}, "not the first"),
    ],
)
def test_parameters_that_an_engine_ends_by(change: dict[str, Any], hazard: str) -> None:
    scene = Scene()

    (found,) = scene.to_prefill(scene.trimmed(20, **change))

    assert hazard in found


def test_a_pull_of_what_is_not_the_prompts_own() -> None:
    edited = [*TOKENS[:10], 5, *TOKENS[11:]]
    for prompt in (edited, TOKENS[:12]):
        scene = Scene()
        (found,) = scene.to_prefill(scene.trimmed(20), prompt)
        assert "silently another text" in found


def test_a_handle_that_is_used_twice_unless_it_was_refused() -> None:
    scene = Scene()
    scene.to_prefill(scene.trimmed(20))
    scene.witness.refused({"kv_transfer_params": scene.retained})
    assert not scene.to_prefill(scene.trimmed(20))

    assert "used before" in scene.to_prefill({**scene.retained, "remote_num_tokens": 0})[0]


def test_a_handle_that_goes_to_its_issuer_or_to_another_revision() -> None:
    scene = Scene()
    assert any("assertion" in hazard for hazard in scene.to_prefill({**scene.computed, **COLD_PREFILL_PARAMS}))

    scene = Scene()
    scene.prefill.revision = "b"
    assert "another KV revision" in scene.to_prefill(scene.trimmed(20))[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"max_tokens": 2},
        {"n": 2},
        {"max_completion_tokens": 50},
        {"min_tokens": 2},
        {"stream_options": {"include_usage": True}},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"vllm_xargs": {"kv_transfer_params": {}}},
    ],
)
def test_a_prefill_leg_that_is_more_than_one_token(fields: dict[str, Any]) -> None:
    scene = Scene()

    assert len(scene.to_prefill(scene.trimmed(20), **fields)) == 1


def test_a_decode_leg_that_leaks_its_blocks() -> None:
    scene = Scene()

    assert "leak for ever" in scene.to_decode(dict(COLD_PREFILL_PARAMS))[0]


def test_a_decode_leg_that_is_not_its_prefill_legs() -> None:
    scene = Scene()
    assert "differ" in scene.to_decode({**scene.computed, "tp_size": 2})[0]
    scene = Scene()
    assert "another prompt" in scene.to_decode(scene.computed, [1, 2])[0]
    scene = Scene()
    scene.to_decode(scene.computed)
    assert "used before" in scene.to_decode(scene.computed)[0]
    scene = Scene()
    assert "no leg" in scene.to_decode(scene.computed, path="/v1/responses")[0]


def test_a_prefill_leg_that_is_cancelled_while_a_router_serves() -> None:
    scene = Scene()
    scene.witness.cancelled(scene.decode, CHAT)
    assert not scene.witness.hazards

    scene.witness.cancelled(scene.prefill, CHAT)
    assert "cancelled" in scene.witness.hazards[0]
