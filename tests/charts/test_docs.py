"""What the documents tell people to type is there, and the charts take it."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from tests.charts.helm import CHART, Helm, read_values
from tests.charts.rights import RIGHTS
from tests.cluster.paths import REPOSITORY

_DOCUMENTS: Final = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_LINK: Final = re.compile(r"\]\(([^)#]+?)(#[^)]*)?\)")
_PATH: Final = re.compile(r"(?:charts|crds|docs|examples|requirements|tests)/[\w./-]*")
_CONSOLE: Final = re.compile(r"```console\n(.*?)```", flags=re.DOTALL)


def _commands(document: Path) -> list[str]:
    """The commands in a document's console blocks, each on one line."""
    blocks = _CONSOLE.findall(document.read_text(encoding="utf-8"))
    joined = "\n".join(re.sub(r"\s*\\\n\s*", " ", block) for block in blocks)
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


_RELEASES: Final = sorted(
    {
        command
        for document in _DOCUMENTS
        for command in _commands(document)
        if command.startswith(("helm install", "helm upgrade"))
    }
)


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_to_files(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    local = [path for path, _ in _LINK.findall(text) if path and "://" not in path]
    assert [path for path in local if not (document.parent / path).exists()] == []


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda document: document.name)
def test_commands_name_files_that_are_there(document: Path) -> None:
    named = {path for command in _commands(document) for path in _PATH.findall(command)}
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []


def test_documents_show_how_to_install() -> None:
    assert len(_RELEASES) >= 3


@pytest.mark.parametrize("command", _RELEASES)
def test_a_release_that_a_document_shows_can_be_rendered(helm: Helm, command: str) -> None:
    words = shlex.split(command, comments=True)
    flags = [f"--set={after}" for flag, after in itertools.pairwise(words) if flag == "--set"]
    assert helm.render(REPOSITORY / words[3], *flags, release=words[2])


def test_values_that_the_installation_guide_explains_are_values_of_the_chart() -> None:
    guide = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    rows = guide.split("| value | meaning |")[1].split("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(named) > 5
    for name in named:
        value = read_values(CHART)
        for step in name.split("."):
            assert step in value, name
            value = value[step]


def test_the_rights_that_the_installation_guide_tells_are_those_that_the_operator_has() -> None:
    guide = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    rows = guide.split("| objects | verbs | why |")[1].split("\n\n")[0].splitlines()[2:]
    told = {
        resource: tuple(row.split("|")[2].strip().split(", "))
        for row in rows
        for resource in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    assert told == {resource: verbs for (_, resource), verbs in RIGHTS.items()}
