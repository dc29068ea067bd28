#!/usr/bin/env bash
# Write the hashes in requirements/*.lock again, after a version there was changed: those of all files
# that the package index has of it, whatever machine they are for.
#
#   scripts/lock.sh [NAME ...]     cpu, router, test, installer; without names all of them
#
# uv's own settings (UV_DEFAULT_INDEX) name another index. pip's are not read: a copy of a package on
# this machine need not be the file that others get.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- cpu installer router test
for name in "$@"; do
    lock=requirements/$name.lock
    sed '/^[^#]/,$d' "$lock" >"$lock.new"
    .venv/bin/uv pip compile --quiet --no-config --no-deps --generate-hashes --no-annotate --no-header \
        "$lock" >>"$lock.new"
    mv "$lock.new" "$lock"
done
