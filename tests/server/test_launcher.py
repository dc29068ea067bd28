"""Starting and stopping: what a user does wrong ends in one sentence; what was started ends."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.server_process import ServerProcess


def launch(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run the launcher, which must fail; returns what it printed."""
    import os

    done = subprocess.run(
        [sys.executable, "-m", "sglang_hybrid.launch_server", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode in (1, 2), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    sentences = [line for line in done.stderr.splitlines() if line.startswith("sglang_hybrid:")]
    assert len(sentences) == 1, done.stderr[-2000:]
    return sentences[0]


def test_an_unknown_flag() -> None:
    assert "unrecognized arguments: --no-such-flag" in launch("--no-such-flag", "1")


def test_a_model_path_that_does_not_exist() -> None:
    assert "'/no/such/model' does not exist" in launch("--model-path", "/no/such/model")


def test_a_truncated_weight_file(tmp_path: Path, model_directory: Callable[[str], Path]) -> None:
    broken = shutil.copytree(model_directory("transformer"), tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors is damaged" in launch("--model-path", str(broken))


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in launch("--port", str(port))


def test_pools_that_do_not_fit() -> None:
    said = launch("--max-total-tokens", "1000000000000")
    assert "lower --max-total-tokens" in said


def test_another_sglang(tmp_path: Path) -> None:
    other = tmp_path / "sglang-0.5.22.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    said = launch(environment={"PYTHONPATH": str(tmp_path)})
    assert "sglang 0.5.22 is installed" in said
    assert "install sglang==0.5.23" in said


def test_arguments_that_sglang_refuses(model_directory: Callable[[str], Path]) -> None:
    said = launch(
        *("--model-path", str(model_directory("nemotron-h"))),
        *("--mamba-radix-cache-strategy", "no_buffer", "--page-size", "16"),
    )
    assert "no_buffer only supports page_size=1" in said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_everything_ends_with_the_server(sent: signal.Signals) -> None:
    with ServerProcess() as server:
        assert "its weights are random" in server.log.read_text()
        processes = server.processes()
        assert len(processes) >= 3
        assert server.process is not None
        server.process.send_signal(sent)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(map(alive, processes)):
            time.sleep(0.1)
        assert not any(map(alive, processes))


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
