"""What only a simulated engine tells of releases, and how it stands without kvloop's plug-in."""

from __future__ import annotations

from pathlib import Path

from kvloop_connector.lease_requests import PLUGIN, RELEASE_PATH, WORKER_EXTENSION
from kvloop_connector.settings import Role
from tests.harness import client
from tests.harness.engines import Kind, start
from tests.integration.simulated import spec

ALLOWED = {"VLLM_PLUGINS": PLUGIN}
NOBODY = {"remote_request_ids": ["nobody's"]}


def test_paths_stand_behind_the_engines_key_and_say_what_is_missing(tmp_path: Path) -> None:
    keyed = ("--api-key", "the engine's key")
    specs = [
        spec(Role.DECODE, *keyed, environment=ALLOWED),
        spec(Role.DECODE, "--worker-extension-cls", WORKER_EXTENSION, environment=ALLOWED),
    ]
    with start(Kind.SIM, tmp_path, specs) as engines:
        bare, able = engines.decode

        assert client.post(bare.url + RELEASE_PATH, NOBODY).status == 401
        refused = client.post(bare.url + RELEASE_PATH, NOBODY, api_key="the engine's key")
        assert refused.status == 501
        assert f"--worker-extension-cls {WORKER_EXTENSION}" in refused.json["error"]["message"]
        answer = client.post(able.url + RELEASE_PATH, NOBODY).json
        assert answer == {"handles": [{"remote_request_id": "nobody's", "outcome": "not_held"}]}
