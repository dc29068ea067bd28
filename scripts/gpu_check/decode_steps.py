"""Decode steps in one memory (SGLang's unified pool) beside those with two pools, by CUDA events.

    python -m scripts.gpu_check.decode_steps
    python -m scripts.gpu_check.decode_steps --stand-ins    # without SGLang's CUDA packages
    python -m scripts.gpu_check.decode_steps --cpu          # a small model, by the clock

The model has the sizes of Nemotron-H-8B and random weights. A process has one kind of memory; they
run by turns, and of each kind the quickest process counts. A step is SGLang's own of its benchmark
`one_batch`, from the batch on: what fills the tables of rows is in it, and so is the sampler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scripts.gpu_check import stand_ins
from scripts.gpu_check.findings import tell
from sglang_hybrid.extensions.cpu.models import build_tiny_model

MEMORIES = ("split", "one")
TURNS = 2
MOST = 1.02
"""Times that a step in one memory may take as long."""
BATCHES, PROMPT, STEPS, WARM = (1, 16), 2_048, 96, 16
"""Sequences, their tokens, the steps that are measured and those before them."""
POOLS = ("--max-mamba-cache-size", "64", "--max-total-tokens", "131072")
SECONDS = 150
"""Time limit of one process."""
MARK = "MILLISECONDS "


def serve(flags: Sequence[str]) -> Any:
    """SGLang's runner of a model, as its scheduler would have it with these flags of ours."""
    import sglang_hybrid.launch_server  # noqa: F401 (its hook must see every import of SGLang)
    from sglang_hybrid.launcher import prepare

    args: Any = prepare([*flags, "--port", "39998"])
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs

    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0]


def step_milliseconds(runner: Any, batch_size: int, prompt: int, steps: int) -> float:
    """The median of so many decode steps of a batch."""
    from sglang.benchmark.one_batch import prepare_synthetic_inputs_for_latency_test
    from sglang.srt.runtime_context import get_device

    stamps, between = _stamps(get_device().device)
    runner.clear()
    requests = prepare_synthetic_inputs_for_latency_test(batch_size, prompt)
    tokens, _, batch = runner.extend(requests)
    times = []
    for _ in range(WARM + steps):
        begin = stamps()
        tokens, _ = runner.decode(tokens, batch)
        times.append((begin, stamps()))
    runner.synchronize()
    return median(between(*pair) for pair in times[WARM:])


def _stamps(device: str) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Takes a time on the device's stream, and milliseconds between two of them."""
    if device != "cuda":
        return time.perf_counter, lambda begin, end: (end - begin) * 1e3
    from torch.cuda import Event

    new: Callable[..., Any] = Event

    def stamp() -> Any:
        event = new(enable_timing=True)
        event.record()
        return event

    return stamp, lambda begin, end: float(begin.elapsed_time(end))


def measured(memory: str, options: argparse.Namespace) -> dict[int, float]:
    """Milliseconds of a step by batch size, from a process of its own. Raises
    subprocess.SubprocessError.
    """
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--memory", memory]
    environment = stand_ins.environment_with(stand_ins=options.stand_ins)
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(MARK))
    found: dict[str, float] = json.loads(line.removeprefix(MARK))
    return {int(batch): milliseconds for batch, milliseconds in found.items()}


def compare(measure: Callable[[str], dict[int, float]], *, counts: bool) -> None:
    """Report a row for each batch size. counts: whether it decides something."""
    turns = [(memory, measure(memory)) for _ in range(TURNS) for memory in MEMORIES]
    for batch in turns[0][1]:
        least = {
            memory: min(it[batch] for name, it in turns if name == memory) for memory in MEMORIES
        }
        times = least["one"] / least["split"]
        tell(
            f"decode step of {batch}",
            f"{least['split']:.3f} ms with two pools, {least['one']:.3f} in one memory: "
            f"{times:.3f} times",
            times <= MOST if counts else None,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-ins", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--memory", choices=MEMORIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is None:
        compare(lambda memory: measured(memory, options), counts=not options.cpu)
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        scale = "tiny" if options.cpu else "8b"
        model = build_tiny_model("nemotron-h", Path(scratch) / scale, scale=scale)
        flags = ["--model-path", str(model), "--cuda-graph-max-bs-decode", str(max(BATCHES))]
        flags += ("--device", "cpu") if options.cpu else ("--load-format", "dummy", *POOLS)
        flags += stand_ins.FLAGS if options.stand_ins else ()
        flags += ("--hybrid-memory", options.memory)
        runner = serve(flags)
        prompt, steps = (64, 8) if options.cpu else (PROMPT, STEPS)
        found = {size: step_milliseconds(runner, size, prompt, steps) for size in BATCHES}
        print(MARK + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
