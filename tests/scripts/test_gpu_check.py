"""scripts/gpu_check.sh: what it says without a GPU, its limits of time, its table and its steps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import requests
import torch

from scripts.gpu_check import __main__ as gpu_check
from scripts.gpu_check import decode_steps, models, paired, portable, stand_ins, steps, verdict
from scripts.gpu_check.findings import Finding, told
from scripts.gpu_check.steps import Step
from sglang_hybrid.serving.gpu_verdict import Row, read_verdicts

ROOT = Path(__file__).resolve().parents[2]


def python(code: str) -> list[str]:
    """A step's command: Python, which can `tell`."""
    return [sys.executable, "-c", "from scripts.gpu_check.findings import tell\n" + code]


def findings(*command: str, **environment: str) -> list[Finding]:
    """The report of a step that ends as it should."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [finding for line in done.stdout.splitlines() if (finding := told(line))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == gpu_check.UNCHECKED
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "finds no NVIDIA GPU" in done.stderr and "nothing was checked" in done.stderr


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "GRACE", 2.0)


def test_a_step_that_fails_or_hangs_keeps_no_other_from_running(soon: None, tmp_path: Path) -> None:
    hangs = "tell('first', 'half', True)\nimport time; time.sleep(60)"
    begin = time.monotonic()
    found = steps.run_all(
        [
            Step("fails", python("tell('a', 'b', True)\nraise ValueError('too bad')"), 30),
            Step("hangs", python(hangs), 4),
            Step("silent", python(""), 30),
            Step("missing", python("import no_such_module"), 30),
            Step("well", python("tell('what', 'that', True)"), 30),
        ],
        120,
        tmp_path,
    )
    assert time.monotonic() - begin < 50
    assert [finding.ok for finding in found["fails"]] == [True, False]
    assert "status 1: ValueError: too bad" in found["fails"][1].found
    assert found["hangs"][0] == Finding("first", "half", True)
    assert found["hangs"][1].found.startswith("not ended after 4 s") and not found["hangs"][1].ok
    assert found["silent"][0].found.startswith("nothing was reported")
    assert "No module named 'no_such_module'" in found["missing"][0].found
    assert found["well"] == [Finding("what", "that", True)]


@pytest.mark.slow
def test_all_steps_together_end_in_time(soon: None, tmp_path: Path) -> None:
    """The last one of them finds no time left."""
    sleeps = python("import time; time.sleep(60)")
    begin = time.monotonic()
    found = steps.run_all([Step(name, sleeps, 5) for name in "abc"], 6, tmp_path)
    assert time.monotonic() - begin < 6 + 1
    assert [findings[-1].ok for findings in found.values()] == [False] * 3
    assert found["c"] == [Finding("time", "none was left; not run", False)]


def test_what_a_hanging_step_has_started_is_ended_with_it(soon: None, tmp_path: Path) -> None:
    """Even in a session of its own, and although neither heeds Ctrl-C."""
    pid_file = tmp_path / "pid"
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    steps.run(Step("deaf", python(code), 4), 4, tmp_path / "log")
    child = Path("/proc", pid_file.read_text(), "stat")
    until = time.monotonic() + 10
    while child.exists() and "Z" not in child.read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < until, "what the step has started is alive"
        time.sleep(0.1)


def test_a_step_has_its_environment(tmp_path: Path) -> None:
    code = "import os; tell('here', os.environ['OF_THE_STEP'], True)"
    step = Step("step", python(code), 30, {"OF_THE_STEP": "yes"})
    assert steps.run(step, 30, tmp_path / "log") == [Finding("here", "yes", True)]


@pytest.mark.parametrize(("ok", "status", "word"), [(True, 0, "| ok "), (False, 1, "| WRONG |")])
def test_the_table_and_the_status_say_what_was_wrong(
    ok: bool,
    status: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = Step("one", python(f"tell('some|thing', 'found', {ok}); tell('more', 'known')"), 30)
    monkeypatch.setattr(gpu_check, "steps_in_rehearsal", lambda: [step])
    assert gpu_check.main(["--rehearse"]) == status
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert len({len(line) for line in table}) == 1
    (row,) = [line for line in table if "some/thing" in line]
    assert row.startswith("| one ") and word in row
    (row,) = [line for line in table if "| more " in line]
    assert row.rsplit("|", 2)[1].strip() == ""


def test_an_unknown_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--rehearse", "--only", "kernel"]) == gpu_check.UNCHECKED
    assert "no step 'kernel'; there are: kernels; timings; nemotron-h" in capsys.readouterr().err


def test_what_runs_depends_on_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "sanitizer", lambda: None)
    monkeypatch.setattr(gpu_check, "serves", lambda: False)
    assert [step.name for step in gpu_check.steps_on_a_gpu()] == ["kernels", "timings"]
    monkeypatch.setattr(gpu_check, "sanitizer", lambda: "/cuda/bin/compute-sanitizer")
    monkeypatch.setattr(gpu_check, "serves", lambda: True)
    every = {step.name: step for step in gpu_check.steps_on_a_gpu()}
    assert {"memcheck", "racecheck", "nemotron-h, float32", *gpu_check.MODELS} < {*every}
    assert every["memcheck"].command[:3] == ["/cuda/bin/compute-sanitizer", "--tool", "memcheck"]
    assert every["memcheck"].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@pytest.mark.parametrize("count", [1, 8])
def test_two_ranks_are_checked_where_there_are_two_gpus(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone: SGLang compares the free memory of the GPUs, of which others would use the first."""
    monkeypatch.setattr(gpu_check, "gpus", lambda: count)
    found = [step for step in gpu_check.steps_on_a_gpu() if "--tp-size" in step.command]
    assert [step.together for step in found] == [False] * (count > 1)


