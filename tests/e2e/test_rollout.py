"""A change of the KV revision rolled over two pairs, and one reverted in mid-rollout, while turns are played."""

from __future__ import annotations

from typing import Any

import pytest

from kvloop_operator import names
from tests.harness.deployment import Deployment, spec
from tests.harness.installation import Installation

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_well")]


def _updated(deployment: Deployment, revision: str) -> set[str]:
    """The names of the engines that are ready at a revision."""
    return {pod.name for pod in deployment.engines() if pod.ready and pod.kv_revision == revision}


def test_a_rollout_and_one_that_is_reverted_fail_no_turn_and_mix_no_revisions(
    deployment: Deployment, kvloop: Installation, kvloop_images: dict[str, str], next_engine_image: str
) -> None:
    wanted: dict[str, Any] = spec(kvloop_images["sim"])
    for role in ("prefill", "decode"):
        wanted[role]["replicas"] = 2
    deployment.apply(wanted)
    deployment.wait_until_served()
    first = deployment.resource()["status"]["decode"]["revision"]
    routers = [pod["metadata"]["uid"] for pod in deployment.pods(names.ROUTER)]
    # The simulated engines of the two refuse one another, as vLLM's of two versions do.
    newer = {"image": next_engine_image, "version": "0.33.1", "args": ["--sim-version=0.33.1"]}
    older = {**wanted["engine"], "args": []}

    with deployment.meetings() as meetings:
        with deployment.inside.load(deployment.url, model="demo", conversations=4) as before:
            deployment.edit(engine=newer)
            deployment.wait_for("Reconciling", "True")
            kvloop.kill_operator()
            deployment.wait_until_served()
        second = deployment.resource()["status"]["decode"]["revision"]
        assert _updated(deployment, second) == {pod.name for pod in deployment.engines()}

        with deployment.inside.load(deployment.url, model="demo", conversations=4) as reverted:
            deployment.edit(engine=older)
            deployment.wait_until(lambda: len(_updated(deployment, first)) == 2, what="one pair rolled")
            kept = _updated(deployment, second)
            deployment.edit(engine=newer)
            deployment.wait_until_served()

    assert kept == {"demo-prefill-0", "demo-decode-0"}
    for load in (before, reverted):
        assert load.faults == []
        assert load.wrong == []
        assert {turn.streamed for turn in load.turns} == {True, False}
    assert before.decode_engines("warm") == {"demo-decode-0", "demo-decode-1"}
    assert reverted.decode_engines("warm")
    # They can be what they are for engines of either version, and with them went every handle.
    assert [pod["metadata"]["uid"] for pod in deployment.pods(names.ROUTER)] == routers
    assert meetings.mixed() == []
    assert set(meetings.revisions.values()) == {first, second}
    assert len({met.compatibility for met in meetings.all}) == 2
