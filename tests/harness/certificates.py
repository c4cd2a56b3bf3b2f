"""Certificates for tests, made by OpenSSL's own command."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority whose files are in ``folder``."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def create(self) -> Authority:
        """Make its key and certificate."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _openssl(
            *("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={self.folder.name}"),
            *("-keyout", self.folder / "ca.key", "-out", self.certificate),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
        )
        return self

    def issue(self, name: str, *, hosts: Sequence[str] = ("IP:127.0.0.1",)) -> tuple[Path, Path]:
        """Certificate and key, for a server at ``hosts`` and for a client."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        _openssl(
            *("req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", certificate),
            *("-CA", self.certificate, "-CAkey", self.folder / "ca.key"),
            *("-addext", f"subjectAltName={','.join(hosts)}", "-addext", "basicConstraints=critical,CA:FALSE"),
            *("-addext", "keyUsage=critical,digitalSignature"),
        )
        return certificate, key


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
