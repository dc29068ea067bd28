"""SGLang's own prefix cache and ours on real servers: the same trace, the same bytes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from scripts.bench.commands import APPENDED
from scripts.bench.measured import Configuration, measure_in_pairs, report
from scripts.bench.report import BenchFailed
from scripts.bench.servers import flags_of, vocabulary_of
from scripts.bench.traces import SIZES, find, preset_of
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models import build_tiny_model, tiny_model_directory
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.slices import (
    Slice,
    reusable_tokens,
    to_vocabulary,
)

RUNNING = 4
"""Requests that a server may run at once."""


@dataclass(frozen=True)
class Preset:
    """A slice of a trace, and pools in which it does not fit."""

    slice: Slice
    kv_tokens: int
    state_slots: int
    flags: str = ""

    def changed(self, changes: Sequence[str]) -> Preset:
        """The preset with other numbers, given as NAME=N. Raises BenchFailed for another name."""
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
"""Presets by the start of a trace's file name. Where lengths are scaled, so is the prefill chunk,
from the 8,192 tokens that SGLang takes on a large GPU."""


def configurations(sglang: Sequence[str], ours: Sequence[str]) -> list[Configuration]:
    """SGLang's default first, ours last."""
    default = [Configuration("SGLang, default", (), ours=False)]
    own = [Configuration(f"SGLang, `{f}`", tuple(shlex.split(f)), ours=False) for f in sglang]
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


def ab(
    *traces: Annotated[str, {"metavar": "TRACE"}, "a file, or a trace's name (default: all five)"],
    sglang: Annotated[
        tuple[str, ...], {**APPENDED, "metavar": "FLAGS"}, "SGLang's own cache with these, too"
    ] = (),
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
    limit: Annotated[float, "seconds for a trace"] = 1200.0,
) -> int:
    """SGLang's own prefix cache and ours on real servers of the same bytes, request by request.

    All servers are up at once: SGLang's own cache at its defaults and with every `--sglang`, ours
    at its defaults and with every `--ours`. Each is warmed up and flushed. Then every request of a
    slice of the trace is sent to one after another, another one first each time, so that what else
    the machine does slows all of them alike. The model's answers are forced to be those of the
    trace, token by token, because the next turn's prompt repeats them.

    The bytes that each server has for KV and states together are printed, and it is an error where
    they differ.
    """
    failed = False
    chosen = configurations(sglang, ours)
    served_by = model or default_model()
    for path in map(find, traces or SIZES):
        preset = preset_of(PRESETS, path).changed(change)
        more = preset.flags if flags is None else flags
        trace, about = read_slice(path, preset, vocabulary_of(served_by))
        print(
            f"{about} KV pool of {preset.kv_tokens:,} tokens, {preset.state_slots} state slots"
            + (f"; all with `{more}`" if more else "")
            + ".",
            flush=True,
        )
        common = [
            *flags_of(served_by, preset.kv_tokens, preset.state_slots, RUNNING),
            *("--enable-metrics", *shlex.split(more)),
        ]
        results = measure_in_pairs(chosen, common, served_by, trace, limit)
        failed = report(results) or failed
    return int(failed)
