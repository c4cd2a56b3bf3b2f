"""Runs in the engine's environment: which plug-ins vLLM's own loader loads with and without leases. No engine.

Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm.plugins import (
    DEFAULT_PLUGINS_GROUP,
    ENDPOINT_PLUGINS_GROUP,
    IO_PROCESSOR_PLUGINS_GROUP,
    PLATFORM_PLUGINS_GROUP,
    STAT_LOGGER_PLUGINS_GROUP,
    load_endpoint_plugins,
    load_general_plugins,
    load_plugins_by_group,
)

GROUPS = (DEFAULT_PLUGINS_GROUP, IO_PROCESSOR_PLUGINS_GROUP, PLATFORM_PLUGINS_GROUP, STAT_LOGGER_PLUGINS_GROUP)


def install_others(directory: Path) -> None:
    """A package with a plug-in of each group, as a platform or an operations team would bring one."""
    metadata = directory / "others-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    # gc.enable takes nothing and gives None: a plug-in that has nothing to do.
    groups = [f"[{group}]\nother_{group.split('.')[1]} = gc:enable\n" for group in (*GROUPS, ENDPOINT_PLUGINS_GROUP)]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    sys.path.append(str(directory))


def loaded() -> dict[str, Any]:
    return {
        **{group: sorted(load_plugins_by_group(group)) for group in GROUPS},
        ENDPOINT_PLUGINS_GROUP: [plugin.name for plugin in load_endpoint_plugins(("generate",))],
    }


def main(key_file: str) -> None:
    install_others(Path(key_file).parent / "others")
    unset = loaded()
    os.environ["KVLOOP_LEASES"] = "1"
    # As an API server does before it reads its command line.
    load_general_plugins()
    print(json.dumps({"unset": unset, "leases": loaded()}))


main(sys.argv[1])
