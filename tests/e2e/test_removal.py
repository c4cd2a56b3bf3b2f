"""What is left when the operator goes, when the resource goes, and when its namespace goes."""

from __future__ import annotations

import pytest

from kvloop_operator import names
from kvloop_operator.cluster.kinds import CHILDREN, SECRET
from tests.harness.deployment import Deployment, spec
from tests.harness.installation import Installation

pytestmark = pytest.mark.timeout(1200)


def _left(deployment: Deployment) -> list[str]:
    """Everything that belongs to the resource, itself included."""
    kinds = [*(kind.kind for kind in (*CHILDREN, SECRET) if kind.optional is None), "Pod"]
    found = [
        f"{kind}/{each['metadata']['name']}"
        for kind in kinds
        for each in deployment.kube.list(kind, deployment.namespace, selector=names.LABEL_DEPLOYMENT)
    ]
    return [*found, *([names.KIND] if deployment.resource() else [])]


def test_without_the_operator_all_serves_on_and_a_deleted_resource_still_goes_whole(
    deployment: Deployment, kvloop: Installation, kvloop_images: dict[str, str]
) -> None:
    deployment.apply(spec(kvloop_images["sim"]))
    deployment.wait_until_served()
    engines = deployment.engines()
    question = {"role": "user", "content": "before " * 150}
    text = deployment.chat([question]).json["choices"][0]["message"]["content"]

    kvloop.uninstall()
    history = [question, {"role": "assistant", "content": text}, {"role": "user", "content": "after " * 150}]
    assert deployment.chat(history).headers["x-kvloop-path"] == "warm"
    assert deployment.engines() == engines
    kvloop.install()
    since = kvloop.wait_until_quiet()
    kvloop.wait_for_resyncs(1)
    assert kvloop.writes(since) == []
    assert deployment.engines() == engines
    deployment.wait_until_served()

    kvloop.stop_operator()
    deployment.kubectl("delete", f"dinf/{deployment.name}")
    deployment.wait_until(lambda: _left(deployment) == [], what="nothing left")
    kvloop.start_operator()


def test_a_namespace_goes_with_the_resource_in_it_while_the_operator_looks_after_it(
    deployment: Deployment, kvloop: Installation, operator_is_well: None, kvloop_images: dict[str, str]
) -> None:
    deployment.apply(spec(kvloop_images["sim"]))
    deployment.wait_until_served()
    deployment.kubectl("delete", f"namespace/{deployment.namespace}", "--wait=false")
    # The namespace itself goes a minute later: its controller waits out the grace periods that its pods had.
    deployment.wait_until(lambda: _left(deployment) == [], what="nothing left")
    kvloop.wait_until_quiet()
