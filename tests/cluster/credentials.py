"""Keys, certificates, tokens and kubeconfig files of a cluster, as files in one folder."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.parts import run

_CURVE: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS: Final = "30"


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority whose files are `ca.crt` and `ca.key` in `folder`."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def create(self) -> None:
        """Make the authority's own key and certificate, and the key pair that signs ServiceAccount tokens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run(
            *("openssl", "req", "-x509", *_CURVE, "-days", _DAYS, "-subj", "/CN=kvloop-test"),
            *("-keyout", self.folder / "ca.key", "-out", self.certificate),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
        signing, verifying = self.folder / "service-account.key", self.folder / "service-account.pub"
        run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", signing)
        run("openssl", "ec", "-in", signing, "-pubout", "-out", verifying)

    def issue(
        self, name: str, *, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """Issue a certificate; with `hosts` (as `DNS:…` or `IP:…`) a server's. Returns its and its key's file."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        subject = "".join(f"/O={_escaped(group)}" for group in groups) + f"/CN={_escaped(user)}"
        run("openssl", "req", *_CURVE, "-keyout", key, "-out", request, "-subj", subject)
        extensions.write_text(
            "basicConstraints=critical,CA:FALSE\n"
            "keyUsage=critical,digitalSignature,keyEncipherment\n"
            "authorityKeyIdentifier=keyid\n"
            + (
                f"extendedKeyUsage=serverAuth\nsubjectAltName={','.join(hosts)}\n"
                if hosts
                else "extendedKeyUsage=clientAuth\n"
            )
        )
        run(
            *("openssl", "x509", "-req", "-in", request, "-days", _DAYS, "-extfile", extensions, "-out", certificate),
            *("-CA", self.certificate, "-CAkey", self.folder / "ca.key", "-set_serial", str(secrets.randbits(63))),
        )
        return certificate, key


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("/", "\\/")


COMPONENTS: Final = {
    "admin": ("admin", "system:masters"),
    # With the rights of all its controllers at once: no ServiceAccount of its own for each.
    "controller-manager": ("system:kube-controller-manager", "system:masters"),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "kubelet": ("system:node:node1", "system:nodes"),
    "dns": ("kvloop:dns", "system:masters"),
}
"""Identity to its user and group."""


def create_tokens(path: Path) -> dict[str, str]:
    """Write a token file for the API server and return each component's token."""
    tokens = {component: secrets.token_urlsafe(24) for component in COMPONENTS}
    path.write_text(
        "".join(f'{tokens[component]},{user},{user},"{group}"\n' for component, (user, group) in COMPONENTS.items())
    )
    path.chmod(0o600)
    return tokens


def write_kubeconfig(path: Path, *, cluster: dict[str, object], user: dict[str, object]) -> Path:
    """Write a kubeconfig with one context, of the address and the credentials as such files have them.

    JSON is YAML too, and every client reads it.
    """
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(json.dumps(document, indent=1))
    return path


def encoded(path: Path) -> str:
    """A file's content in base64, as kubeconfig files hold it."""
    return base64.b64encode(path.read_bytes()).decode()