@pytest.mark.parametrize("complete", [True, False])
def test_torch_stands_in_for_packages_that_are_missing(
    complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "sanitizer", lambda: None)
    monkeypatch.setattr(gpu_check, "complete", lambda: complete)
    every = {step.name: step for step in gpu_check.steps_on_a_gpu()}
    servers = [every[name] for name in ("nemotron-h, float32", *gpu_check.MODELS)]
    assert ("--stand-ins" in every["Nemotron-H-8B"].command) == (not complete)
    assert {"--stand-ins" in step.command for step in servers} == {not complete}
    assert all(step.together for step in servers)
    assert bool(every["timings"].environment) == (not complete)
    said = [row.found for row in gpu_check.environment("a GPU") if row.what == "servers"]
    assert said == ([] if complete else [gpu_check.STOOD_IN])


def test_an_archive_has_what_the_lock_file_pins_but_torch() -> None:
    lock = "# all\na-b==1 \\\n    --hash=sha256:a==b\ntorch==2.1  # CPU\ntriton==3\nC_d.e==4\n"
    assert portable.pins(lock, ()) == ["a-b==1", "C_d.e==4"]
    assert portable.pins(lock, ["c.D_E"]) == ["a-b==1"]
    real = portable.pins((ROOT / "requirements" / "cpu.lock").read_text(), ["numpy"])
    names = {pin.partition("==")[0] for pin in real}
    assert "sglang" in names and not names & {"torch", "triton", "numpy"}


STOOD_IN = """
import torch
import sgl_kernel, sgl_kernel.utils, cutlass.cute as cute
from sgl_kernel.scalar_type import scalar_types

@cute.kernel
def kernel(): ...

assert not sgl_kernel.utils.is_arch_support_pdl()
scalar_types.uint4.anything
x, out = torch.randn(5, 3, 8), torch.empty(5, 8)
sgl_kernel.moe_sum_reduce(x, out, 0.5)
torch.testing.assert_close(out, x.sum(1) / 2)
try:
    sgl_kernel.silu_and_mul(x)
except NotImplementedError as error:
    assert "nothing in place of sgl_kernel.silu_and_mul" in str(error)
else:
    raise AssertionError("a function that is missing was called")
"""


def test_stand_ins_are_torchs_functions_and_others_are_refused(tmp_path: Path) -> None:
    """A package that is there is not replaced."""
    environment = os.environ | stand_ins.environment_with(stand_ins=True)
    subprocess.run([sys.executable, "-c", STOOD_IN], check=True, env=environment, timeout=120)
    (tmp_path / "sgl_kernel.py").write_text("here = True")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code = "import sgl_kernel; assert sgl_kernel.here"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


