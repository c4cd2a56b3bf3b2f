"""What a vLLM version can do. A table, with its sources; nothing here was asked of a running engine.

Read from the wheels of 0.21 to 0.33 (``nixl/metadata.py`` for the protocol, ``nixl/pull_scheduler.py`` for the
handle, ``entrypoints/openai/*/serving.py`` for the answers).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

VERSION_PATTERN = r"^v?[0-9]+[.][0-9]+([.][0-9]+)?([-+._a-z][0-9A-Za-z.+_-]*)?$"
TAG_VERSION_PATTERN = r"^[^@]*:v?[0-9]+[.][0-9]+([.][0-9]+)?([-+._a-z][0-9A-Za-z.+_-]*)?(@[^@]*)?$"
"""An image whose tag starts with a version; both patterns mean the same in RE2 and in Python."""

_LEADING = re.compile(r"v?([0-9]+)\.([0-9]+)(?:\.([0-9]+))?")


@total_ordering
@dataclass(frozen=True, slots=True)
class EngineVersion:
    """vLLM's version, without what comes after the third number."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    def __lt__(self, other: EngineVersion) -> bool:
        return (self.major, self.minor, self.patch) < (other.major, other.minor, other.patch)


OLDEST = EngineVersion(0, 26)
"""Bidirectional transfer exists from 0.21 on, but before 0.26 a handle carries no deadline that prefill checks, so that
a read after the TTL returns another request's KV with status 200 (vllm PR #47021)."""

NEWEST_KNOWN = EngineVersion(0, 33)
"""The newest version whose source was read. Later ones are taken to be able to do the same."""

KVLOOP_CONNECTOR = (EngineVersion(0, 32), EngineVersion(0, 33))
"""The versions on which KvloopConnector starts; on any other it refuses to."""

_RUN_HERE = (EngineVersion(0, 32), EngineVersion(0, 33))
_MULTI_GROUP = EngineVersion(0, 31)
_PROMPT_TOKEN_IDS = EngineVersion(0, 32)
_STREAM_HANDLES = EngineVersion(0, 33)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What the engines of a deployment can do.

    bidirectional: whether KV may safely be read back from decode.
    multi_group_reuse: a failed read of a model with several KV groups ends in an error (vllm#52232, #52234); before,
        it returned garbage with status 200, so that such handles are never used.
    prompt_token_ids: ``kv_transfer_params.prompt_token_ids`` is taken, so that both legs use the very same tokens.
    stream_handles: streamed chat and completion answers carry the handle on the chunk with ``finish_reason``.
    kvloop_connector: whether KvloopConnector, and the plug-in for streams that comes with it, start on it.
    run_here: whether this minor version was ever run in kvloop's tests, on a CPU. Of 0.33 it was the Python code, on
        0.32's compiled parts.
    """

    version: EngineVersion
    bidirectional: bool
    multi_group_reuse: bool
    prompt_token_ids: bool
    stream_handles: bool
    kvloop_connector: bool
    run_here: bool


def version_of(text: str) -> EngineVersion | None:
    """The version that ``text`` starts with, or None."""
    found = _LEADING.match(text) if re.fullmatch(VERSION_PATTERN, text) else None
    if found is None:
        return None
    return EngineVersion(int(found[1]), int(found[2]), int(found[3] or 0))


def version_of_tag(image: str) -> EngineVersion | None:
    """The version in an image's tag, or None where the tag does not start with one."""
    if not re.fullmatch(TAG_VERSION_PATTERN, image):
        return None
    return version_of(image.split("@")[0].rsplit(":", 1)[1])


def capabilities(version: EngineVersion) -> EngineCapabilities:
    """What ``version`` can do."""
    return EngineCapabilities(
        version=version,
        bidirectional=version >= OLDEST,
        multi_group_reuse=version >= _MULTI_GROUP,
        prompt_token_ids=version >= _PROMPT_TOKEN_IDS,
        stream_handles=version >= _STREAM_HANDLES,
        kvloop_connector=version in KVLOOP_CONNECTOR,
        run_here=any((version.major, version.minor) == (known.major, known.minor) for known in _RUN_HERE),
    )
