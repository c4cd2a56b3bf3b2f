"""vLLM plug-in: has the paths for leases loaded, where the engine's start asks for them, and hides no other plug-in.

vLLM loads endpoint plug-ins only where ``VLLM_PLUGINS`` names them, and that variable then filters every group, the
platform's too (``plugins/__init__.py:39,122``). What is installed only the engine's own process knows. So it is set
there, to what is loaded without it and kvloop's own, by a plug-in of the group that is loaded before an API server has
read its command line (``engine/arg_utils.py:3202``); the processes that this one starts inherit it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, MutableMapping
from importlib.metadata import entry_points

from kvloop_connector.errors import UnsupportedEngine
from kvloop_connector.lease_requests import ALLOW_VARIABLE, PLUGIN

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvloop.leases")

_FILTER = "VLLM_PLUGINS"
_FAMILY = "vllm"
_ENDPOINTS = "vllm.endpoint_plugins"

_OFF_UNLESS_NAMED = frozenset({"lora_hf_hub_resolver"})
"""Loaded without the variable, but does something only where that names it: it lets requests name adapters to be
downloaded (``plugins/lora_resolvers/hf_hub_resolver.py:133``)."""


def register() -> None:
    """The entry point. May be called more than once in a process; without its variable, or where somebody has said what
    is to be loaded, it does nothing."""
    if os.environ.get(ALLOW_VARIABLE) == "1" and _FILTER not in os.environ:
        allow(
            os.environ, [(group, entry.name) for group in entry_points().groups for entry in entry_points(group=group)]
        )


def allow(environment: MutableMapping[str, str], installed: Iterable[tuple[str, str]]) -> None:
    """Set the variable in ``environment``; where it cannot be, leave it and say so: everything but leases then works.

    installed: groups and names of all entry points.
    """
    try:
        environment[_FILTER] = ",".join(allowed(installed))
    except UnsupportedEngine as error:
        logger.warning("Retained blocks can be neither released nor renewed: %s", error)
    else:
        logger.info("For the paths of leases to be loaded, plug-ins are named: %s", environment[_FILTER])


def allowed(installed: Iterable[tuple[str, str]]) -> list[str]:
    """The names, in order, with which vLLM loads what it loads without any, and the paths for leases; raises
    UnsupportedEngine where there are none."""
    found = [(group, name) for group, name in installed if group.startswith(_FAMILY)]
    endpoints = {name for group, name in found if group == _ENDPOINTS} - {PLUGIN}
    names = {name for group, name in found if group != _ENDPOINTS} - _OFF_UNLESS_NAMED
    if shared := sorted(endpoints & names):
        raise UnsupportedEngine(
            f"{shared[0]} is the name of an endpoint plug-in too, which nobody has allowed: set {_FILTER} to what may "
            "be loaded"
        )
    if unnameable := sorted(name for name in names if "," in name):
        raise UnsupportedEngine(f"{_FILTER} cannot name the plug-in {unnameable[0]!r}: set it without")
    return sorted(names | {PLUGIN})
