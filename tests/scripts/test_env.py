"""How scripts/env.sh installs: with uv and pip's settings, or with pip. Both are pretended here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ENV = Path(__file__).parents[2] / "scripts" / "env.sh"
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
    *uv==*) echo "pip: uv" >>"$NOTED"; [ -z "$NO_UV" ] && cp "$STUB" "$(dirname "$0")/uv" ;;
    *) echo "pip: $*" >>"$NOTED"; [ -z "$PIP_FAILS" ] ;;
esac
"""
UV = """#!/bin/bash
env | grep -E '^(UV_|SSL_)' | sort >>"$NOTED"
echo "uv: $*" >>"$NOTED"
[ -z "$UV_FAILS" ]
"""


def install(folder: Path, **switches: str) -> tuple[int, list[str], str]:
    """What is called for one package: exit status, the calls, and what is said."""
    for path, text in ((folder / "bin" / "python", PYTHON), (folder / "uv", UV)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    noted = folder / "noted"
    done = subprocess.run(
        ["bash", "-euc", f"source {ENV}; VENV={folder}; install_packages --no-deps one; echo done"],
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
    assert noted[-1] == "pip: -m pip install --quiet --disable-pip-version-check --no-deps one"


def test_what_neither_can_install_is_said(tmp_path: Path) -> None:
    status, _, said = install(tmp_path, UV_FAILS="1", PIP_FAILS="1")
    assert (status, said) == (1, "error: pip could not install: --no-deps one\n")
