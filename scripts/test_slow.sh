#!/usr/bin/env bash
# The tests marked slow: further architectures and state strategies on real servers, SGLang's own
# server kits, deep replays. Two processes; a file's tests stay in one. Arguments go to pytest.
# It ends with a table of what it showed (tests/evidence.py).
#
#   scripts/test_slow.sh --everything           also what tests/left_out.toml leaves out
#   scripts/test_slow.sh --evidence FILE        the table as a page
#   scripts/test_slow.sh --record FILE          notes each result in FILE, best outside of the
#                                               repository, and goes on where that ends
#   scripts/test_slow.sh --hypothesis-seed N    the random cases of an earlier run
#   scripts/test_slow.sh clients     clients of other projects alone, in .venv-clients, which this
#                                    makes (2.6 GB, and 1.3 GB with npm); without it their tests
#                                    are skipped
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/env.sh
ensure_environment test
if [ "${1:-}" = clients ]; then
    shift
    set -- tests/clients "$@"
    clients="$ROOT/.venv-clients"
    pins="$ROOT/requirements/clients.txt"
    if ! cmp -s "$pins" "$clients/.complete"; then
        "$VENV/bin/python" -m venv --clear "$clients"
        (VENV=$clients && install_packages --no-deps -r "$pins")
        cp "$pins" "$clients/.complete"
    fi
    pins="$ROOT/requirements/agents.txt"
    if ! cmp -s "$pins" "$clients/npm/.complete"; then
        if command -v npm > /dev/null; then
            rm -rf "$clients/npm"
            mkdir "$clients/npm"
            grep -v '^#' "$pins" |
                xargs npm install --prefix "$clients/npm" --no-audit --no-fund
            cp "$pins" "$clients/npm/.complete"
        else
            echo "npm is not there: the tests of its clients are skipped." >&2
        fi
    fi
fi
export OMP_WAIT_POLICY=PASSIVE # servers and their tests share the cores
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same files
exec "$VENV/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
    --max-worker-restart=0 -m slow -p tests.evidence --hypothesis-seed "$(date +%s)" "$@"
