"""What the native kernels are worth."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from scripts.bench import profile
from scripts.bench.commands import HIDDEN, one_of
from scripts.bench.report import BenchFailed, Table, seconds_of
from scripts.bench.servers import SCRATCH, large_model

KINDS = ("native", "torch")


def switch() -> Callable[[str], None]:
    """What sets the kind of kernels that every later step takes."""
    from sglang_hybrid.extensions.cpu.attention import HybridCpuAttnBackend
    from sglang_hybrid.extensions.cpu.native.library import library
    from sglang_hybrid.extensions.cpu.ops import linear, model_steps, steps

    found = library()
    if found is None:
        raise BenchFailed("there are no native kernels; the log says why")
    backends = [one for one in gc.get_objects() if isinstance(one, HybridCpuAttnBackend)]

    def take(kind: str) -> None:
        kernels = found if kind == "native" else None
        for module in (linear, model_steps, steps):
            module.library = lambda: kernels  # type: ignore[attr-defined]
        for backend in backends:
            backend._native = kernels

    return take


def in_turn(take: Callable[[str], None], run: Callable[[], object], rounds: int) -> list[float]:
    """Median milliseconds with the native kernels and without."""
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for nth in range(rounds + 1):
        for kind in KINDS:
            take(kind)
            seconds = seconds_of(run)
            if nth:
                seen[kind].append(1e3 * seconds)
    return [median(seen[kind]) for kind in KINDS]


def measure(
    name: str, steps: Sequence[str], prompts: Sequence[int], rounds: int, scratch: Path
) -> dict[str, list[float]]:
    """The times of one model, in this process."""
    from sglang_hybrid.hooks import patching

    patching.install()
    from sglang_hybrid.extensions.cpu.models import ensure_tiny_model

    large = name == "100m"
    directory = large_model(scratch) if large else ensure_tiny_model(name)
    runner = profile.load(directory, [])
    take = switch()
    found = {}
    for what in steps:
        count, context = map(int, what.split("x"))
        runner.clear()
        take("native")
        state: list[Any] = list(runner.extend(profile.requests(count, context)))

        def step(state: list[Any] = state) -> None:
            state[0], _ = runner.decode(state[0], state[2])

        found[f"decode step of {count} at {context:,}"] = in_turn(take, step, rounds)
    for length in prompts:

        def prefill(length: int = length) -> None:
            runner.clear()
            runner.extend(profile.requests(1, length))

        few = max(2, rounds // 5)
        found[f"prefill of {length:,}"] = in_turn(take, prefill, few)
    return found


def native(
    models: Annotated[tuple[str, ...], one_of(profile.MODELS)] = ("nemotron-h", "100m"),
    steps: tuple[str, ...] = ("1x100", "16x100", "1x6000", "16x6000"),
    prompts: tuple[int, ...] = (2000, 16000),
    rounds: int = 15,
    scratch: Annotated[Path, "of the large model"] = SCRATCH,
    one: Annotated[bool, {"help": HIDDEN}] = False,
) -> None:
    """What the native kernels are worth: each step with them and in plain torch, in turn.

    Loads a model as a server's scheduler does, without the server, and switches the kernels off and
    on between steps of the same process, so that whatever else the machine does slows both alike.
    Steps are named by sequences and context.
    """
    if one:
        print(json.dumps(measure(models[0], steps, prompts, rounds, scratch)))
        return
    table = Table("model", "what", "native, ms", "plain torch, ms", "speedup", text=2)
    for name in models:
        for what, (native, torch) in profile.in_a_process(name).items():
            table.row(name, what, f"{native:,.1f}", f"{torch:,.1f}", f"{torch / native:.2f}")
