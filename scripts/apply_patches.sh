#!/usr/bin/env bash
# Apply patches/ to a source checkout of SGLang, for people who maintain a fork.
#
#   scripts/apply_patches.sh DIR [RELEASE]
#
# DIR holds the package: DIR/sglang/srt (in SGLang's repository that is python/). RELEASE is 0.5.23 by
# default; another one gets the patches that only it needs, too.
set -euo pipefail
[ $# -eq 1 ] || [ $# -eq 2 ] || { echo "usage: $0 DIR [RELEASE] (DIR holds sglang/srt)" >&2; exit 2; }
release=${2:-0.5.23}
patches=$(cd "$(dirname "$0")/../patches" && pwd)
[ -d "$patches/sglang-$release" ] || { echo "error: there are no patches for $release" >&2; exit 1; }
cd "$1"
[ -d sglang/srt ] || { echo "error: $1 has no sglang/srt in it" >&2; exit 1; }
folders=("$patches/sglang-0.5.23")
[ "$release" = 0.5.23 ] || folders+=("$patches/sglang-$release")
for name in $(cd "$patches" && find "${folders[@]}" -name '*.patch' -printf '%f\n' | sort); do
    patch=$(find "${folders[@]}" -name "$name")
    git apply --check -p1 "$patch" ||
        { echo "error: $name does not apply; is this sglang $release?" >&2; exit 1; }
    git apply -p1 "$patch"
    echo "applied $name"
done
