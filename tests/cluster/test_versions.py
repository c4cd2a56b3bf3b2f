"""The pins in other files agree with versions.py."""

from __future__ import annotations

import re

import pytest

from tests.cluster import versions
from tests.cluster.paths import MODULES, REQUIREMENTS


@pytest.mark.parametrize(
    ("module", "package", "version"),
    [
        ("kubernetes", "k8s.io/kubernetes", versions.KUBERNETES),
        ("kubernetes", "go.etcd.io/etcd/server/v3", versions.ETCD),
        ("containerd", "github.com/containerd/containerd/v2", versions.CONTAINERD),
        ("cni", "github.com/containernetworking/plugins", versions.CNI_PLUGINS),
        ("coredns", "github.com/coredns/coredns", versions.COREDNS),
    ],
)
def test_a_go_module_requires_the_pinned_version(module: str, package: str, version: str) -> None:
    text = (MODULES / module / "go.mod").read_text()
    assert re.findall(rf"^(?:require)?\s*{re.escape(package)} v(\S+)", text, flags=re.MULTILINE) == [version]


def test_every_staging_module_is_of_the_same_kubernetes() -> None:
    text = (MODULES / "kubernetes" / "go.mod").read_text()
    replaced = re.findall(r"^(?:replace)?\s*(k8s\.io/\S+) => \1 v0\.(\S+)", text, flags=re.MULTILINE)
    assert len(replaced) > 20
    assert {version for _, version in replaced} == {versions.KUBERNETES.removeprefix("1.")}


def test_the_wheels_are_pinned_with_hashes() -> None:
    text = REQUIREMENTS.read_text()
    for wheel in (versions.KUBECTL_WHEEL, versions.GO_WHEEL):
        assert re.search(rf"^{re.escape(wheel)}==\S+ \\\n +--hash=sha256:", text, flags=re.MULTILINE)


def test_kubectl_is_of_the_cluster_s_version() -> None:
    assert versions.KUBECTL == versions.KUBERNETES
