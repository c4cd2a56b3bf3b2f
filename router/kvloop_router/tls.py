"""TLS to clients and to engines, with certificates that may change while the router runs; nothing older than 1.2."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvloop_router.config import EngineTLS, ListenTLS
from kvloop_router.errors import InvalidConfig


class Serving:
    """What clients see. Connections that are open keep the certificate that they began with."""

    def __init__(self, settings: ListenTLS) -> None:
        """Raises InvalidConfig."""
        self.paths = (Path(settings.certificate_file), Path(settings.key_file))
        self.context = _context(ssl.PROTOCOL_TLS_SERVER)
        self.load()

    def load(self) -> None:
        """Read the files anew. Raises InvalidConfig, and leaves all as it was."""
        # A context that has taken a certificate and refused its key is of no use any more: another one is tried first.
        _load_chain(_context(ssl.PROTOCOL_TLS_SERVER), "listen.tls", *self.paths)
        _load_chain(self.context, "listen.tls", *self.paths)


class Calling:
    """How the router trusts engines, and shows itself to them."""

    def __init__(self, settings: EngineTLS) -> None:
        """Raises InvalidConfig."""
        self._settings = settings
        files = (settings.ca_file, settings.certificate_file, settings.key_file)
        self.paths = tuple(Path(file) for file in files if file is not None)
        self.load()

    def load(self) -> None:
        """Read the files anew; connections from now on use them. Raises InvalidConfig, and leaves all as it was."""
        settings = self._settings
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(settings.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(f"engineTls.caFile: {settings.ca_file}: {_why(error)}") from error
        if settings.certificate_file is not None and settings.key_file is not None:
            _load_chain(context, "engineTls", Path(settings.certificate_file), Path(settings.key_file))
        self._context = context

    def arguments(self) -> Mapping[str, Any]:
        """For a request by aiohttp."""
        return {"ssl": self._context, "server_hostname": self._settings.server_name}


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _load_chain(context: ssl.SSLContext, field: str, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"{field}: {certificate}, {key}: {_why(error)}") from error


def _no_password() -> NoReturn:
    # Else OpenSSL would ask for it on the terminal, and wait.
    raise InvalidConfig("a key with a password cannot be used")


def _why(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error)