def test_servers_start_beside_each_other(soon: None, tmp_path: Path) -> None:
    """Each waits until the other has begun."""
    wait = "import time, pathlib, sys\nhere = pathlib.Path({!r})\n(here / {!r}).touch()\n"
    wait += "while not (here / {!r}).exists(): time.sleep(0.05)\ntell('met', 'the other', True)"
    pair = [("a", "b"), ("b", "a")]
    meet = [
        Step(own, python(wait.format(str(tmp_path), own, other)), 20, together=True)
        for own, other in pair
    ]
    with mock.patch.object(steps, "at_once", lambda: 2):
        found = steps.run_all(
            [*meet, Step("last", python("tell('x', 'y', True)"), 20)], 60, tmp_path
        )
    assert list(found) == ["a", "b", "last"]
    assert all(finding.ok for findings in found.values() for finding in findings)


@pytest.mark.parametrize(
    ("hits", "apart", "noise", "ok"),
    [
        (300, 0.01, 0.01, True),
        (300, 0.5, 0.3, True),
        (300, 0.5, 0.1, False),
        (100, 0.01, 0.01, False),
    ],
)
def test_conversations_at_once_are_wrong_if_hits_move_them_more_than_batches_do(
    hits: int, apart: float, noise: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Told(monkeypatch)

    def generate(url: str, tokens: list[int], **more: str) -> dict[str, Any]:
        cached = 0 if more else hits * len(tokens) // 500
        return {"output_ids": [1, 2], "meta_info": {"cached_tokens": cached}, "cold": bool(more)}

    monkeypatch.setattr(models, "generate", generate)
    monkeypatch.setattr(models, "flush", lambda url: None)
    monkeypatch.setattr(
        models, "difference", lambda url, record, tokens: noise if record["cold"] else apart
    )
    models.check_at_once("", 0.02)
    assert [*noted.verdicts.values()] == [ok]


def test_a_triton_that_cannot_compile_sglangs_kernels_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_check, "serves", lambda: True)
    for version, wrong in (("3.8.0", []), ("3.9.0", ["Triton"]), ("3.10.1", ["Triton"])):
        monkeypatch.setattr(gpu_check, "installed", lambda package, v=version: v)
        rows = gpu_check.environment("a GPU")
        assert [row.what for row in rows if row.ok is False] == wrong


WITHOUT_SGLANG = (
    "import runpy, sys; sys.modules['sglang'] = None; "
    "runpy.run_module('scripts.gpu_check.{}', run_name='__main__')"
)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["kernels", "timings"])
def test_kernels_are_checked_without_sglang(module: str) -> None:
    """Triton's interpreter runs them without a GPU."""
    pytest.importorskip("triton")
    found = findings("-c", WITHOUT_SGLANG.format(module), PYTHONPATH=str(ROOT))
    assert len(found) >= 2
    assert all(finding.ok is not False for finding in found), found
    if module == "kernels":
        assert all(finding.ok for finding in found)


@pytest.mark.slow
def test_kernels_that_write_nothing_are_found() -> None:
    pytest.importorskip("triton")
    code = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from unittest import mock\n"
        "from scripts.gpu_check import kernels\n"
        "for name in ('save_ssd_states', 'save_delta_states', 'save_windows'):\n"
        "    kernels.tell('planted', name)\n"
        "    with mock.patch.object(kernels.cs, name):\n"
        "        kernels.main()\n"
    )
    found, wrong, planted = findings("-c", code, PYTHONPATH=str(ROOT)), set(), ""
    for finding in found:
        planted = finding.found if finding.what == "planted" else planted
        if finding.ok is False:
            wrong.add((planted, finding.what.split()[0].strip(",")))
    assert wrong == {
        ("save_ssd_states", "Mamba2"),
        ("save_delta_states", "delta"),
        ("save_windows", "windows"),
    }


