# Makes .venv with everything installed; sourced by quickstart.sh and test.sh.
#
#   ensure_environment [test]     with the tools for lint, types and tests if `test` is given
#
# PYTHON            the interpreter to make .venv with (default python3)
# TORCH_INDEX_URL   a package index that has torch's CPU build; without it `pip install torch` as is,
#                   which on many networks is the CUDA build: larger, but it serves on a CPU as well
# TORCH_SHA256      the hash of torch's file. Each index has a build of its own, so requirements/
#                   has none; without this variable torch alone is not compared with a hash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
TORCH=torch==2.13.0
LOCKS="$ROOT/requirements"
LOCKED=(--no-deps --require-hashes -r) # with which uv and pip take the files of a lock, and no others

die() {
    echo "error: $*" >&2
    exit 1
}

has_nvidia_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU
}

# A hash of all that decides what is installed.
environment_key() {
    cat "$LOCKS"/*.lock "$ROOT/pyproject.toml" "$ROOT/scripts/env.sh" |
        sha256sum | cut -d' ' -f1
}

pip_install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts "$@"
}

# Sets what uv is called with, from pip's files and PIP_... variables: uv has names of its own for
# pip's settings, and would take the first index that has a package, where pip takes the newest.
read_pip_settings() {
    local from listed pips uvs value
    listed=$("$VENV/bin/python" -m pip config list 2>/dev/null)
    uv_settings=(UV_INDEX_STRATEGY=unsafe-best-match)
    while read -r pips uvs; do
        for from in :env: install global; do
            value=$(sed -n "s/^$from\.$pips='\(.*\)'\$/\1/p" <<<"$listed")
            [ -z "$value" ] || break
        done
        [ -z "$value" ] || uv_settings+=("$uvs=${value//\\n/ }")
    done <<'SETTINGS'
index-url UV_DEFAULT_INDEX
extra-index-url UV_EXTRA_INDEX_URL
find-links UV_FIND_LINKS
trusted-host UV_INSECURE_HOST
cert SSL_CERT_FILE
SETTINGS
}

uv_install() {
    [ -x "$VENV/bin/uv" ] || pip_install "${LOCKED[@]}" "$LOCKS/installer.lock" 2>/dev/null || return
    [ -n "${uv_settings+set}" ] || read_pip_settings
    env "${uv_settings[@]}" "$VENV/bin/uv" pip install --quiet --python "$VENV" "$@" 2>/dev/null
}

# With uv, which needs a tenth of pip's time; with pip where there is no uv, or where uv does not
# get what pip would.
install_packages() {
    uv_install "$@" || pip_install "$@" || die "pip could not install: $*"
}

install_cpu() {
    install_packages "${LOCKED[@]}" "$LOCKS/cpu.lock"
    install_torch
    install_packages --no-deps --no-build-isolation -e "$ROOT"
}

# What torch needs is there, with the hashes of the lock; only of a CUDA build it brings more.
install_torch() {
    local from=(${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"})
    if [ -n "${TORCH_SHA256:-}" ]; then
        echo "$TORCH --hash=sha256:$TORCH_SHA256" >"$VENV/torch.txt"
        install_packages "${LOCKED[@]}" "$VENV/torch.txt" "${from[@]}"
    fi
    write_pins
    install_packages "$TORCH" -c "$VENV/pins.txt" "${from[@]}"
}

# The versions of the lock without their hashes, as constraints.
write_pins() {
    sed -n 's/^\([^# ]*==[^ ]*\).*/\1/p' "$LOCKS/cpu.lock" >"$VENV/pins.txt"
}

# What SGLang's metadata leaves open has the versions that the tests run with.
install_gpu() {
    write_pins
    pip_install -e "$ROOT[gpu,lab]" -c "$VENV/pins.txt" || die "pip could not install $ROOT[gpu,lab]"
}

# The browser that opens the page of the cache in tests. Only root on Debian gets it here; where
# there is none these tests are skipped, and say so.
install_browser() {
    if command -v chromium-headless-shell chromium google-chrome >/dev/null ||
        [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        return
    fi
    { apt-get update && apt-get install -y --no-install-recommends chromium-headless-shell; } \
        >/dev/null 2>&1 || echo "no browser could be installed: tests of the page are skipped" >&2
}

ensure_environment() {
    local wanted=${1:-serve} python=${PYTHON:-python3} key stamp
    stamp="$VENV/.sglang-hybrid-$wanted"
    key=$(environment_key)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
        return
    fi
    command -v "$python" >/dev/null || die "no $python on PATH; set PYTHON to Python 3.11 or newer"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$python" --version) is too old; set PYTHON to Python 3.11 or newer"
    echo "Installing into .venv (a minute or more the first time) ..."
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV" || die "cannot make .venv"
    if has_nvidia_gpu; then install_gpu; else install_cpu; fi
    if [ "$wanted" = test ]; then
        # First xds-protos: it has an old copy of a module of opentelemetry-proto, which comes then.
        install_packages "${LOCKED[@]}" "$LOCKS/router.lock"
        install_packages "${LOCKED[@]}" "$LOCKS/test.lock"
        install_browser
    fi
    "$VENV/bin/python" -c 'import torch' || die "torch does not import in .venv"
    echo "$key" >"$stamp"
}
