"""The material of a resource's Secret: made once, and kept for as long as the Secret is there."""

from __future__ import annotations

import base64
import binascii
import secrets

from kvloop_operator import names
from kvloop_operator.facts import SecretMaterial
from kvloop_operator.live import Object

_BYTES = 32


def material_of(secret: Object | None) -> SecretMaterial:
    """What the Secret holds; a key that it lacks, or that is not text, is made anew."""
    data = (secret or {}).get("data") or {}
    return SecretMaterial(
        admin_token=_text(data.get(names.ADMIN_TOKEN_KEY)) or secrets.token_hex(_BYTES),
        digest_key=_text(data.get(names.DIGEST_KEY_KEY)) or secrets.token_hex(_BYTES),
        seal_key=_text(data.get(names.SEAL_KEY_KEY)) or secrets.token_hex(_BYTES),
        store_password=_text(data.get(names.STORE_PASSWORD_KEY)) or secrets.token_hex(_BYTES),
    )


def _text(encoded: object) -> str:
    try:
        return base64.b64decode(str(encoded or ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
