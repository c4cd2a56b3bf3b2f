"""The ``kvloop`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvloop.commands import crd, demo, explain, render, top, up, validate

COMMANDS = (
    render,
    validate,
    up,
    demo,
    explain,
    top,
    crd,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; its exit status is the answer."""
    parser = argparse.ArgumentParser(
        prog="kvloop", description="Prefill/decode-disaggregated vLLM serving, with the KV cache travelling both ways."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


if __name__ == "__main__":
    sys.exit(main())
