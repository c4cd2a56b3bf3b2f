"""How the API server keeps what it is given: what it leaves out, rewrites and fills in, and how it tells the entries of
a list apart."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from kvloop_operator.live import Object
from kvloop_operator.quantity import amount

Path = tuple[str, ...]

# The keys by which server-side apply tells the entries of a list apart; other lists are replaced as a whole.
_LIST_KEYS: Mapping[str, tuple[str, ...]] = {
    "claims": ("name",),
    "conditions": ("type",),
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
KEY_DEFAULTS = {"protocol": "TCP"}

_QUANTITY_MAPS = ("requests", "limits", "overhead")
_QUANTITY_FIELDS = ("sizeLimit", "divisor")
_FREE_MAPS = ("annotations", "data", "labels", "matchLabels", "nodeSelector", "selector", "stringData")

# What everybody who writes an object says, and nobody owns.
NOBODYS: frozenset[Path] = frozenset({("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")})

# Empty objects that say something. The API server drops or fills in all others.
_MEANT_EMPTY = ("emptyDir", "namespaceSelector", "podSelector")

SELECTORS = ("labelSelector", "namespaceSelector", "nodeSelector", "podSelector", "selector")

# What the API server fills in within values that are otherwise replaced as a whole: holder, field, value.
_FILLED_IN = frozenset(
    {
        ("fieldRef", "apiVersion", "v1"),
        ("podCertificate", "maxExpirationSeconds", 86400),
        ("ports", "protocol", "TCP"),
        ("resourceFieldRef", "divisor", "0"),
        ("roleRef", "apiGroup", "rbac.authorization.k8s.io"),
        ("serviceAccountToken", "expirationSeconds", 3600),
    }
)


def as_stored(desired: Object) -> Object:
    """``desired`` without its type, which objects in lists do not tell, and with a Secret's text as it is kept."""
    stored = {key: value for key, value in desired.items() if key not in ("apiVersion", "kind", "stringData")}
    if desired.get("kind") == "Secret" and "stringData" in desired:
        encoded = {key: b64encode(value.encode()).decode() for key, value in desired["stringData"].items()}
        stored["data"] = {**desired.get("data", {}), **encoded}
    return stored


def says_nothing(desired: Any, path: Path) -> bool:
    """Whether the API server may leave this value out of what it stores."""
    if isinstance(desired, dict):
        if path and path[-1] in _MEANT_EMPTY:
            return False
        return all(says_nothing(value, (*path, key)) for key, value in desired.items())
    return desired is None or desired in (False, 0, "") or desired == []


def is_filled_in(holder: str, key: str, value: Any) -> bool:
    """Whether the API server puts this field into what is otherwise replaced as a whole."""
    return isinstance(value, str | int) and (holder, key, value) in _FILLED_IN


def equal(live: Any, desired: Any, path: Path) -> bool:
    """Whether two values that are neither maps nor lists are the same."""
    if type(live) is type(desired) and live == desired:
        return True
    if _is_quantity(path):
        wanted = amount(desired)
        if wanted is not None:
            return amount(live) == wanted
    # In Python True is 1; in JSON it is not.
    return isinstance(live, bool) is isinstance(desired, bool) and bool(live == desired)


def _is_quantity(path: Path) -> bool:
    if len(path) < 2 or path[-2] in _FREE_MAPS:
        return False
    return path[-2] in _QUANTITY_MAPS or path[-1] in _QUANTITY_FIELDS


def list_keys(path: Path, desired: Sequence[Any]) -> tuple[str, ...] | None:
    """By what the entries of the list at ``path`` are told apart; None where the list is replaced as a whole."""
    keys = _LIST_KEYS.get(path[-1]) if path else None
    if path[-1:] == ("ports",):
        if path == ("spec", "ports"):
            keys = ("port", "protocol")
        elif len(path) > 2 and path[-3] in CONTAINER_LISTS:
            keys = ("containerPort", "protocol")
    if keys is None:
        return None
    found = [key_of(entry, keys) for entry in desired]
    return keys if None not in found and len(set(found)) == len(found) else None


def key_of(entry: Any, keys: tuple[str, ...]) -> tuple[str | int, ...] | None:
    """By what an entry of a list is told from the others; None where it does not say."""
    if not isinstance(entry, dict):
        return None
    found = [entry.get(name, KEY_DEFAULTS.get(name)) for name in keys]
    key = tuple([value for value in found if isinstance(value, str | int)])
    return key if len(key) == len(keys) else None


def key_shown(key: tuple[Any, ...]) -> str:
    """A step of a path."""
    return "[" + ",".join(str(value) for value in key if value not in KEY_DEFAULTS.values()) + "]"


def entry_of(found: Any, key: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry with this key in what should be a list."""
    if not isinstance(found, list):
        return None
    return next((entry for entry in found if isinstance(entry, dict) and has_key(entry, key)), None)


def has_key(entry: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Whether an entry of a list has this key."""
    return all(entry.get(name, KEY_DEFAULTS.get(name)) == value for name, value in key.items())
