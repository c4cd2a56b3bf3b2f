"""An engine's certificate is looked at before the engine starts, as routers look at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvloop_connector.settings import Role
from tests.cluster.credentials import Authority
from tests.unit.operator.documents import child, manifests

NAME = "demo-engines.default.svc"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    found = Authority(tmp_path_factory.mktemp("authority"))
    found.create()
    return found


def looked_at(files: dict[str, Path]) -> subprocess.CompletedProcess[str]:
    """What the init container's command says of these files in the place of its own."""
    changes: Any = {"security__tls": {"engines": {"secretName": "mine"}}}
    template = child(manifests(**changes), "StatefulSet", "demo-decode")["spec"]["template"]
    (container,) = template["spec"]["initContainers"]
    program, *arguments = [str(files.get(Path(word).name, word)) for word in container["command"]]
    assert program == "python3"
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_a_certificate_that_routers_will_trust_lets_the_engine_start(authority: Authority) -> None:
    certificate, key = authority.issue("engine", user="engine", hosts=(f"DNS:{NAME}",))
    found = looked_at({"tls.crt": certificate, "tls.key": key, "ca.crt": authority.certificate})
    assert (found.returncode, found.stderr) == (0, "")


def test_a_certificate_of_another_name_does_not_and_says_which_is_missing(authority: Authority) -> None:
    certificate, key = authority.issue("elsewhere", user="engine", hosts=("DNS:other-engines.default.svc",))
    found = looked_at({"tls.crt": certificate, "tls.key": key, "ca.crt": authority.certificate})
    assert found.returncode == 1
    assert NAME in found.stderr.splitlines()[-1]


def test_a_certificate_of_another_authority_does_not(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    other.create()
    certificate, key = other.issue("engine", user="engine", hosts=(f"DNS:{NAME}",))
    found = looked_at({"tls.crt": certificate, "tls.key": key, "ca.crt": authority.certificate})
    assert found.returncode == 1
    assert "certificate verify failed" in found.stderr.splitlines()[-1]


@pytest.mark.parametrize("role", Role)
def test_engines_without_certificates_have_nothing_to_be_looked_at(role: Role) -> None:
    template = child(manifests(), "StatefulSet", f"demo-{role}")["spec"]["template"]
    assert "initContainers" not in template["spec"]
