"""SGLang's own prefix cache and ours on a real server: the same trace, the same pools."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from scripts.bench.commands import APPENDED, Count
from scripts.bench.measured import Configuration, Result, measure, measure_in_pairs, report
from scripts.bench.report import BenchFailed
from scripts.bench.servers import flags_of, vocabulary_of
from scripts.bench.traces import find, preset_of
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models import build_tiny_model, tiny_model_directory
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.slices import (
    Slice,
    reusable_tokens,
    to_vocabulary,
)

CANDIDATES = (
    "--mamba-max-states-per-path 2",
    "--mamba-max-states-per-path 2 --mamba-radix-cache-strategy extra_buffer_lazy",
    "--mamba-track-interval 128 --mamba-radix-cache-strategy extra_buffer_lazy",
    "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
)
"""Flags with which SGLang's own cache may do better than at its defaults."""


@dataclass(frozen=True)
class Preset:
    """A slice of a trace, and pools in which it does not fit."""

    slice: Slice
    kv_tokens: int
    state_slots: int
    flags: str = ""

    def changed(self, changes: Sequence[str]) -> Preset:
        """With other numbers, given as NAME=N. Raises BenchFailed for another name."""
        own = {"kv_tokens": self.kv_tokens, "state_slots": self.state_slots}
        cut = {field.name: getattr(self.slice, field.name) for field in fields(Slice)}
        for change in changes:
            name, _, number = change.partition("=")
            if name not in own | cut or not number.isdigit():
                raise BenchFailed(f"{change} is not NAME=N with one of {', '.join(own | cut)}")
            (own if name in own else cut)[name] = int(number)
        pools = replace(self, kv_tokens=own["kv_tokens"], state_slots=own["state_slots"])
        return replace(pools, slice=Slice(**cut))


PRESETS = {
    "taubench": Preset(Slice(requests=150, max_answer_tokens=48), kv_tokens=16_384, state_slots=48),
    "sharegpt": Preset(Slice(requests=150, max_answer_tokens=64), kv_tokens=16_384, state_slots=48),
    "bbh": Preset(Slice(requests=324, max_answer_tokens=8), kv_tokens=16_384, state_slots=48),
    "claude_code": Preset(
        Slice(requests=80, scale=4, max_prompt_tokens=16_384, max_answer_tokens=32),
        kv_tokens=49_152,
        state_slots=48,
        flags="--chunked-prefill-size 2048",
    ),
    "mooncake": Preset(
        Slice(requests=450, scale=8, max_prompt_tokens=2_048, max_answer_tokens=8),
        kv_tokens=98_304,
        state_slots=128,
        flags="--chunked-prefill-size 1024",
    ),
}
"""By the start of a trace's file name. Where lengths are scaled down, so is the prefill chunk, from
the 8,192 tokens that SGLang takes on a large GPU."""


def configurations(sglang: Sequence[str], ours: Sequence[str]) -> list[Configuration]:
    """SGLang's default first, ours last."""
    default = [Configuration("SGLang, default", (), ours=False)]
    own = [Configuration(f"SGLang, `{f}`", tuple(shlex.split(f)), ours=False) for f in sglang if f]
    hybrid = ("--radix-cache-backend", "hybrid")
    rest = [Configuration(f"ours, `{f}`", (*hybrid, *shlex.split(f)), ours=True) for f in ours]
    return [*default, *own, Configuration("ours, default", hybrid, ours=True), *rest]


def default_model() -> Path:
    """Built once, beside the embedded default model."""
    directory = tiny_model_directory("nemotron-h-25m")
    if not (directory / "config.json").is_file():
        build_tiny_model("nemotron-h", directory, scale="25m")
    return directory


