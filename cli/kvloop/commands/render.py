"""``kvloop render``: the manifests of resources, without a cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from kvloop.resources import load
from kvloop_operator.desired import desired
from kvloop_operator.facts import OperatorSettings
from kvloop_operator.manifests.common import Manifest


class _Dumper(yaml.SafeDumper):
    """Without anchors, since every manifest stands by itself, and with files in ConfigMaps line by line."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "render",
        help="print the manifests of resources",
        description="Print, as one YAML stream in the order of application, what the operator makes of the "
        "resources in the files. Where `kvloop validate` finds faults, they are printed instead, and nothing else.",
    )
    parser.add_argument("-f", "--file", dest="files", action="extend", nargs="+", type=Path, required=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    loaded = [document for file in arguments.files for document in load(file, OperatorSettings())]
    lines = [line for document in loaded for line in document.lines()]
    if lines:
        for line in lines:
            sys.stderr.write(f"{line}\n")
        return 1
    for document in loaded:
        if document.resource is not None and document.facts is not None:
            sys.stdout.write(stream(desired(document.resource, document.facts)))
    return 0


def stream(manifests: list[Manifest]) -> str:
    """The manifests as a YAML stream, each document after its own marker."""
    return "".join(
        "---\n" + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
        for manifest in manifests
    )
