#!/usr/bin/env bash
# From a fresh clone to a hybrid model that answers, in one command.
#
#   scripts/quickstart.sh            install, start the server, send requests, keep serving
#   scripts/quickstart.sh --check    the same, then stop the server; exits 0, or 1 with the reason
#
# Other arguments go to the server: scripts/quickstart.sh --port 30001 --model-path DIR
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
ensure_environment
exec "$VENV/bin/python" scripts/quickstart.py "$@"
