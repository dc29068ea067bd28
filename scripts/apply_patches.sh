#!/usr/bin/env bash
# Apply patches/ to a source checkout of SGLang, for people who maintain a fork.
#
#   scripts/apply_patches.sh DIR      DIR holds the package: DIR/sglang/srt (in SGLang's repository
#                                     that is python/)
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIR (the directory that holds sglang/srt)" >&2; exit 2; }
patches=$(cd "$(dirname "$0")/../patches/sglang-0.5.23" && pwd)
cd "$1"
[ -d sglang/srt ] || { echo "error: $1 has no sglang/srt in it" >&2; exit 1; }
for patch in "$patches"/*.patch; do
    git apply --check -p1 "$patch" ||
        { echo "error: $(basename "$patch") does not apply; is this sglang 0.5.23 or 0.5.22?" >&2; exit 1; }
    git apply -p1 "$patch"
    echo "applied $(basename "$patch")"
done
