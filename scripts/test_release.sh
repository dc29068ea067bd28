#!/usr/bin/env bash
# Tests against another release of SGLang that this package extends, in .venv-VERSION: it has that
# release, and all else from .venv. Arguments after the version go to pytest.
#
#   scripts/test_release.sh 0.5.22 tests/cache
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
[ $# -ge 1 ] || die "usage: $0 VERSION [arguments of pytest]"
release=$1
shift
ensure_environment test
other="$ROOT/.venv-$release"
where='import sysconfig; print(sysconfig.get_path("purelib"))'
if [ ! -f "$other/.complete" ]; then
    "$VENV/bin/python" -m venv --clear --without-pip "$other"
    own=$("$other/bin/python" -c "$where")
    install_packages --no-deps --target "$own" "sglang==$release"
    "$VENV/bin/python" -c "$where" >"$own/rest.pth" # after its own packages
    touch "$other/.complete"
fi
export OMP_WAIT_POLICY=PASSIVE # servers and their tests share the cores
PYTHONPATH="$ROOT" exec "$other/bin/python" -m pytest "$@"
