#!/usr/bin/env bash
# Lint, types and all tests but the slow ones, in .venv, which is made first where it is missing.
# Two processes; a file's tests stay in one, for they share servers, and files are taken in the order
# of tests/conftest.py (by itself xdist begins with those of many short tests). Arguments go to pytest:
# scripts/test.sh tests/core -k reuse
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
ensure_environment test
bin="$VENV/bin"
export OMP_WAIT_POLICY=PASSIVE # servers and their tests share the cores
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
    -m "not slow" "$@"
