"""Candidates in worker processes: what they find, and workers that die, hang or need too much."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from sglang_hybrid.core.returns.hints import Hint
from sglang_hybrid.replay.systems import Spec
from sglang_hybrid.simulation.traces.declared_hints import with_hints
from sglang_hybrid.simulation.traces.requests import Request
from sglang_hybrid.simulation.tuner.candidates import CANDIDATES, as_text, replay
from sglang_hybrid.simulation.tuner.search import Limits, search
from sglang_hybrid.simulation.tuner.window import make_window, packed, unpack
from tests.simulation.tuner.traffic import COST, fashions, records, templates, window

FEW = CANDIDATES[:3]
MIX = window(templates(40))


def test_texts_are_what_the_replay_parses() -> None:
    assert [Spec.parse(as_text(spec)) for spec in CANDIDATES] == list(CANDIDATES)
    assert max(dict(spec.options).get("alpha", 0) for spec in CANDIDATES) == 100


def test_a_window_has_what_was_recorded() -> None:
    first, second = records(templates(2))
    said = {"tenant": "a", "message_starts": (3, 9), "hint": Hint.ENDS}
    second = dataclasses.replace(second, **said)
    made = make_window([first, second], 1, COST, 16, None, has_states=True)
    seconds = second.arrival - first.arrival
    assert made.requests == [
        Request(0, 0, 0.0, first.tokens, first.input_len),
        Request(1, 0, seconds, second.tokens, second.input_len, **said),
    ]


def test_a_window_arrives_as_it_left() -> None:
    requests = [
        dataclasses.replace(request, tenant=("", "a")[number % 2])
        for number, request in enumerate(with_hints(MIX.requests, "both"))
    ]
    left = dataclasses.replace(MIX, requests=requests)
    with packed(left) as descriptor:
        there = unpack(descriptor)
    for field in ("cost", "budget", "counted", "min_branch_tokens", "serving"):
        assert getattr(there, field) == getattr(left, field)
    for mine, its in zip(left.requests, there.requests, strict=True):
        assert its.tokens.tolist() == mine.tokens.tolist()
        assert dataclasses.replace(its, tokens=mine.tokens) == mine


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_find_what_a_replay_here_finds(workers: int) -> None:
    found = search(MIX, CANDIDATES, Limits(workers=workers))
    assert found.failures == []
    assert list(found.hits) == list(CANDIDATES)
    for spec, hits in found.hits.items():
        assert hits.tolist() == [o.hit_len for o in replay(MIX, spec)[MIX.counted_from :]]
    assert found.counted_tokens == sum(r.input_len for r in MIX.requests[20:])


def test_templates_are_for_reuse_and_fashions_for_recency() -> None:
    """What all other tests of decisions rest on."""
    shares = []
    for phase in (templates, fashions):
        hits = search(window(phase(100)), FEW, Limits()).hits
        shares.append(hits[FEW[1]].sum() / hits[FEW[0]].sum())
    assert shares[0] < 0.7 and shares[1] >= 1


def test_a_worker_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_hybrid.simulation.tuner.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[0] for name in done.stdout.split()}
    assert "numpy" in rooms
    assert not rooms & {"torch", "sglang"}


def test_a_worker_has_the_lowest_priority_and_ends_with_its_server(tmp_path: Path) -> None:
    code = f"""
        from tests.simulation.tuner.test_search import FEW, MIX, Limits, search
        search(MIX, FEW[:1], Limits(), ({sys.executable!r}, {str(tmp_path / "worker.py")!r}))
    """
    (tmp_path / "worker.py").write_text(
        textwrap.dedent(f"""
            import os, time
            from sglang_hybrid.simulation.tuner import worker
            def replay(window, spec):
                with open({str(tmp_path / "pid")!r} + ".part", "w") as file:
                    file.write(str(os.getpid()))
                os.rename({str(tmp_path / "pid")!r} + ".part", {str(tmp_path / "pid")!r})
                time.sleep(600)
            worker.replay = replay
            worker.main()
        """)
    )
    server = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.05)
        worker = psutil.Process(int((tmp_path / "pid").read_text()))
        assert worker.nice() == 19
    finally:
        server.kill()
        server.wait()
    psutil.wait_procs([worker], timeout=20)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def failing(tmp_path: Path, what: str) -> tuple[str, str]:
    """A worker that does `what` in place of its second candidate."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from sglang_hybrid.simulation.tuner import worker\n"
        "usual, seen = worker.replay, []\n"
        "def replay(window, spec):\n"
        "    seen.append(spec)\n"
        "    if len(seen) == 2:\n"
        f"        {what}\n"
        "    return usual(window, spec)\n"
        "worker.replay = replay\n"
        "sys.exit(worker.main())\n"
    )
    return sys.executable, str(script)


@pytest.mark.parametrize(
    "what, limits, said",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", Limits(), "status -9"),
        ("time.sleep(600)", Limits(seconds=6), "not done after 6 seconds"),
        ("raise ValueError('odd')", Limits(), "ValueError: odd"),
        ("len(bytes(1 << 30))", Limits(memory=512 << 20), "more than 512 MiB"),
    ],
    ids=["dies", "hangs", "raises", "needs too much memory"],
)
def test_a_failing_worker_is_one_failure(
    what: str, limits: Limits, said: str, tmp_path: Path
) -> None:
    children = psutil.Process().children()
    found = search(MIX, FEW, limits, failing(tmp_path, what))
    assert len(found.failures) == 1
    assert said in found.failures[0]
    assert list(found.hits) == list(FEW[:1]), "what it found before counts"
    assert psutil.Process().children() == children
    assert len(os.listdir("/proc/self/fd")) < 100
