"""Installs of scripts/env.sh: with uv and pip's settings, or with pip. Both are pretended here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = ROOT / "scripts" / "env.sh"
SETTINGS = r"""
:env:.find-links='/wheels'
global.cert='/ca.crt'
global.extra-index-url='file:///first\nfile:///second'
global.find-links='/others'
global.timeout='60'
install.index-url='https://index.test/simple'
"""
PYTHON = f"""#!/bin/bash
case "$*" in
    *"config list") cat <<'LISTED'
{SETTINGS}
LISTED
    ;;
    *installer.lock)
        echo "pip: uv" >>"$NOTED"
        [ -z "$NO_UV" ] && cp "$STUB" "$(dirname "$0")/uv"
    ;;
    *) echo "pip: $*" >>"$NOTED"; [ -z "$PIP_FAILS" ] ;;
esac
"""
UV = """#!/bin/bash
env | grep -E '^(UV_|SSL_)' | sort >>"$NOTED"
echo "uv: $*" >>"$NOTED"
[ -z "$UV_FAILS" ]
"""


ONE = "install_packages --no-deps one"


def install(folder: Path, command: str = ONE, **switches: str) -> tuple[int, list[str], str]:
    """The calls for one package: exit status, the calls, and what is said."""
    for path, text in ((folder / "bin" / "python", PYTHON), (folder / "uv", UV)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    noted = folder / "noted"
    done = subprocess.run(
        ["bash", "-euc", f"source {ENV}; VENV={folder}; {command}; echo done"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "NOTED": str(noted), "STUB": str(folder / "uv")}
        | dict.fromkeys(("NO_UV", "UV_FAILS", "PIP_FAILS"), "")
        | switches,
    )
    return done.returncode, noted.read_text().splitlines(), done.stdout + done.stderr


def test_uv_is_called_with_the_settings_of_pip(tmp_path: Path) -> None:
    status, noted, said = install(tmp_path)
    assert (status, said) == (0, "done\n")
    assert noted == [
        "pip: uv",
        "SSL_CERT_FILE=/ca.crt",
        "UV_DEFAULT_INDEX=https://index.test/simple",
        "UV_EXTRA_INDEX_URL=file:///first file:///second",
        "UV_FAILS=",
        "UV_FIND_LINKS=/wheels",
        "UV_INDEX_STRATEGY=unsafe-best-match",
        f"uv: pip install --quiet --python {tmp_path} --no-deps one",
    ]


@pytest.mark.parametrize("why", ["NO_UV", "UV_FAILS"])
def test_pip_installs_where_uv_does_not(why: str, tmp_path: Path) -> None:
    status, noted, said = install(tmp_path, **{why: "1"})
    assert (status, said) == (0, "done\n")
    quiet = "--quiet --disable-pip-version-check --no-warn-conflicts"
    assert noted[-1] == f"pip: -m pip install {quiet} --no-deps one"


def test_what_neither_can_install_is_said(tmp_path: Path) -> None:
    status, _, said = install(tmp_path, UV_FAILS="1", PIP_FAILS="1")
    assert (status, said) == (1, "error: pip could not install: --no-deps one\n")


def test_files_have_the_hashes_of_the_locks(tmp_path: Path) -> None:
    """All but torch, which lies in another place on every network; its hash may be given."""
    status, noted, _ = install(tmp_path, "install_cpu", TORCH_SHA256="0" * 64)
    calls = [line.partition(f"{tmp_path} ")[2] for line in noted if line.startswith("uv: ")]
    locked = "--no-deps --require-hashes -r"
    assert status == 0 and calls == [
        f"{locked} {ROOT}/requirements/cpu.lock",
        f"{locked} {tmp_path}/torch.txt",
        f"torch==2.13.0 -c {tmp_path}/pins.txt",
        f"--no-deps --no-build-isolation -e {ROOT}",
    ]
    assert (tmp_path / "torch.txt").read_text() == f"torch==2.13.0 --hash=sha256:{'0' * 64}\n"
    pins = (tmp_path / "pins.txt").read_text().splitlines()
    assert "sglang==0.5.23" in pins and all(re.fullmatch(r"[^ =]+==[^ =]+", pin) for pin in pins)
    other = install(tmp_path, "install_cpu", TORCH_INDEX_URL="https://index.test/cpu")[1]
    assert f"{locked} {tmp_path}/torch.txt" not in " ".join(other[len(noted) :])
    assert any(line.endswith("pins.txt --index-url https://index.test/cpu") for line in other)


def test_a_gpus_packages_have_the_versions_of_the_lock(tmp_path: Path) -> None:
    """The lock's versions count if SGLang's metadata names none; hashes are for a CPU's files."""
    status, noted, _ = install(tmp_path, "install_gpu")
    assert status == 0 and noted[-1].endswith(f" -e {ROOT}[gpu,lab] -c {tmp_path}/pins.txt")
    pins = (tmp_path / "pins.txt").read_text().splitlines()
    assert "sglang==0.5.23" in pins and all(re.fullmatch(r"[^ =]+==[^ =]+", pin) for pin in pins)
