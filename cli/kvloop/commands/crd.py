"""``kvloop crd``: the CustomResourceDefinition."""

from __future__ import annotations

import argparse
import sys

from kvloop_operator.api.crd import crd_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "crd",
        help="print the CustomResourceDefinition",
        description="Print the CustomResourceDefinition of DisaggregatedInference, as `kubectl apply -f -` takes it.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    sys.stdout.write(crd_text())
    return 0
