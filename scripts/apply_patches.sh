#!/usr/bin/env bash
# Apply patches/ to a source checkout of SGLang, for people who maintain a fork.
#
#   scripts/apply_patches.sh DIR
#
# DIR holds the package: DIR/sglang/srt (in SGLang's repository that is python/).
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIR (DIR holds sglang/srt)" >&2; exit 2; }
release=0.5.23
patches=$(cd "$(dirname "$0")/../patches/sglang-$release" && pwd)
cd "$1"
[ -d sglang/srt ] || { echo "error: $1 has no sglang/srt in it" >&2; exit 1; }
for patch in "$patches"/*.patch; do
    name=$(basename "$patch")
    git apply --check -p1 "$patch" ||
        { echo "error: $name does not apply; is this sglang $release?" >&2; exit 1; }
    git apply -p1 "$patch"
    echo "applied $name"
done
