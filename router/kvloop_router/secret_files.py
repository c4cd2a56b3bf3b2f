"""The files with the router's secrets."""

from __future__ import annotations

from pathlib import Path

from kvloop_router.errors import InvalidConfig

_MINIMUM_KEY_BYTES = 16
_MAXIMUM_KEY_BYTES = 64


def read_digest_key(path: Path) -> bytes:
    """The secret that digests are keyed with: hexadecimal text, or the bytes as they are. Raises InvalidConfig."""
    raw = _read(path, "digestKeyFile")
    key = raw
    try:
        decoded = bytes.fromhex(raw.decode("ascii").strip())
    except (UnicodeDecodeError, ValueError):
        pass
    else:
        if len(decoded) >= _MINIMUM_KEY_BYTES:
            key = decoded
    if len(key) < _MINIMUM_KEY_BYTES:
        raise InvalidConfig(f"digestKeyFile: {len(key)} bytes; {_MINIMUM_KEY_BYTES} or more are needed")
    return key[:_MAXIMUM_KEY_BYTES]


def read_token(path: Path) -> str:
    """The admin token: the file's text without surrounding space. Raises InvalidConfig where it is empty."""
    token = _read(path, "admin.tokenFile").decode("utf-8", "replace").strip()
    if not token:
        raise InvalidConfig("admin.tokenFile: the file is empty")
    return token


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{field}: {path}: {error.strerror}") from error
