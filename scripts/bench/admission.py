"""Hit rates of traces on the real cache with real pools and no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sglang_hybrid.hooks import patching

patching.install()

from scripts.bench.report import Table  # noqa: E402
from scripts.bench.traces import SIZES, find, preset_of  # noqa: E402
from sglang_hybrid.core.costs.cost import CostModel  # noqa: E402
from sglang_hybrid.replay.simulation.traces.formats import read_trace  # noqa: E402
from sglang_hybrid.replay.simulation.traces.lines import Reading  # noqa: E402
from sglang_hybrid.replay.simulation.traces.requests import Request  # noqa: E402
from tests.cache.backends import options  # noqa: E402
from tests.cache.driver import Server, Sizes, build_cache  # noqa: E402

COST = CostModel(
    linear=2 * 7 * 10**9,
    quadratic=4 * 4 * 4096,
    windows=(),
    kv_bytes_per_token=65_536,
    state_bytes=26_787_840,
)
LONGEST_PROMPT = 40_000


@dataclass(frozen=True)
class Preset:
    """The first `requests` of a trace that are not too long, and pools that they do not fit."""

    requests: int
    kv: int
    slots: tuple[int, ...]

    def read(self, path: Path) -> list[Request]:
        requests = read_trace(path, Reading(4 * self.requests, max_input=32_768))
        return [one for one in requests if len(one.tokens) < LONGEST_PROMPT][: self.requests]


PRESETS = {
    "taubench": Preset(800, 150_000, (60, 200)),
    "sharegpt": Preset(307, 150_000, (30, 80)),
    "bbh": Preset(324, 60_000, (20, 60)),
    "claude_code": Preset(400, 800_000, (50, 150)),
    "mooncake": Preset(500, 600_000, (60, 200)),
}
CACHES = {
    "SGLang's own": None,
    "ours, sglang-lru + all": ("sglang-lru", "all"),
    "ours, sglang-lru": ("sglang-lru", "judicious"),
    "ours, marconi": ("marconi", "judicious"),
    "ours, reuse": ("reuse", "judicious"),
}


def hit_rate(
    requests: list[Request], kv: int, slots: int, how: tuple[str, str] | None, **more: Any
) -> float:
    """Percent of the prompt tokens. A running request holds three slots under SGLang's tracking,
    one where checkpoints are planned.
    """
    planned = how is not None and how[1] == "judicious"
    context = max(len(request.tokens) for request in requests) + 8
    sizes = Sizes(kv=kv, states=slots, extra_buffer=not planned, grid=64, rows=8, context=context)
    built = build_cache(sizes, None if how is None else options(*how, **more), COST)
    hits = Server(built, sizes, chunk=2_048).play(requests)
    return 100 * sum(hits) / sum(request.input_len for request in requests)


def admission(
    *traces: Annotated[str, {"metavar": "TRACE"}, "a file, or a trace's name"],
    min_branch_tokens: Annotated[tuple[int, ...], "compare these under reuse"] = (),
) -> None:
    """Hit rates of traces on the real cache with real pools and no model, in seconds.

    SGLang's own cache at its defaults, the same with ours under `sglang-lru` + `all`, and our
    policies with planned checkpoints, on pools of so many KV tokens and state slots; one request at
    a time, prefill chunks of 2,048 tokens, SGLang's grid of 64. Costs are the paper's 7B model's.
    """
    columns: list[tuple[str, tuple[str, str] | None, dict[str, Any]]]
    columns = [(name, how, {}) for name, how in CACHES.items()]
    if min_branch_tokens:
        columns = [
            (f">= {n}", ("reuse", "judicious"), {"hybrid_min_branch_tokens": n})
            for n in min_branch_tokens
        ]
    table = Table("trace", "requests", "KV tokens", "slots", *(name for name, _, _ in columns))
    for path in map(find, traces or SIZES):
        preset = preset_of(PRESETS, path)
        requests = preset.read(path)
        for slots in preset.slots:
            rates = [hit_rate(requests, preset.kv, slots, how, **more) for _, how, more in columns]
            name = path.name.split(".")[0]
            cells = (f"{rate:.1f}" for rate in rates)
            table.row(name, len(requests), f"{preset.kv:,}", slots, *cells)
