"""Who may use the API: keys from a file, each a tenant of its own, that can change while the router runs.

The file has one key a line (lines that start with ``#`` are left out), or is YAML or JSON with a name for each::

    team-a: sk-0123
    team-b: {key: sk-4567, concurrentRequests: 8}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Any

import yaml

from kvloop_router import scope
from kvloop_router.errors import InvalidConfig

_FIELD = "apiKeysFile"
_KEY = "key"
_REQUESTS = "concurrentRequests"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request is from.

    tenant: a digest of the key. name: as the file calls the key; empty where it does not.
    concurrent_requests: how many requests of this tenant may run at once; None: as many as of any other.
    """

    tenant: bytes
    name: str = ""
    concurrent_requests: int | None = None


class ApiKeys:
    """The keys that are valid now. A key is looked up by a digest that is keyed with the router's secret, so that the
    time this takes tells nothing of any key.
    """

    def __init__(self, secret: bytes, text: str | None = None) -> None:
        """text: the file's; None: no keys are configured, and everybody is served, as one tenant."""
        self._secret = secret
        self._anybody = Caller(scope.tenant(secret, None))
        self._callers: Mapping[bytes, Caller] | None = None
        if text is not None:
            self.replace(text)

    def replace(self, text: str) -> None:
        """From now on the keys in ``text`` are valid, and no others. Raises InvalidConfig, and leaves all as it was."""
        callers: dict[bytes, Caller] = {}
        for name, key, limit in _entries(text):
            tenant = scope.tenant(self._secret, key)
            if tenant in callers:
                raise InvalidConfig(f"{_FIELD}: {name}: another name has the same key")
            callers[tenant] = Caller(tenant, name, limit)
        if not callers:
            raise InvalidConfig(f"{_FIELD}: no key in the file, so that nobody could use the API")
        self._callers = callers

    def caller(self, offered: Iterable[str]) -> Caller | None:
        """Whose keys these are; None where none of them is valid."""
        if self._callers is None:
            return self._anybody
        for key in offered:
            tenant = scope.tenant(self._secret, key)
            known = self._callers.get(tenant)
            if known is not None and compare_digest(known.tenant, tenant):
                return known
        return None


def read(path: Path) -> str:
    """The file's text. Raises InvalidConfig."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InvalidConfig(f"{_FIELD}: {path}: {error.strerror}") from error


def _entries(text: str) -> Iterator[tuple[str, str, int | None]]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        document = None
    if isinstance(document, dict):
        for name, entry in document.items():
            yield _named(name, entry)
        return
    if isinstance(document, list) or text.lstrip().startswith(("{", "[")):
        raise InvalidConfig(f"{_FIELD}: neither one key a line nor a map of names to keys")
    for number, line in enumerate(text.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key.split()) > 1:
            raise InvalidConfig(f"{_FIELD}: line {number}: a key has no spaces")
        yield "", key, None


def _named(name: Any, entry: Any) -> tuple[str, str, int | None]:
    if not isinstance(name, str):
        raise InvalidConfig(f"{_FIELD}: {name}: a name must be text; put it in quotes")
    fields = entry if isinstance(entry, dict) else {_KEY: entry}
    unknown = sorted(str(field) for field in fields.keys() - {_KEY, _REQUESTS})
    if unknown:
        raise InvalidConfig(f"{_FIELD}: {name}: unknown: {', '.join(unknown)}")
    key, limit = fields.get(_KEY), fields.get(_REQUESTS)
    if not isinstance(key, str) or not key.strip():
        raise InvalidConfig(f"{_FIELD}: {name}: its key must be text; put it in quotes")
    if limit is not None and (type(limit) is not int or limit < 0):
        raise InvalidConfig(f"{_FIELD}: {name}: {_REQUESTS} must be a whole number of 0 or more")
    return name, key.strip(), limit
