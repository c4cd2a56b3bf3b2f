"""Between engines that refuse one another no KV moves, and nobody says that the resource is ready."""

from __future__ import annotations

import pytest

from tests.harness.deployment import Deployment, spec

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("operator_is_well")]


def test_where_kv_does_not_move_the_resource_is_not_ready_and_says_between_which_engines(
    deployment: Deployment, kvloop_images: dict[str, str]
) -> None:
    wanted = spec(kvloop_images["sim"])
    # What one role alone gets is not part of the KV revision: only the canary finds out.
    wanted["prefill"]["args"] = ["--sim-version=0.32.0"]
    deployment.apply(wanted)
    transfer = deployment.wait_for("KVTransferVerified", "False", reason="TransferFailed")
    assert "demo-prefill-0 and demo-decode-0: no KV moved from prefill to decode" in transfer["message"]
    ready = deployment.conditions()["Ready"]
    assert ready["status"] != "True"
    assert (ready["reason"], ready["message"]) == ("TransferFailed", transfer["message"])
    assert deployment.resource()["status"]["kvTransfer"]["verifiedRevision"] == ""
    events = deployment.kubectl.list("events")
    told = {each["reason"] for each in events if each["involvedObject"]["kind"] == "DisaggregatedInference"}
    assert "TransferFailed" in told
    assert "Serving" not in told

    deployment.edit(prefill={"args": None})
    deployment.wait_until_served()
