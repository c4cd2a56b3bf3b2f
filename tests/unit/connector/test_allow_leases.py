"""What ``VLLM_PLUGINS`` is set to so that the paths for leases are loaded, and all else as if it were not set."""

from __future__ import annotations

import logging

import pytest

from kvloop_connector.engine.allow_leases import allow, allowed, register
from kvloop_connector.errors import UnsupportedEngine

LEASES = ("vllm.endpoint_plugins", "kvloop_leases")
NEURON = [
    ("console_scripts", "vllm"),
    ("vllm.general_plugins", "lora_filesystem_resolver"),
    ("vllm.general_plugins", "lora_hf_hub_resolver"),
    ("vllm.general_plugins", "kvloop_stream_handle"),
    ("vllm.platform_plugins", "neuron"),
    ("vllm.stat_logger_plugins", "mine"),
    ("vllm.io_processor_plugins", "segments"),
    ("vllm.endpoint_plugins", "administration"),
    LEASES,
]


def test_every_plug_in_is_named_but_those_that_nobody_has_allowed() -> None:
    assert allowed(NEURON) == [
        "kvloop_leases",
        "kvloop_stream_handle",
        "lora_filesystem_resolver",
        "mine",
        "neuron",
        "segments",
    ]


def test_an_endpoint_of_somebody_else_is_not_allowed_by_the_name_that_it_shares() -> None:
    with pytest.raises(UnsupportedEngine, match="set VLLM_PLUGINS") as refusal:
        allowed([*NEURON, ("vllm.general_plugins", "administration")])

    assert "administration" in str(refusal.value)


def test_a_name_that_the_variable_cannot_hold_is_not_cut() -> None:
    with pytest.raises(UnsupportedEngine, match="'one, two'"):
        allowed([*NEURON, ("vllm.general_plugins", "one, two")])


def test_what_cannot_be_allowed_hides_nothing_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    environment: dict[str, str] = {}

    with caplog.at_level(logging.INFO, "vllm.kvloop.leases"):
        allow(environment, [*NEURON, ("vllm.general_plugins", "one, two")])

    assert environment == {}
    assert "neither released nor renewed" in caplog.text


@pytest.mark.parametrize(
    "variables",
    [{}, {"KVLOOP_LEASES": "0"}, {"KVLOOP_LEASES": "1", "VLLM_PLUGINS": "neuron"}, {"VLLM_PLUGINS": ""}],
)
def test_what_somebody_said_is_left(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(variables)
    monkeypatch.setattr("os.environ", environment)

    register()

    assert environment == variables


def test_what_is_installed_here_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"KVLOOP_LEASES": "1"}
    monkeypatch.setattr("os.environ", environment)

    register()
    register()

    assert environment["VLLM_PLUGINS"] == "kvloop_allow_leases,kvloop_leases,kvloop_stream_handle"