def read_slice(path: Path, preset: Preset, vocabulary: int) -> tuple[list[Request], str]:
    """The requests of a trace's slice in a model's vocabulary, and what there is to say of them.
    Raises BenchFailed where the trace cannot be read, or nothing of it is left.
    """
    try:
        cut = preset.slice.cut(read_trace(path))
    except (OSError, ValueError) as error:
        raise BenchFailed(str(error)) from None
    if not cut:
        raise BenchFailed(f"the slice of {path.name} is empty; raise its bounds")
    trace, distinct = to_vocabulary(cut, FIRST_TEXT_ID, vocabulary)
    prompts = sum(request.input_len for request in trace)
    answers = sum(len(request.tokens) - request.input_len for request in trace)
    about = (
        f"{path.name}: {len(trace)} requests of {len({r.session for r in trace})} "
        f"sessions, {prompts:,} prompt tokens, of which {reusable_tokens(trace) / prompts:.1%} "
        f"repeat something before, {answers:,} answer tokens; {preset.slice}; ids "
        f"{'numbered' if distinct else 'hashed'}."
    )
    return trace, about


def measure_each(
    chosen: Sequence[Configuration],
    common: Sequence[str],
    trace: Sequence[Request],
    concurrency: int,
    limit: float,
) -> Iterator[Result]:
    """One configuration after another, each announced on standard error."""
    for configuration in chosen:
        print(f"{configuration.name} ...", end=" ", file=sys.stderr, flush=True)
        result = measure(configuration, common, trace, concurrency, limit)
        said = result.error or f"{result.hit_rate:.1%}, {result.seconds:.0f} s"
        print(said, file=sys.stderr, flush=True)
        yield result


def ab(
    *traces: Annotated[str, {"metavar": "TRACE"}, "a file, or a trace's name"],
    paired: Annotated[bool, "all servers at once, one request at a time"] = False,
    sglang: Annotated[
        tuple[str, ...],
        {**APPENDED, "metavar": "FLAGS"},
        "a candidate for SGLang's best instead of the listed; an empty one is none",
    ] = CANDIDATES,
    ours: Annotated[
        tuple[str, ...], {**APPENDED, "metavar": "FLAGS"}, "a further one of ours"
    ] = (),
    change: Annotated[
        tuple[str, ...],
        {"metavar": "NAME=N"},
        "numbers of the slice (requests, skip, scale, max_prompt_tokens, max_total_tokens, "
        "max_answer_tokens) and of the pools (kv_tokens, state_slots) instead of the preset's",
    ] = (),
    flags: Annotated[str | None, "further flags of SGLang for every server"] = None,
    model: Annotated[Path | None, "a directory (default: nemotron-h of 25 M)"] = None,
    concurrency: Annotated[Count, "requests under way"] = 4,
    limit: Annotated[float, "seconds for a configuration"] = 1200.0,
) -> int:
    """SGLang's own prefix cache and ours on a real server: the same trace, the same pools, in turn.

    Serves SGLang's own cache at its defaults, then with every set of flags of `CANDIDATES` (or with
    those of `--sglang`), then ours at its defaults and with every `--ours`; one server at a time.
    Each is warmed up, flushed and sent the same slice of the trace in the trace's order; a
    session's next turn is sent when the one before has been answered. The model's answers are
    forced to be those of the trace, token by token, because the next turn's prompt repeats them.

    With `--paired` all servers are up at once and get each request one after another, so that what
    else the machine does slows all of them alike: for times to first token where it is not quiet.
    """
    failed = 0
    chosen = configurations(sglang, ours)
    served_by = model or default_model()
    for path in map(find, traces):
        preset = preset_of(PRESETS, path).changed(change)
        more = preset.flags if flags is None else flags
        trace, about = read_slice(path, preset, vocabulary_of(served_by))
        print(
            f"{about} {1 if paired else concurrency} at a time. "
            f"KV pool of {preset.kv_tokens:,} tokens, {preset.state_slots} state slots"
            + (f"; all with `{more}`" if more else "")
            + ".",
            flush=True,
        )
        common = [
            *flags_of(served_by, preset.kv_tokens, preset.state_slots, concurrency),
            *("--enable-metrics", *shlex.split(more)),
        ]
        results: list[Result] = []
        try:
            if paired:
                results += measure_in_pairs(chosen, common, trace, limit)
            else:
                for result in measure_each(chosen, common, trace, concurrency, limit):
                    results.append(result)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            report(results, paired)
            return 130
        failed = failed or int(bool(report(results, paired)))
    return failed
