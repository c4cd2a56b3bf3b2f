"""The engines file: which engines a router of this node may use. The decision is pure; ``write`` replaces the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROLE_LABEL = "kvloop.io/role"
REVISION_LABEL = "kvloop.io/kv-revision"
ENGINE_ROLES = ("prefill", "decode")
DEFAULT_HTTP_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePod:
    """A pod as discovery sees it. ``restarts`` counts the starts of its containers beyond the first."""

    name: str
    uid: str
    address: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    restarts: int
    ready: bool


def engine_entries(pods: Iterable[EnginePod]) -> list[dict[str, str]]:
    """The ready engines among ``pods``, by name.

    A restarted container is another engine process, which has nothing of what the old one held: its ``podUID`` differs.
    """
    entries = []
    for pod in sorted(pods, key=lambda pod: pod.name):
        role = pod.labels.get(ROLE_LABEL)
        if role not in ENGINE_ROLES or not pod.ready:
            continue
        entries.append(
            {
                "name": pod.name,
                "role": role,
                "url": f"http://{pod.address}:{pod.ports.get('http', DEFAULT_HTTP_PORT)}",
                "podUID": f"{pod.uid}-restart-{pod.restarts}" if pod.restarts else pod.uid,
                "kvRevision": pod.labels.get(REVISION_LABEL, ""),
                "zone": "",
            }
        )
    return entries


def write(path: Path, entries: list[dict[str, str]]) -> None:
    """Replace the file at once: a reader sees the old list or the new one, never a part."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(json.dumps(entries, indent=2) + "\n")
    draft.replace(path)
