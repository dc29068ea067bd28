"""Where the time of a prefill and of a decode step goes on the CPU."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from scripts.bench.commands import HIDDEN, one_of
from scripts.bench.report import ROOT, BenchFailed, Table
from scripts.bench.servers import SCRATCH, large_model
from sglang_hybrid.extensions.cpu.activation import wait_briefly

MODELS = (
    "nemotron-h",
    "falcon-h1",
    "granite-hybrid",
    "mamba2",
    "falcon-mamba",
    "qwen3-next",
    "transformer",
    "100m",
)
"""The embedded models, and a Nemotron-H of 100 M parameters."""

PARTS = (
    "products with weights",
    "layers in one call",
    "experts",
    "attention",
    "recurrent layers",
    "convolutions",
    "norms, activations",
    "embedding, logits",
    "sampling",
    "rest",
)
"""What is told apart. The rest is mostly SGLang's Python between the other parts."""

OF_MODULES = {
    "linear": "products with weights",
    "moe": "experts",
    "mamba1": "recurrent layers",
    "mamba2": "recurrent layers",
    "gated_delta": "recurrent layers",
    "tracking": "recurrent layers",
    "norms": "norms, activations",
}
"""Parts of the functions in `sglang_hybrid/extensions/cpu/ops`, by their file."""

OF_LAYERS = {"mixer_forward": "recurrent layers", "mlp_forward": "products with weights"}
"""Parts of whole layers: what a native kernel computes in one call is not told apart."""

REPEATS = 7


class Clock:
    """Seconds of each part, without the parts that it called."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._parts = ["rest"]
        self._since = perf_counter()

    def enter(self, part: str) -> None:
        self._charge()
        self._parts.append(part)

    def leave(self) -> None:
        self._charge()
        self._parts.pop()

    def read(self) -> defaultdict[str, float]:
        """What was measured since the last reading."""
        self._charge()
        seconds, self.seconds = self.seconds, defaultdict(float)
        return seconds

    def _charge(self) -> None:
        now = perf_counter()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now


CLOCK = Clock()


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        CLOCK.enter(part)
        try:
            return function(*args, **kwargs)
        finally:
            CLOCK.leave()

    return wrapper


def timed_layer(part: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Measure what stands for a method of SGLang."""
    return lambda original: timed(part, wrapper(original))


def time_kernels() -> None:
    """Measure the functions that the platform gives SGLang; before SGLang's models are imported."""
    from sglang_hybrid.extensions.cpu import binder
    from sglang_hybrid.extensions.cpu.ops.bindings import BINDINGS

    found = []
    for binding in BINDINGS:
        file = getattr(binding.function, "__module__", "").rpartition(".")[2]  # a module has none
        name = getattr(binding.function, "__name__", "")
        part = "convolutions" if "conv1d" in name else OF_MODULES.get(file)
        layer = OF_LAYERS.get(name)
        if layer is not None:
            binding = replace(binding, function=timed_layer(layer, binding.function))
        elif part is not None and "weights" not in binding.attribute:
            binding = replace(binding, function=timed(part, binding.function))
        found.append(binding)
    vars(binder)["BINDINGS"] = tuple(found)


def time_modules(runner: Any) -> None:
    """Measure norms, activations, attention, embeddings, logits, and all layers in one call."""
    from sglang_hybrid.extensions.cpu.native.model_step import NativeModel

    for owner in {type(module) for module in runner.model.modules()}:
        kind = owner.__name__
        if "Norm" in kind or kind in ("SiluAndMul", "ReLU2", "GeluAndMul"):
            part = "norms, activations"
        elif kind == "RadixAttention" or kind.endswith("RotaryEmbedding"):
            part = "attention"
        elif kind in ("VocabParallelEmbedding", "LogitsProcessor"):
            part = "embedding, logits"
        else:
            continue
        # Of the class: a module with a forward function of its own is computed layer by layer.
        owner.forward = timed(part, owner.forward)
    NativeModel.step = timed("layers in one call", NativeModel.step)  # type: ignore[method-assign]
    runner.sample = timed("sampling", runner.sample)


