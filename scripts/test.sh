#!/usr/bin/env bash
# Lint, types and all tests but the slow ones, in .venv, which is made first where it is missing.
# Two processes; a file's tests stay in one, and those of all files that ask servers, for they share
# one. Files are taken in the order of tests/conftest.py (by itself xdist begins with those of many
# short tests). The slowest are listed at the end. mypy, which has one thread, runs beside them and is
# told of last. Arguments go to pytest: scripts/test.sh tests/core -k reuse
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
ensure_environment test
bin="$VENV/bin"
export OMP_WAIT_POLICY=PASSIVE # servers and their tests share the cores
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same files
"$bin/ruff" check .
"$bin/ruff" format --check .
types=$(mktemp)
"$bin/mypy" >"$types" 2>&1 &
status=0
"$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
    -m "not slow" --durations=25 --durations-min=5 "$@" || status=$?
wait $! || status=$?
cat "$types"
rm "$types"
exit $status
