"""What separates one tenant's KV from another's: digest keys, and the salt for the engines' prefix caches. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from kvloop_connector.digest import DigestKey

_PERSON = b"kvloop/scope"


@dataclass(frozen=True, slots=True)
class Scope:
    """All requests whose KV may be shared: of one tenant, one model (or adapter), one salt.

    ident: names it without telling anything of it. salt: for ``cache_salt``; None leaves the engine's default.
    epoch: what is computed in one is not to be reused in the next.
    """

    secret: bytes
    ident: bytes
    salt: str | None
    epoch: bytes = b""

    @property
    def history_key(self) -> DigestKey:
        """The key for digests of messages."""
        return DigestKey(self.secret, self.ident)

    def token_key(self, kv_revision: str) -> DigestKey:
        """The key for digests of tokens, whose KV is equal only within a revision."""
        return DigestKey(self.secret, self.ident + kv_revision.encode())


def tenant(secret: bytes, api_key: str | None) -> bytes:
    """A digest of the API key that says nothing of it; of none, where no keys are configured."""
    return _digest(secret, b"tenant", (api_key or "").encode("utf-8", "surrogatepass"))


def scope(
    secret: bytes, tenant_digest: bytes, model: str, client_salt: str | None, *, set_salt: bool, epoch: bytes = b""
) -> Scope:
    """The scope of a request. ``set_salt``: replace the client's salt by one that its tenant is part of.

    epoch: another one makes all of these salts others, so that nothing of what prefix caches hold is found.
    """
    own_salt = (client_salt or "").encode("utf-8", "surrogatepass")
    parts = (tenant_digest, own_salt, epoch) if epoch else (tenant_digest, own_salt)
    salt = _digest(secret, b"salt", *parts).hex() if set_salt else client_salt
    ident = _digest(secret, b"scope", tenant_digest, model.encode("utf-8", "surrogatepass"), own_salt)
    return Scope(secret, ident, salt, epoch)


def _digest(secret: bytes, *parts: bytes) -> bytes:
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return blake2b(framed, key=secret, digest_size=16, person=_PERSON).digest()
