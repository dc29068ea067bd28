#!/usr/bin/env bash
# The tests marked slow: further architectures and state strategies on real servers, SGLang's own
# server kits, deep replays. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
ensure_environment test
export OMP_WAIT_POLICY=PASSIVE # servers and their tests share the cores
exec "$VENV/bin/python" -m pytest -m slow "$@"
