"""``kvloop validate``: everything that is wrong with resources, without a cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvloop.resources import load
from kvloop_operator.facts import OperatorSettings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "validate",
        help="say what is wrong with resources",
        description="Print one line for everything that is wrong with the resources in the files: "
        "`file: field: value: fault; remedy`. Exit status 0 if nothing is, 1 otherwise.",
    )
    parser.add_argument("-f", "--file", dest="files", action="extend", nargs="+", type=Path, required=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    loaded = [document for file in arguments.files for document in load(file, OperatorSettings())]
    lines = [line for document in loaded for line in document.lines()]
    for line in lines:
        sys.stdout.write(f"{line}\n")
    for document in loaded:
        for note in document.notes:
            sys.stderr.write(f"{document.file}: note: {note}\n")
    return 1 if lines else 0
