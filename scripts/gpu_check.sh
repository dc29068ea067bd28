#!/usr/bin/env bash
# Checks on a machine with an NVIDIA GPU what the tests can only show without one; docs/gpu.md.
#
#   scripts/gpu_check.sh                 everything, in at most nine minutes; a table at the end
#   scripts/gpu_check.sh --only kernels  one of its steps
#   scripts/gpu_check.sh --paired        SGLang's own cache and ours by turns, as long
#   scripts/gpu_check.sh --rehearse      the same steps on the CPU, to try the script itself
#
# Exit status: 0 all is well, 1 something is wrong, 2 nothing was checked. Needs torch with CUDA and
# Triton; with SGLang's CUDA packages it starts servers, too. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
exec "$python" -m scripts.gpu_check "$@"
