"""What becomes of a field that there is not, by the client that sends it: docs/install.md tells people."""

from __future__ import annotations

import copy
import json
from typing import Any, Final

import pytest
import yaml

from tests.cluster.errors import CommandFailedError
from tests.cluster.kubectl import Kubectl
from tests.cluster.paths import REPOSITORY

_EXAMPLE: Final = yaml.safe_load((REPOSITORY / "examples" / "minimal.yaml").read_text(encoding="utf-8"))
_FIELD: Final = "kvRecomputeTreshold"


def _misspelt() -> dict[str, Any]:
    resource = copy.deepcopy(_EXAMPLE)
    transfer = resource["spec"]["kvTransfer"]
    transfer[_FIELD] = transfer.pop("kvRecomputeThreshold") + 1000
    assert isinstance(resource, dict)
    return resource


@pytest.mark.parametrize(
    "flags",
    [["--validate=strict"], ["--server-side", "--validate=strict"], ["--server-side", "--validate=ignore"]],
    ids=["apply", "server-side apply", "server-side apply without validation"],
)
def test_a_misspelt_field_is_refused_by_name(namespace_cp: Kubectl, flags: list[str]) -> None:
    with pytest.raises(CommandFailedError, match=_FIELD):
        namespace_cp("apply", "--filename=-", *flags, stdin=json.dumps(_misspelt()))


def test_a_client_that_neither_validates_nor_applies_on_the_server_loses_it(namespace_cp: Kubectl) -> None:
    namespace_cp("apply", "--filename=-", "--validate=ignore", stdin=json.dumps(_misspelt()))
    transfer = namespace_cp.get("dinf", _EXAMPLE["metadata"]["name"])["spec"]["kvTransfer"]
    assert _FIELD not in transfer
    assert transfer["kvRecomputeThreshold"] == 64