@pytest.mark.parametrize("specialised", [pytest.param(False, marks=pytest.mark.slow), True])
def test_prefills_that_compile_anything_are_found(specialised: bool) -> None:
    """Counted as on a GPU, with a driver that is pretended."""
    pytest.importorskip("triton")
    program = ["-m", "tests.scripts.launched_compilations", *(["specialised"] * specialised)]
    found = findings("-W", "ignore", *program, TRITON_INTERPRET="0")
    assert len(found) == 4
    wrong = {finding.what for finding in found if not finding.ok}
    assert wrong == (
        {"compiled for a small Mamba2", "compiled for Nemotron-H-8B"} if specialised else set()
    )


@pytest.mark.slow
def test_the_layers_that_are_timed_run_with_sglangs_scans() -> None:
    pytest.importorskip("triton")
    findings("-W", "ignore", "-m", "tests.scripts.launched_timings", TRITON_INTERPRET="1")


class Told:
    """Findings that are noted instead of printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verdicts: dict[str, bool | None] = {}
        monkeypatch.setattr(models, "tell", self.tell)

    def tell(self, what: str, found: str, ok: bool | None = None) -> None:
        self.verdicts[what] = ok


@pytest.mark.parametrize(
    ("cached", "apart", "page", "ok"),
    [
        (123, 0.001, 1, True),
        (122, 0.001, 1, False),
        (0, 0.0, 1, False),
        (123, 0.5, 1, False),
        (112, 0.001, 16, True),
        (0, 0.001, 16, False),
    ],
)
def test_a_hit_is_wrong_if_it_is_shorter_or_answers_otherwise(
    cached: int, apart: float, page: int, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Told(monkeypatch)
    whole = list(range(300))

    def generate(url: str, tokens: list[int], declared: tuple[int, ...]) -> dict[str, Any]:
        meta: dict[str, Any] = {"cached_tokens": 0 if tokens == whole else cached}
        meta["hybrid_cache"] = {"checkpoints": [{"position": 123, "kind": "declared"}]}
        return {"output_ids": [7], "meta_info": meta}

    monkeypatch.setattr(models, "generate", generate)
    monkeypatch.setattr(models, "flush", lambda url: None)
    monkeypatch.setattr(
        models, "difference", lambda url, record, tokens: 0.0 if tokens == whole else apart
    )
    hit = models.Hit("declared", [whole, [*whole[:123], 5]], 123, declared=(123,))
    models.check_hit("", hit, 0.01, page)
    assert noted.verdicts == {"hit: declared": ok}


COMPILED = "sglang_hybrid: compiled in 1.0 s.\n" * 2


@pytest.mark.parametrize(
    ("changed", "log", "wrong"),
    [
        ({}, COMPILED, set()),
        ({"mamba_radix_cache_strategy": "extra_buffer"}, COMPILED, {"strategy"}),
        ({"page_size": 64}, COMPILED, {"strategy"}),
        ({"page_size": 64, "mamba_radix_cache_strategy": "extra_buffer"}, COMPILED, set()),
        ({"disable_overlap_schedule": True}, COMPILED, {"strategy"}),
        ({}, "prefills are split where they leave a state, since X writes none.", {"prefills"}),
        ({}, "", {"kernels"}),
        ({}, COMPILED + "Traceback (most recent call last):", {"log"}),
    ],
)
def test_choices_of_a_default_server_that_are_wrong(
    changed: dict[str, Any],
    log: str,
    wrong: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = Told(monkeypatch)
    info = {
        "disable_overlap_schedule": False,
        "mamba_radix_cache_strategy": "no_buffer",
        "page_size": 1,
        "attention_backend": "fa3",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "cuda_graph_config": {"prefill": {"backend": "breakable"}},
        "internal_states": [{"hybrid_cache": {"advice": []}}],
        **changed,
    }
    monkeypatch.setattr(requests, "get", lambda url, timeout: SimpleNamespace(json=lambda: info))
    (tmp_path / "log").write_text(log)
    server: Any = SimpleNamespace(url="", log=tmp_path / "log")
    models.check_choices("nemotron-h", server, gpu=True)
    assert {what for what, ok in noted.verdicts.items() if ok is False} == wrong


@pytest.mark.slow
@pytest.mark.server
def test_a_server_is_checked_in_a_rehearsal() -> None:
    found = findings("-m", "scripts.gpu_check.models", "nemotron-h", "--cpu")
    hits = {finding.what for finding in found if finding.what.startswith("hit: ")}
    kinds = ("prompt_end", "branch", "declared", "message", "tail")
    assert hits == {f"hit: {kind}" for kind in kinds}
    for finding in found:
        assert finding.ok is not False, finding
        if finding.what in hits:
            kind = finding.what.removeprefix("hit: ")
            assert finding.ok and f"({kind})" in finding.found


@pytest.mark.slow
@pytest.mark.server
def test_decode_steps_of_both_caches_are_compared_in_a_rehearsal() -> None:
    found = findings("-m", "scripts.gpu_check.paired", "--cpu", "--only", "decode")
    assert [finding.what for finding in found] == ["step of 4, SGLang", "step of 4, ours"]
    assert all(re.search(r"[1-9]\d*\.\d\d ms .* busy [1-9]", finding.found) for finding in found)


def test_another_server_begins_each_round() -> None:
    assert [*paired.by_turns(3)] == [0, 1, 2, 1, 2, 0]


def test_the_paired_run_asks_a_question_a_step() -> None:
    steps = gpu_check.steps_beside_sglang(gpu=True)
    assert [step.name for step in steps] == ["traffic", "decode", "copies"]
    assert sum(step.seconds for step in steps[:2]) <= 60 * gpu_check.MINUTES


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("num_experts_per_tok", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("num_experts_per_token", {"num_experts": 4, "num_experts_per_token": 2}),
        ("num_experts_per_tok", {"n_routed_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_every_token_gets_all_experts(key: str, given: dict[str, int], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(given))
    models.take_all_experts(tmp_path)
    assert json.loads(config.read_text()) == given | {key: 4}


def test_a_model_without_experts_stays_as_it_is(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_experts_per_tok": 0, "num_local_experts": 0}))
    before = config.read_bytes()
    models.take_all_experts(tmp_path)
    assert config.read_bytes() == before


RIGHT, WRONG, SAID = Finding("a", "x", True), Finding("b", "y", False), Finding("c", "z")


@pytest.mark.parametrize(
    ("findings", "row"),
    [
        ([RIGHT, SAID], Row(True, "a: x")),
        ([RIGHT, WRONG], Row(False, "b: y")),
        ([SAID], Row(False, "")),
        ([], Row(False, "")),
    ],
)
def test_a_step_decides_by_what_was_right_or_wrong(findings: list[Finding], row: Row) -> None:
    assert verdict.rows_of({"step": findings}) == {"step": row}


def test_a_verdict_is_of_a_gpu_that_ran_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "verdict.json"
    monkeypatch.setattr(verdict, "driver", lambda: "580.1")
    good = {"hits": [RIGHT], "decode steps": [RIGHT]}
    for found, gpu, stood_in in (
        ({**good, "decode steps": [steps.NOT_RUN]}, "GPU A", False),
        (good, None, False),
        (good, "GPU A", True),
    ):
        said = verdict.decide(found, gpu, stood_in, path)
        assert "o verdict" in said and not path.exists()
    assert "One memory passed." in verdict.decide(good, "GPU A", False, path)
    (passed,) = read_verdicts(path)
    assert (passed.gpu, passed.driver, passed.passed) == ("GPU A", "580.1", True)
    assert "failed" in verdict.decide({**good, "hits": [WRONG]}, "GPU A", False, path)
    assert [it.passed for it in read_verdicts(path)] == [False]


@pytest.mark.parametrize(("one", "ok"), [(1.01, True), (1.03, False)])
def test_decode_steps_may_take_two_percent_longer_in_one_memory(
    one: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickest process of each kind counts."""
    told: list[bool | None] = []
    monkeypatch.setattr(decode_steps, "tell", lambda what, found, ok: told.append(ok))
    slow = iter([1.5, 1.0] * decode_steps.TURNS)
    times = {"split": 1.0, "one": one}

    def measure(memory: str) -> dict[int, float]:
        return {1: times[memory] * (next(slow) if memory == "one" else 1.0)}

    decode_steps.compare(measure, counts=True)
    decode_steps.compare(lambda memory: {1: times[memory]}, counts=False)
    assert told == [ok, None]
