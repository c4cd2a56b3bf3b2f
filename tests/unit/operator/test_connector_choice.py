"""Which connector engines get where the resource leaves it to kvloop."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_connector.engine.start import TRIED_VERSIONS
from kvloop_connector.settings import Connector
from kvloop_operator.check import check
from kvloop_operator.connector_choice import BY_DEFAULT
from kvloop_operator.desired import desired
from kvloop_operator.facts import ENGINE_TEMPLATE_VERSIONS, OperatorSettings
from tests.unit.operator.documents import facts_of, manifests, resource

TRIED: dict[str, Any] = {"engine__version": "0.32.0"}


def chosen(settings: OperatorSettings | None = None, **changes: Any) -> tuple[Connector, str]:
    facts = facts_of(resource(**changes), settings)
    return facts.connector, facts.connector_because


def test_engines_of_a_version_on_which_it_was_tried_get_kvloops() -> None:
    assert chosen(**TRIED) == (Connector.KVLOOP, "")
    assert manifests(**TRIED) == manifests(**TRIED, kvTransfer__connector="KvloopConnector")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine__version": "0.33.0"}, "with vLLM 0.32.0 only"),
        ({"engine__version": "0.32.1"}, "with vLLM 0.32.0 only"),
        ({**TRIED, "kvTransfer__bidirectionalKvXfer": False}, "no KV is read back"),
        ({**TRIED, "kvTransfer__enginePlugin": "Disabled"}, "enginePlugin is Disabled"),
        ({**TRIED, "engine__args": ["--enforce-eager", "-dcp", "2"]}, "engine.args has -dcp"),
        (
            {**TRIED, "engine__args": ["--prefix-caching-hash-algo=sha256"]},
            "engine.args has --prefix-caching-hash-algo",
        ),
        ({**TRIED, "decode__tensorParallelSize": 4, "decode__dataParallelSize": 2}, "data parallelism"),
    ],
)
def test_all_others_get_vllms_own_and_the_reason_is_told(changes: dict[str, Any], why: str) -> None:
    connector, because = chosen(**changes)

    assert connector is Connector.NIXL
    assert why in because
    assert manifests(**changes) == manifests(**changes, kvTransfer__connector="NixlConnector")
    # What is chosen can be deployed: a default never refuses a resource.
    parsed = resource(**changes)
    assert check(parsed, facts_of(parsed)) == []


@pytest.mark.parametrize("connector", Connector)
def test_what_the_resource_says_is_done(connector: Connector) -> None:
    for version in ("0.32.0", "0.33.0"):
        assert chosen(engine__version=version, kvTransfer__connector=connector.value) == (connector, "")


def test_a_newer_operator_gives_running_engines_no_other_connector() -> None:
    assert set(BY_DEFAULT) == set(ENGINE_TEMPLATE_VERSIONS)
    running = OperatorSettings(live_template_version="0")
    assert chosen(running, **TRIED) == (Connector.NIXL, "this template has no default")
    parsed = resource(**TRIED)
    assert desired(parsed, facts_of(parsed, running)) != manifests(**TRIED)


def test_it_is_the_default_on_no_version_on_which_it_was_not_tried() -> None:
    assert {str(version) for versions in BY_DEFAULT.values() for version in versions} <= TRIED_VERSIONS
