"""Starting: what a user does wrong ends in one sentence, and what was started ends."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from sglang_hybrid import launcher
from sglang_hybrid.serving.server_process import free_port
from tests.server.client import alive

pytestmark = pytest.mark.usefixtures("spawned")  # as users' processes start

SHM = "/dev/shm/"


def launch(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run the launcher, which must fail and leave nothing behind; returns what it said."""
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.Popen(
            [sys.executable, "-m", "sglang_hybrid.launch_server", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=said,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        mapped: set[str] = set()
        deadline = time.monotonic() + 300
        while done.poll() is None and time.monotonic() < deadline:
            mapped |= shared_memory(done.pid)
            time.sleep(0.1)
        done.kill()
        said.seek(0)
        errors = said.read()
    assert done.wait() in (1, 2), errors[-2000:]
    assert "Traceback" not in errors
    sentences = [line for line in errors.splitlines() if line.startswith("sglang_hybrid:")]
    assert len(sentences) == 1, errors[-2000:]
    assert not [p for p in psutil.process_iter() if alive(p) and in_session(p, done.pid)]
    assert not mapped & set(os.listdir(SHM))
    return sentences[0]


def shared_memory(session: int) -> set[str]:
    """Names of the shared memory that a session's processes map at this moment."""
    names = set()
    for process in psutil.process_iter():
        if not in_session(process, session):
            continue
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            names |= {line.split(f" {SHM}")[1] for line in maps.splitlines() if f" {SHM}" in line}
    return names


def in_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session
    except ProcessLookupError:
        return False


@pytest.fixture(scope="module")
def said(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model_directory: Callable[[str], Path],
) -> Iterator[dict[str, Future[str]]]:
    """The launcher's answers to each mistake that a test of this run makes; two at a time, a start
    is imports on one core.
    """
    made = {
        item.callspec.params.get("mistake")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    scratch = tmp_path_factory.mktemp("mistakes")
    broken = shutil.copytree(model_directory("transformer"), scratch / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    other = scratch / "site" / "sglang-0.5.21.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.21\n")
    with socket.socket() as taken, ThreadPoolExecutor(2) as pool:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        mistakes = {
            "unknown flag": ("--no-such-flag", "1"),
            "no such model": ("--model-path", "/no/such/model"),
            "truncated weights": ("--model-path", str(broken)),
            "port in use": ("--port", str(taken.getsockname()[1])),
            "too large pools": ("--max-total-tokens", "1000000000000"),
            "refused by sglang": (
                *("--model-path", str(model_directory("nemotron-h"))),
                *("--mamba-radix-cache-strategy", "no_buffer", "--page-size", "16"),
            ),
        }
        runs = {
            name: pool.submit(launch, *arguments)
            for name, arguments in mistakes.items()
            if name in made
        }
        path = {"PYTHONPATH": str(other.parent)}
        runs["another sglang"] = pool.submit(launch, environment=path)
        yield runs


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mistake", "parts"),
    [
        ("unknown flag", ["unrecognized arguments: --no-such-flag"]),
        ("no such model", ["'/no/such/model' does not exist"]),
        slow("truncated weights", ["model.safetensors is damaged", "copy the model again"]),
        ("port in use", ["cannot listen on 127.0.0.1:", "choose another --port"]),
        slow("too large pools", ["lower --max-total-tokens"]),
        slow("refused by sglang", ["no_buffer only supports page_size=1"]),
        ("another sglang", ["sglang 0.5.21 is installed", "extends 0.5.23 only"]),
    ],
)
def test_a_mistake_ends_in_one_sentence(
    said: dict[str, Future[str]], mistake: str, parts: list[str]
) -> None:
    sentence = said[mistake].result()
    for part in parts:
        assert part in sentence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--max-total-tokens 1", "--max-total-tokens 1 is too small for any request"),
        ("--max-mamba-cache-size 0", "--max-mamba-cache-size 0 is too small for any request"),
        ("--hybrid-eviction sglang-lru:0.7", "'sglang-lru:0.7': only marconi takes an alpha"),
        ("--device mtia", "sees no such device here; leave out --device"),
        ("--hybrid-record /nowhere/trace.jsonl", "--hybrid-record: there is no directory /nowhere"),
        ("--context-length 0", "--context-length 0: give 1 or more"),
        ("--mem-fraction-static 5", "--mem-fraction-static 5: give a share of the memory"),
        ("--tp-size 3", "--tp-size 3 cannot share the 8 heads of the model's recurrent layers"),
        ("--tokenizer-path /nowhere", "--tokenizer-path '/nowhere' does not exist"),
        ("--json-model-override-args {bad", "--json-model-override-args '{bad' is no JSON object"),
        (
            "--device cpu --attention-backend flashinfer",
            "--attention-backend flashinfer does not work on the CPU",
        ),
        ("--page-size 1000000", "the server cannot start: AssertionError in "),
        ("--lora-paths /no/such/adapter", "'/no/such/adapter' does not exist"),
        ("--model-path", "argument --model-path/--model: expected one argument"),
        ("--port 99999", "--port 99999: give 65535 at most"),
        (
            "--enable-hierarchical-cache --hicache-size 1000000",
            "--hicache-size 1000000 asks for 1,000,000.0 GB of the machine's memory",
        ),
        (
            "--enable-hierarchical-cache --hicache-ratio 1e9",
            "the server cannot start: --hicache-ratio 1e+09 asks for",
        ),
        (
            "--hybrid-memory one --hybrid-eviction sglang-lru",
            "the server cannot start: --hybrid-memory one cannot be: --hybrid-eviction sglang-lru",
        ),
        (
            "--device cpu --speculative-algorithm DFLASH",
            "--speculative-algorithm DFLASH does not work on the CPU; use one of NGRAM, EAGLE",
        ),
    ],
)
def test_other_mistakes_end_in_one_sentence(flags: str, said: str) -> None:
    assert said in launch(*flags.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("EVICTION", "fifo", "'fifo' is none of auto, marconi"),
        ("DRAIN_SECONDS", "soon", "'soon' is not a number from 0 to 1e+09 (from the environment)"),
        ("SLOTS_PER_REQUEST", "1000", "=1000 is more than the 512 state slots that there are"),
    ],
)
def test_a_mistake_in_a_variable_is_one_sentence_too(variable: str, value: str, words: str) -> None:
    assert words in launch(environment={f"SGLANG_HYBRID_{variable}": value})


