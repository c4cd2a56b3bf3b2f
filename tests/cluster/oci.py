"""One-layer container images as OCI archives, without a container engine."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ARCHITECTURES: Final[Mapping[str, str]] = {"x86_64": "amd64", "aarch64": "arm64"}
_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write_archive(
    archive: Path, *, layer: Path, name: str, entrypoint: Sequence[str] = (), command: Sequence[str] = ()
) -> None:
    """Write `archive`, holding one image called `name` whose only layer is the (uncompressed) tar file `layer`."""
    architecture = {"architecture": _ARCHITECTURES[platform.machine()], "os": "linux"}
    layer_digest = _file_digest(layer)
    config = _encode(
        {
            **architecture,
            "config": {"Env": [_PATH], "Entrypoint": list(entrypoint) or None, "Cmd": list(command) or None},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            # One entry a layer: buildah counts them when it builds upon the image.
            "history": [{"created_by": "kvloop"}],
        }
    )
    manifest = _encode(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [
                {
                    "mediaType": "application/vnd.oci.image.layer.v1.tar",
                    "digest": layer_digest,
                    "size": layer.stat().st_size,
                }
            ],
        }
    )
    index = _encode(
        {
            "schemaVersion": 2,
            "manifests": [
                {
                    **_descriptor("application/vnd.oci.image.manifest.v1+json", manifest),
                    "platform": architecture,
                    "annotations": {
                        # The first for containerd, the second for buildah.
                        "io.containerd.image.name": name,
                        "org.opencontainers.image.ref.name": name,
                    },
                }
            ],
        }
    )
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", index)
        for blob in (manifest, config):
            _add(tar, _blob_path(_digest(blob)), blob)
        member = tarfile.TarInfo(_blob_path(layer_digest))
        member.size = layer.stat().st_size
        with layer.open("rb") as content:
            tar.addfile(member, content)


def _encode(document: Mapping[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as content:
        return "sha256:" + hashlib.file_digest(content, "sha256").hexdigest()


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
