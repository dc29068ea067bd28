"""The steps of scripts/gpu_check.sh, and the table of what they found; see that file."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scripts.gpu_check.findings import Finding
from scripts.gpu_check.stand_ins import environment_with
from scripts.gpu_check.steps import QUESTIONS, Step, new_logs, run_all, table
from scripts.gpu_check.verdict import decide

MINUTES = 8.8
"""Time for all steps together; the rest of nine minutes is for the start of this process."""

MODELS = (
    *("kimi-linear", "nemotron-h", "qwen3-next", "qwen3.5", "falcon-h1", "granite-hybrid"),
    *("nemotron-3", "lfm2", "mamba2", "falcon-mamba"),
)
"""Tiny models, first what takes long to compile: time may end before they do."""

STOOD_IN = "SGLang's CUDA packages are missing; plain torch stands in for them"

UNCHECKED = 2
"""Exit status where there is nothing to check on."""


def gpu() -> str | None:
    """The GPU that torch sees; None without torch or without a GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def gpus() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def sanitizer() -> str | None:
    """compute-sanitizer on PATH or in the CUDA toolkit; None if there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=f"{home}/bin:{home}/compute-sanitizer"
    )


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"scripts.gpu_check.{name}", *arguments]


def serves() -> bool:
    """True if SGLang is installed, with or without the packages that it needs on a GPU."""
    return installed("sglang") is not None


def complete() -> bool:
    """True if the CUDA packages are installed that SGLang uses by default."""
    return all(map(importlib.util.find_spec, ("sgl_kernel", "flashinfer")))


def steps_on_a_gpu() -> list[Step]:
    """All steps that can run on this machine. Their limits may add up to more than there is."""
    found = [Step("kernels", module("kernels"), 90, together=True)]
    if tool := sanitizer():
        # Without torch's cache of memory an address behind a tensor is nobody's.
        plain = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        for kind in ("memcheck", "racecheck"):
            check = [tool, "--tool", kind, "--error-exitcode", "9", *module("kernels", "--small")]
            found.append(Step(kind, check, 75, plain, together=True))
    stand_ins = () if complete() else ("--stand-ins",)
    path = environment_with(stand_ins=bool(stand_ins)) if serves() else {}
    found.append(Step("timings", module("timings"), 110, path))
    if serves():
        found.append(Step("Nemotron-H-8B", module("large", *stand_ins), 180))
        exact = module("models", "nemotron-h", "--float32", *stand_ins)
        if gpus() > 1:  # not beside others: SGLang wants as much free memory on both
            two = [*exact, "--", "--tp-size", "2"]
            found.append(Step("nemotron-h, two GPUs", two, 180))
        found.append(Step("nemotron-h, float32", exact, 240, together=True))
        found.append(Step("nemotron-h, tiers", [*exact, "--tiers"], 240, together=True))
        found.append(Step("nemotron-h, spilled", [*exact, "--spills"], 240, together=True))
        found.append(Step("nemotron-h, parked", [*exact, "--parks"], 240, together=True))
        shared = [*exact, "--tiers", "--", "--hybrid-memory", "one"]
        found.append(Step("nemotron-h, one memory", shared, 240, together=True))
        found += [
            Step(name, module("models", name, *stand_ins), 240, together=True) for name in MODELS
        ]
    return found


def steps_of_one_memory(*, gpu: bool) -> list[Step]:
    """The checks after which one memory may be the default, on the CPU where there is no GPU."""
    stand_ins = () if complete() or not gpu else ("--stand-ins",)
    path = environment_with(stand_ins=bool(stand_ins))
    device = () if gpu else ("--cpu",)

    def served(name: str, *options: str) -> list[str]:
        return module("models", name, *options, *device, *stand_ins, "--", "--hybrid-memory", "one")

    exact = () if not gpu else ("--float32",)
    return [
        Step("hits", served("nemotron-h", *exact), 240, together=True),
        Step("moves behind copies", served("nemotron-h", *exact, "--tiers"), 240, together=True),
        Step("CUDA graphs", served("qwen3.5"), 240, together=True),
        Step("decode steps", module("decode_steps", *device, *stand_ins), 320, path),
    ]


def steps_beside_sglang(*, gpu: bool) -> list[Step]:
    """The paired run, on the CPU where there is no GPU."""
    options = [] if gpu else ["--cpu"]
    options += ["--stand-ins"] if gpu and not complete() else []
    return [
        Step(name, module("paired", "--only", name, *options), 230 if gpu else 500)
        for name in QUESTIONS
    ]


def steps_in_rehearsal() -> list[Step]:
    """The same without a GPU: kernels in Triton's interpreter, a server on the CPU."""
    return [
        Step("kernels", module("kernels"), 120),
        Step("timings", module("timings"), 120),
        Step("nemotron-h", module("models", "nemotron-h", "--cpu"), 240),
    ]


def environment(name: str | None) -> list[Finding]:
    """A sentence of what is installed, and of what is left out for that. ``name``: the GPU's."""
    packages = ("torch", "triton", "sglang", "flashinfer-python")
    versions = ", ".join(f"{package} {installed(package) or 'missing'}" for package in packages)
    found = [Finding("machine", name or "a rehearsal on the CPU"), Finding("packages", versions)]
    if name is None:
        return found
    triton = installed("triton") or "0.0"
    if serves() and tuple(map(int, triton.split(".")[:2])) >= (3, 9):
        text = f"Triton {triton} has no block pointers, which SGLang's gated delta net needs"
        found.append(Finding("Triton", text, False))
    if not sanitizer():
        found.append(Finding("compute-sanitizer", "not installed; memory is not checked"))
    if not serves():
        found.append(Finding("servers", "SGLang is missing; none is started"))
    elif not complete():
        found.append(Finding("servers", STOOD_IN))
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument(
        "--one-memory", action="store_true", help="whether KV and states may share it by default"
    )
    parser.add_argument(
        "--paired", action="store_true", help="SGLang's own cache and ours, by turns"
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", help="some of the steps")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="default: %(default)s")
    options = parser.parse_args(arguments)
    name = gpu()
    if name is None and not options.rehearse:
        print(
            f"gpu_check: torch ({installed('torch') or 'not installed'}) finds no NVIDIA GPU on "
            "this machine, so nothing was checked; --rehearse runs the steps on the CPU.",
            file=sys.stderr,
        )
        return UNCHECKED
    steps = steps_in_rehearsal() if options.rehearse else steps_on_a_gpu()
    if options.one_memory:
        steps = steps_of_one_memory(gpu=not options.rehearse)
    if options.paired:
        steps = steps_beside_sglang(gpu=not options.rehearse)
    unknown = {*(options.only or ())} - {step.name for step in steps}
    if unknown:
        known = "; ".join(step.name for step in steps)
        print(f"gpu_check: no step {min(unknown)!r}; there are: {known}", file=sys.stderr)
        return UNCHECKED
    steps = [step for step in steps if not options.only or step.name in options.only]
    logs: Path = new_logs()
    print(f"Logs: {logs}", flush=True)
    found = {"environment": environment(None if options.rehearse else name)}
    found |= run_all(steps, options.minutes * 60, logs)
    print(table(found))
    if options.one_memory and not options.only:
        of_steps = {step.name: found[step.name] for step in steps}
        print(f"\n{decide(of_steps, None if options.rehearse else name, not complete())}")
    wrong = sum(finding.ok is False for findings in found.values() for finding in findings)
    print(f"\n{wrong} of {sum(map(len, found.values()))} findings are wrong." if wrong else "\nok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
