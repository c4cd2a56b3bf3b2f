"""Certificates: what the router shows its clients, what engines show the router, and whom it trusts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloop_operator import names
from kvloop_operator.manifests.common import Context, init_container
from kvloop_operator.serving import engine_tls, router_tls, trusted_engines

_VOLUME = "kvloop-tls"
_ENGINE_CA_VOLUME = "kvloop-engine-ca"
_PAIR = (names.CERTIFICATE_KEY, names.PRIVATE_KEY_KEY)

# A handshake in memory. Its error is the last line of the log, and so what the pod's status says.
_HANDSHAKE = """
import ssl, sys
certificate, key, authority, name = sys.argv[1:]
server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
server.load_cert_chain(certificate, key)
client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
client.load_verify_locations(authority)
there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
sides = [
    client.wrap_bio(back, there, server_hostname=name),
    server.wrap_bio(there, back, server_side=True),
]
while sides:
    side = sides.pop(0)
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        sides.append(side)
""".strip()


def engine_arguments(context: Context) -> list[str]:
    """Arguments of ``vllm serve``."""
    if engine_tls(context.spec) is None:
        return []
    certificate, key = (f"{names.ENGINE_TLS_DIRECTORY}/{name}" for name in _PAIR)
    return ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--enable-ssl-refresh"]


def engine_volumes(context: Context) -> list[dict[str, Any]]:
    """The engines' certificate and key, and for the look at them before an engine starts, their authority."""
    tls = engine_tls(context.spec)
    # Nobody knows which user an engine's image runs as.
    return [_secret(_VOLUME, tls.secret_name, (*_PAIR, names.AUTHORITY_KEY), 0o444)] if tls is not None else []


def engine_mounts(context: Context) -> list[dict[str, Any]]:
    """Where an engine finds them."""
    return [_mount(_VOLUME, names.ENGINE_TLS_DIRECTORY)] if engine_tls(context.spec) is not None else []


def init_containers(context: Context) -> list[dict[str, Any]]:
    """A look at the certificate as routers will look at it. No probe does: an engine that no router trusts would be
    ready, and a rollout would go on until no other is left."""
    name = server_name(context)
    if engine_tls(context.spec) is None or name is None:
        return []
    files = [f"{names.ENGINE_TLS_DIRECTORY}/{key}" for key in (*_PAIR, names.AUTHORITY_KEY)]
    engine = context.spec.engine
    container = init_container(
        names.TLS_CONTAINER,
        # The engine's own, so that another version of kvloop starts no engine anew.
        image=engine.image,
        pull_policy=engine.image_pull_policy,
        # Who runs the engine can also run its image's Python.
        user=None,
        command=["python3", "-c", _HANDSHAKE, *files, name],
        mounts=engine_mounts(context),
    )
    return [container]


def engine_scheme(context: Context) -> dict[str, str]:
    """The scheme of probes, from which routers take how they speak to this engine; HTTP is not said."""
    return {"scheme": "HTTPS"} if engine_tls(context.spec) is not None else {}


def engine_scrape(context: Context) -> dict[str, Any]:
    """How the engines' metrics are asked for, beside the port and the path."""
    tls = engine_tls(context.spec)
    if tls is None:
        return {}
    authority = {"secret": {"name": tls.secret_name, "key": names.AUTHORITY_KEY}}
    return {"scheme": "https", "tlsConfig": {"ca": authority, "serverName": server_name(context)}}


def server_name(context: Context) -> str | None:
    """The name in the engines' certificates; None where they need none."""
    tls = trusted_engines(context.spec)
    if tls is None or tls.server_name is not None:
        return tls.server_name if tls is not None else None
    return names.engine_server_name(context.name, context.resource.metadata.namespace or "default")


def router_listen(context: Context) -> dict[str, Any]:
    """What ``listen`` of the router's configuration says of it."""
    if router_tls(context.spec) is None:
        return {}
    files = zip(("certificateFile", "keyFile"), _PAIR, strict=True)
    return {"tls": {field: f"{names.ROUTER_TLS_DIRECTORY}/{key}" for field, key in files}}


def router_engines(context: Context) -> dict[str, Any] | None:
    """``engineTls`` of the router's configuration."""
    if trusted_engines(context.spec) is None:
        return None
    return {"caFile": f"{names.ENGINE_CA_DIRECTORY}/{names.AUTHORITY_KEY}", "serverName": server_name(context)}


def router_volumes(context: Context) -> list[dict[str, Any]]:
    """The router's certificate and key, and the engines' authority without their key: whoever has that can pass for an
    engine."""
    own, engines = router_tls(context.spec), trusted_engines(context.spec)
    volumes = [_secret(_VOLUME, own.secret_name, _PAIR, 0o440)] if own is not None else []
    if engines is not None:
        volumes.append(_secret(_ENGINE_CA_VOLUME, engines.secret_name, (names.AUTHORITY_KEY,), 0o440))
    return volumes


def router_mounts(context: Context) -> list[dict[str, Any]]:
    """Where the router finds them."""
    mounts = [_mount(_VOLUME, names.ROUTER_TLS_DIRECTORY)] if router_tls(context.spec) is not None else []
    if trusted_engines(context.spec) is not None:
        mounts.append(_mount(_ENGINE_CA_VOLUME, names.ENGINE_CA_DIRECTORY))
    return mounts


def _secret(volume: str, name: str, keys: Sequence[str], mode: int) -> dict[str, Any]:
    items = [{"key": key, "path": key} for key in keys]
    return {"name": volume, "secret": {"secretName": name, "defaultMode": mode, "items": items}}


def _mount(volume: str, directory: str) -> dict[str, Any]:
    return {"name": volume, "mountPath": directory, "readOnly": True}
