"""Candidates tried on a window, in a bounded number of worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

import sglang_hybrid
from sglang_hybrid.core.systems import Spec
from sglang_hybrid.simulation.tuner.candidates import as_text
from sglang_hybrid.simulation.tuner.regret import Ints
from sglang_hybrid.simulation.tuner.window import RequestWindow, packed
from sglang_hybrid.simulation.tuner.worker import Score

WORKER = ("-m", "sglang_hybrid.simulation.tuner.worker")


@dataclass(frozen=True)
class Limits:
    """workers: processes at once. memory: bytes of each. seconds: of each, then it is ended."""

    workers: int = 1
    memory: int = 1 << 30
    seconds: float = 600.0


@dataclass
class TokensFound:
    """Tokens found in each request that counts [n], by candidate, of `counted_tokens` prompt tokens
    in all; and what went wrong.
    """

    counted_tokens: int
    hits: dict[Spec, Ints] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def search(
    window: RequestWindow,
    candidates: Sequence[Spec],
    limits: Limits,
    command: Sequence[str] = (sys.executable, *WORKER),
) -> TokensFound:
    """Try all candidates. A worker that dies, hangs or takes too much memory is one failure; what
    it had found by then counts.
    """
    begin = time.monotonic()
    found = TokensFound(window.counted_tokens)
    shares = [share for k in range(limits.workers) if (share := candidates[k :: limits.workers])]
    with packed(window) as content, ThreadPoolExecutor(limits.workers) as threads:
        ran = threads.map(lambda share: _run(command, content, share, limits), shares)
        parts = list(ran)
    hits = {spec: of_spec for part, _ in parts for spec, of_spec in part.items()}
    found.hits = {spec: hits[spec] for spec in candidates if spec in hits}
    found.failures = [failure for _, failure in parts if failure]
    found.seconds = time.monotonic() - begin
    return found


def _run(
    command: Sequence[str], content: int, share: Sequence[Spec], limits: Limits
) -> tuple[dict[Spec, Ints], str]:
    """One worker from start to end: what it found, and what went wrong, if anything did."""
    by_text = {as_text(spec): spec for spec in share}
    with _lifeline() as lifeline:
        process = subprocess.Popen(
            [
                *command,
                *("--window", str(content), "--lifeline", str(lifeline)),
                *("--memory", str(limits.memory), *by_text),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(content, lifeline),
            env=_environment(),
            start_new_session=True,  # a Ctrl-C is the server's
        )
        failure = ""
        try:
            out, errors = process.communicate(timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            failure = f"a worker was not done after {limits.seconds:g} seconds and was ended"
        except BaseException:
            process.kill()
            raise
    if process.returncode and not failure:
        said = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        failure = f"a worker ended with status {process.returncode}: {said[0]}"
    scores = [msgspec.json.decode(line, type=Score) for line in out.split(b"\n")[:-1]]
    return {by_text[score.candidate]: np.array(score.hits) for score in scores}, failure


@contextmanager
def _lifeline() -> Iterator[int]:
    """The reading end of a pipe that closes when this process ends, however it does."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _environment() -> dict[str, str]:
    """One thread for numpy, and our package found where it was found here."""
    ours = str(Path(sglang_hybrid.__file__).parents[1])
    paths = [ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
