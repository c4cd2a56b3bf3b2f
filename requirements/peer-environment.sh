#!/bin/sh
# Builds the environment of a router that kvloop is measured beside, and prints its path.
#
#   requirements/peer-environment.sh vllm-router
#
# Its pins are those in the file of that name here. It lies outside the tree, in ${KVLOOP_CACHE:-$HOME/.cache/kvloop},
# under a name that holds their hash. Progress goes to standard error.
#
# UV names the uv to use; without it, uv on PATH.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
peer=$1
pins=$here/$peer.txt
uv=${UV:-uv}
cache=${KVLOOP_CACHE:-$HOME/.cache/kvloop}
environment=$cache/$peer-$(cat "$pins" "$0" | sha256sum | cut -c1-12)
complete=$environment/.complete

# Also checks that the interpreter it was made from is still there.
is_complete() { [ -e "$complete" ] && "$environment/bin/python" -c '' 2>/dev/null; }

if ! is_complete; then
    printf '%s: building %s\n' "$peer" "$environment" >&2
    mkdir -p "$cache"
    "$uv" venv --quiet --clear --no-python-downloads --python '>=3.11' "$environment" >&2
    "$uv" pip install --quiet --no-deps --require-hashes --compile-bytecode --python "$environment/bin/python" \
        -r "$pins" >&2
    : >"$complete"
fi
printf '%s\n' "$environment"
