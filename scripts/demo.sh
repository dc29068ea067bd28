#!/usr/bin/env bash
# A server whose cache can be watched in a browser, beside one with SGLang's own cache, under mixed traffic.
#
#   scripts/demo.sh            install, start both, send requests for two minutes, compare, keep serving
#   scripts/demo.sh --check    the same, then stop the servers; exits 0, or 1 with the reason
#
# Other arguments: --seconds 60, --seed 1, --port 30001, --output FILE.json, --picture FILE.png
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
ensure_environment
exec "$VENV/bin/python" -m scripts.demo "$@"