@pytest.mark.slow
def test_what_a_child_process_dies_of_is_one_sentence_too(tmp_path: Path) -> None:
    """An adapter that looks like one until a scheduler loads it."""
    (tmp_path / "adapter_config.json").write_text("{}")
    said = launch("--lora-paths", str(tmp_path), "--device", "cpu")
    assert "the server cannot start: Failed to load LoRA adapter" in said


@pytest.mark.slow
@pytest.mark.parametrize("library", ["/numpy/", "/torch/"])
def test_ctrl_c_while_it_starts(library: str, tmp_path: Path) -> None:
    """While modules are imported: ours, which need numpy, and SGLang's, which need torch. A
    terminal sends it to the whole group.
    """
    log, own = tmp_path / "log", tmp_path / "own"
    own.mkdir()
    with log.open("w") as said, interruptible():
        starting = subprocess.Popen(
            [sys.executable, "-m", "sglang_hybrid.launch_server", "--port", str(free_port())],
            stdout=said,
            stderr=said,
            env={**os.environ, "TMPDIR": str(own)},
            start_new_session=True,
        )
    maps = Path(f"/proc/{starting.pid}/maps")
    deadline = time.monotonic() + 60
    while library not in maps.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    mapped = shared_memory(starting.pid)
    os.killpg(starting.pid, signal.SIGINT)
    assert starting.wait(60) == 130, log.read_text(errors="replace")
    assert not log.read_text(errors="replace")
    assert not [p for p in psutil.process_iter() if alive(p) and in_session(p, starting.pid)]
    assert not mapped & set(os.listdir(SHM))
    assert not list(own.iterdir())


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A process that is started here hears Ctrl-C, also where this one was started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_help_all_shows_our_flags_in_a_group_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        launcher.prepare(["--help", "all"])
    assert not stopped.value.code
    shown = capsys.readouterr().out
    _, group = shown.split("\nsglang_hybrid:\n")
    assert "--hybrid-default-model" in group.split("\n\n")[0] + group.split("\n\n")[1]
    assert "--mamba-radix-cache-strategy" in shown