def load(directory: Path, flags: Sequence[str]) -> Any:
    """SGLang's runner of a model, without prefix cache and scheduler."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    arguments = prepare_server_args(
        [
            *("--model-path", str(directory), "--disable-radix-cache", "--log-level", "error"),
            *("--disable-overlap-schedule", "--mamba-radix-cache-strategy", "no_buffer", *flags),
        ]
    )
    arguments.resolve_once()
    rank = spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    logging.disable(logging.INFO)
    return runner


def requests(count: int, length: int) -> list[Any]:
    """Requests of random tokens."""
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    greedy = SamplingParams(temperature=0, max_new_tokens=1000)
    found = []
    for index in range(count):
        ids = array("q", torch.randint(300, 30000, (length,)).tolist())
        request = Req(str(index), "", ids, greedy)
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = length
        found.append(request)
    return found


def measured(run: Callable[[], object], trace: Path | None) -> dict[str, float]:
    """Seconds of each part of one run, of the run that took the median time."""
    run()
    seen = []
    for _ in range(REPEATS):
        CLOCK.read()
        run()
        seen.append(CLOCK.read())
    if trace is not None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        profiler.export_chrome_trace(str(trace))
    return dict(sorted(seen, key=lambda parts: sum(parts.values()))[len(seen) // 2])


def profile_one(
    name: str,
    server_flags: Sequence[str],
    prompt: int,
    batch: Sequence[int],
    context: int,
    traces: Path | None,
    scratch: Path,
) -> dict[str, dict[str, float]]:
    """Seconds of the parts of a prefill and of decode steps of one model, in this process."""
    from sglang_hybrid.hooks import patching

    patching.install()
    time_kernels()
    from sglang_hybrid.extensions.cpu.models import ensure_tiny_model

    large = name == "100m"
    directory = large_model(scratch) if large else ensure_tiny_model(name)
    runner = load(directory, server_flags)
    time_modules(runner.torch_runner)

    def trace(what: str) -> Path | None:
        return traces and traces / f"{name}-{what}.json"

    def prefill() -> None:
        runner.clear()
        runner.extend(requests(1, prompt))

    found = {f"prefill of {prompt:,}": measured(prefill, trace("prefill"))}
    for count in batch:
        runner.clear()
        state: list[Any] = list(runner.extend(requests(count, context)))

        def step(state: list[Any] = state) -> None:
            state[0], _ = runner.decode(state[0], state[2])

        found[f"decode step of {count}"] = measured(step, trace(f"decode-{count}"))
    return found


def profile(
    *server_flags: Annotated[str, "flags for the server, after --"],
    models: Annotated[tuple[str, ...], one_of(MODELS)] = MODELS,
    prompt: Annotated[int, "tokens of the prefill"] = 2000,
    batch: Annotated[tuple[int, ...], "sizes of decodes"] = (1, 16),
    context: Annotated[int, "tokens before a decode step"] = 100,
    trace: Annotated[Path | None, "also write torch.profiler's traces there"] = None,
    scratch: Annotated[Path, "of the large model"] = SCRATCH,
    one: Annotated[bool, {"help": HIDDEN}] = False,
) -> None:
    """Where the time of a prefill and of a decode step goes on the CPU, percent by percent.

    Loads models as a server's scheduler does, without the server, and measures the parts of their
    forward passes: each part without the parts that it calls.
    """
    if one:
        print(
            json.dumps(profile_one(models[0], server_flags, prompt, batch, context, trace, scratch))
        )
        return
    print("Percent of the milliseconds.\n")
    table = Table("model", "what", "ms", *PARTS, text=2)
    for name in models:
        for what, parts in in_a_process(name).items():
            total = sum(parts.values())
            shares = (f"{100 * parts.get(part, 0) / total:.0f}" for part in PARTS)
            table.row(name, what, f"{1000 * total:,.1f}", *shares)


def in_a_process(name: str) -> dict[str, Any]:
    """What this subcommand prints with `--one` of a model, with this run's options, in a process
    of its own.
    """
    rest = sys.argv[1:]
    flags = rest.index("--") if "--" in rest else len(rest)
    program = [sys.executable, str(ROOT / "scripts" / "bench.py")]
    command = [*program, *rest[:flags], "--models", name, "--one", *rest[flags:]]
    environment = dict(os.environ)
    wait_briefly(environment)  # as the platform does for its servers
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise BenchFailed(f"{name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
