"""What a worker of a router is told when it is started: its configuration, and its place among the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from kvloop_router.config import Config
from kvloop_router.findings import Findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A worker's place.

    number: from 0 on. socket: where it answers its parent, a path. pod_socket: where the parent answers for all.
    holds_off: whether others serve already, so that it takes connections only once it can play their turns.
    plays, heard: see Exchange. token: that of the admin API, which its parent asks with: the file may have changed.
    """

    number: int
    socket: str
    pod_socket: str
    holds_off: bool
    plays: bool
    heard: Findings
    token: str = field(repr=False)


def encode(config: Config, place: Place) -> bytes:
    """Both as one line."""
    told: dict[str, Any] = {
        "number": place.number,
        "socket": place.socket,
        "podSocket": place.pod_socket,
        "holdsOff": place.holds_off,
        "plays": place.plays,
        "heard": place.heard.told(),
        "token": place.token,
        "config": config.model_dump(mode="json", by_alias=True),
    }
    return orjson.dumps(told) + b"\n"


def decode(line: bytes) -> tuple[Config, Place]:
    """What ``encode`` was given."""
    told = orjson.loads(line)
    place = Place(
        number=told["number"],
        socket=told["socket"],
        pod_socket=told["podSocket"],
        holds_off=told["holdsOff"],
        plays=told["plays"],
        heard=Findings.heard(told["heard"]),
        token=told["token"],
    )
    return Config.model_validate_json(orjson.dumps(told["config"])), place
