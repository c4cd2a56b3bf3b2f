from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "connector": "kvloop_connector",
    "router": "kvloop_router",
    "operator": "kvloop_operator",
    "sim": "kvloop_sim",
    "cli": "kvloop",
}

# Put together here, so that this file does not name what it looks for.
REGISTRIES = (
    *("pypi" + ".org", "python" + "hosted.org"),
    *("proxy." + "golang.org", "sum." + "golang.org", "registry." + "npmjs.org"),
)
MACHINE_PATHS = ("/" + "work/", "/" + "tmp/plan", "/" + "tmp/boot")


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # Whoever the checkout belongs to, nothing of it is run.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.mark.parametrize("folder", PACKAGES)
def test_top_level_folders_are_not_packages(folder: str) -> None:
    stray = [path.name for path in (ROOT / folder).glob("*.py*")]

    assert stray == []


@pytest.mark.parametrize(("folder", "package"), PACKAGES.items())
def test_each_folder_holds_one_typed_package(folder: str, package: str) -> None:
    packages = [path.parent.name for path in (ROOT / folder).glob("*/__init__.py")]

    assert packages == [package]
    assert (ROOT / folder / package / "py.typed").is_file()


def test_every_folder_of_tests_is_a_package() -> None:
    """A tests/operator that is one while a folder above it is not becomes the standard library's operator."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    above = {
        parent for folder in folders for parent in (folder, *folder.parents) if parent.is_relative_to(ROOT / "tests")
    }

    assert [str(folder) for folder in sorted(above) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("module", ["asyncio", "json.tool", "venv", "collections"])
def test_a_fresh_interpreter_at_the_root_finds_the_standard_library(module: str) -> None:
    code = f"import operator, {module}; assert operator.add(1, 1) == 2"

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_base_install_has_no_dependencies() -> None:
    assert [name for name in metadata.requires("kvloop") or [] if "extra ==" not in name] == []


def test_the_connectors_base_imports_nothing_outside_the_standard_library() -> None:
    """It is mounted into the engine's image, next to packages of versions that are not known here."""
    code = (
        "import sys, pkgutil, importlib, kvloop_connector as package\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    if not module.ispkg: importlib.import_module(f'kvloop_connector.{module.name}')\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots - set(sys.stdlib_module_names) - {'kvloop_connector', '__main__'}))"
    )
    bare = [sys.executable, "-S", "-c", code]

    shown = subprocess.run(bare, cwd=ROOT / "connector", check=True, capture_output=True, text=True).stdout

    assert shown.split() == []


def test_no_file_names_a_package_registry_or_a_path_of_the_machine_it_was_written_on() -> None:
    forbidden = re.compile("|".join(map(re.escape, (*REGISTRIES, *MACHINE_PATHS))).encode())
    files = tracked_files()

    named = {str(path.relative_to(ROOT)): found[0] for path in files if (found := forbidden.search(path.read_bytes()))}

    assert len(files) > 50
    assert named == {}
