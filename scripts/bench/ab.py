"""SGLang's own prefix cache and ours on a real server: the same trace, the same pools, in turn.

    python scripts/bench.py ab TRACE ... [--paired] [--json FILE] [--sglang FLAGS] [--ours FLAGS]

Serves SGLang's own cache at its defaults, then with every set of flags of `CANDIDATES` (or with
those of `--sglang`), then ours at its defaults and with every `--ours`; one server at a time. Each
is warmed up, flushed and sent the same slice of the trace in the trace's order; a session's next
turn is sent when the one before has been answered. The model's answers are forced to be those of
the trace, token by token, because the next turn's prompt repeats them.

With `--paired` all servers are up at once and get each request one after another, so that what else
the machine does slows all of them alike: for times to first token where it is not quiet.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from scripts.bench.measured import Configuration, Result, measure, measure_in_pairs, report
from scripts.bench.report import BenchFailed, positive
from scripts.bench.servers import flags_of, vocabulary_of
from scripts.bench.traces import find, preset_of
from sglang_hybrid.models import build_tiny_model, default_model_directory
from sglang_hybrid.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.simulation.traces.formats import read_trace
from sglang_hybrid.simulation.traces.requests import Request
from sglang_hybrid.simulation.traces.slices import Slice, reusable_tokens, to_vocabulary

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


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a file, or a trace's name")
    parser.add_argument("--preset", choices=PRESETS, help="default: by the trace's file name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every outcome goes there")
    cut = parser.add_argument_group("slice (each overrides the preset)")
    cut.add_argument("--requests", type=positive)
    cut.add_argument("--skip", type=int, help="requests of the trace left out at its start")
    cut.add_argument("--scale", type=positive, help="keep one token of so many")
    cut.add_argument("--max-prompt-tokens", type=int, help="leave longer prompts out")
    cut.add_argument("--max-total-tokens", type=int, help="prompt tokens of the slice at most")
    cut.add_argument("--max-answer-tokens", type=int, help="cut answers, also where repeated")
    server = parser.add_argument_group("server, the same for every configuration")
    server.add_argument("--model-path", help="a directory (default: nemotron-h of 25 M)")
    server.add_argument("--kv-tokens", type=int, help="the KV pool (--max-total-tokens)")
    server.add_argument("--state-slots", type=int, help="--max-mamba-cache-size")
    server.add_argument("--running", type=int, help="--max-running-requests (--concurrency)")
    server.add_argument("--flags", help="further flags of SGLang for every configuration")
    parser.add_argument("--concurrency", type=positive, default=4, help="requests under way")
    parser.add_argument(
        "--paired", action="store_true", help="all servers at once, one request at a time"
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        help="seconds per second of the trace between arrivals (default: as fast as answered)",
    )
    parser.add_argument(
        "--limit", type=float, default=1200.0, help="seconds for a configuration (%(default)s)"
    )
    parser.add_argument(
        "--sglang",
        action="append",
        metavar="FLAGS",
        help="a candidate for SGLang's best instead of the listed; an empty one is none",
    )
    parser.add_argument(
        "--ours", action="append", metavar="FLAGS", default=[], help="a further one of ours"
    )


def configurations(sglang: Sequence[str], ours: Sequence[str]) -> list[Configuration]:
    """SGLang's default first, ours last."""
    default = [Configuration("SGLang, default", (), ours=False)]
    own = [Configuration(f"SGLang, `{f}`", tuple(shlex.split(f)), ours=False) for f in sglang if f]
    hybrid = ("--radix-cache-backend", "hybrid")
    rest = [Configuration(f"ours, `{f}`", (*hybrid, *shlex.split(f)), ours=True) for f in ours]
    return [*default, *own, Configuration("ours, default", hybrid, ours=True), *rest]


def default_model() -> Path:
    """Built once, beside the embedded default model."""
    directory = default_model_directory("nemotron-h-25m")
    if not (directory / "config.json").is_file():
        build_tiny_model("nemotron-h", directory, scale="25m")
    return directory


@dataclass(frozen=True)
class Comparison:
    """One trace's slice in a model's vocabulary, and what all configurations have in common."""

    trace: list[Request]
    common: list[str]
    concurrency: int
    slice: Slice
    about: str

    @classmethod
    def of(cls, path: Path, options: argparse.Namespace) -> Comparison:
        """Raises BenchFailed where the trace cannot be read, or nothing of it is left."""
        preset = PRESETS[options.preset] if options.preset else preset_of(PRESETS, path)
        given = {
            one.name: getattr(options, one.name)
            for one in fields(Slice)
            if getattr(options, one.name) is not None
        }
        how = replace(preset.slice, **given)
        concurrency = 1 if options.paired else options.concurrency
        kv_tokens = options.kv_tokens or preset.kv_tokens
        slots = options.state_slots or preset.state_slots
        flags = preset.flags if options.flags is None else options.flags
        model = Path(options.model_path) if options.model_path else default_model()
        try:
            cut = how.cut(read_trace(path))
        except (OSError, ValueError) as error:
            raise BenchFailed(str(error)) from None
        if not cut:
            raise BenchFailed(f"the slice of {path.name} is empty; raise its bounds")
        trace, distinct = to_vocabulary(cut, FIRST_TEXT_ID, vocabulary_of(model))
        prompts = sum(request.input_len for request in trace)
        answers = sum(len(request.tokens) - request.input_len for request in trace)
        about = (
            f"{path.name}: {len(trace)} requests of {len({r.session for r in trace})} "
            f"sessions, {prompts:,} prompt tokens, of which {reusable_tokens(trace) / prompts:.1%} "
            f"repeat something before, {answers:,} answer tokens; {how}; ids "
            f"{'numbered' if distinct else 'hashed'}. {concurrency} at a time. "
            f"KV pool of {kv_tokens:,} tokens, {slots} state slots"
            + (f"; all with `{flags}`" if flags else "")
            + "."
        )
        common = [
            *flags_of(model, kv_tokens, slots, options.running or options.concurrency),
            *("--enable-metrics", *shlex.split(flags)),
        ]
        return cls(trace, common, concurrency, how, about)

    def results(self, options: argparse.Namespace) -> Iterator[Result]:
        """One configuration after another, or all at once with --paired."""
        candidates = CANDIDATES if options.sglang is None else options.sglang
        chosen = configurations(candidates, options.ours)
        if options.paired:
            yield from measure_in_pairs(chosen, self.common, self.trace, options.limit)
            return
        for configuration in chosen:
            print(f"{configuration.name} ...", end=" ", file=sys.stderr, flush=True)
            result = measure(
                configuration,
                self.common,
                self.trace,
                self.concurrency,
                options.time_scale,
                options.limit,
            )
            said = result.error or f"{result.hit_rate:.1%}, {result.seconds:.0f} s"
            print(said, file=sys.stderr, flush=True)
            yield result


def run(options: argparse.Namespace) -> int:
    records, failed = [], 0
    for name in options.traces:
        path = find(name)
        comparison = Comparison.of(path, options)
        print(comparison.about, flush=True)
        results: list[Result] = []
        try:
            for result in comparison.results(options):
                results.append(result)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            failed = 130
        failed = failed or int(bool(report(results, options.paired)))
        records.append(
            {
                "trace": path.name,
                "slice": asdict(comparison.slice),
                "common": comparison.common,
                "results": [result.record() for result in results],
            }
        )
        if failed == 130:
            break
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return failed
