"""vLLM's own loader, in its environment, without an engine: leases hide no plug-in, and open nothing but themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.inside import answer_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_with_leases_vllm_loads_what_it_loads_without_and_their_paths(tmp_path: Path) -> None:
    answer = answer_of("plugin_side.py", tmp_path)

    unset, leases = answer["unset"], answer["leases"]
    assert unset.pop("vllm.endpoint_plugins") == []
    assert leases.pop("vllm.endpoint_plugins") == ["kvloop_leases"]
    # Without its name it is loaded and does nothing; with it, it lets requests have adapters downloaded.
    unset["vllm.general_plugins"].remove("lora_hf_hub_resolver")
    assert leases == unset
    assert all(f"other_{group.split('.')[1]}" in names for group, names in leases.items())
