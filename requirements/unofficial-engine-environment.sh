#!/bin/sh
# Builds a second engine environment, of a vLLM that has no CPU build, and prints its path.
#
#   KVLOOP_ENGINE_ENVIRONMENT=$(requirements/unofficial-engine-environment.sh)
#
# Unofficial: the Python code of the version in unofficial-engine.txt, on the compiled parts and the dependencies of the
# environment that engine-environment.sh builds. Nobody releases that combination; the version that it tells says so.
#
# It lies beside the other environment, and is worth nothing without it: 130 MB are its own, 6 GB are shared. Progress
# goes to standard error.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
pins=$here/unofficial-engine.txt
uv=${UV:-uv}
base=$("$here/engine-environment.sh")
environment=$(dirname "$base")/engine-unofficial-$({ cat "$pins" "$0"; echo "$base"; } | sha256sum | cut -c1-12)
complete=$environment/.complete

say() { printf 'unofficial engine environment: %s\n' "$*" >&2; }

# Also checks that the interpreter it was made from is still there.
is_complete() { [ -e "$complete" ] && "$environment/bin/python" -c '' 2>/dev/null; }

build() {
    say "building $environment (about 340 MB to fetch)"
    "$uv" venv --quiet --clear --no-python-downloads --python "$base/bin/python" "$environment" >&2
    # In uv's own cache the wheel would be 0.8 GB of GPU code for ever; this one is on the same file system, too.
    "$uv" pip install --no-deps --require-hashes --only-binary :all: --compile-bytecode \
        --cache-dir "$environment/uv-cache" --python "$environment/bin/python" -r "$pins" >&2
    rm -rf "$environment/uv-cache"

    "$environment/bin/python" - "$base" <<'PYTHON'
import importlib.metadata, pathlib, sys, sysconfig


def rewrite(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1, f"{file} does not hold {old!r} once"
    file.write_text(text.replace(old, new))


others = pathlib.Path(sysconfig.get_path("purelib", vars={"base": sys.argv[1]}))
built = importlib.metadata.distribution("vllm")
code = pathlib.Path(str(built.locate_file("vllm")))
for file in [file for file in code.rglob("*") if file.suffix in (".so", ".h", ".hpp") or file.name == "vllm-rs"]:
    file.unlink()
for file in (others / "vllm").rglob("*.so"):
    (code / file.relative_to(others / "vllm")).symlink_to(file)

# By "cpu" in the version of its distribution vLLM takes the CPU platform; the engine itself tells the other one, in its
# log and over HTTP.
released = built.version
unofficial = f"{released}+cpu.unofficial"
metadata = code.with_name(f"vllm-{released}.dist-info") / "METADATA"
rewrite(metadata, f"\nVersion: {released}\n", f"\nVersion: {unofficial}\n")
rewrite(code / "_version.py", f"\n__version__ = version = '{released}'\n", f"\n__version__ = version = '{unofficial}'\n")
# Searched after this environment's own folder.
code.with_name("all-else.pth").write_text(f"{others}\n")
PYTHON
    : >"$complete"
    say "built $environment"
}

if ! is_complete; then
    # One builder at a time; who waited finds it built.
    exec 9>"$environment.lock"
    flock 9
    if ! is_complete; then build; fi
    exec 9>&-
fi
printf '%s\n' "$environment"
