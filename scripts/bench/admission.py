"""Hit rates of traces on the real cache with real pools and no model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from sglang_hybrid.hooks import patching

patching.install()

from scripts.bench.report import Table  # noqa: E402
from scripts.bench.traces import SIZES, find, preset_of  # noqa: E402
from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries  # noqa: E402
from sglang_hybrid.core.costs.cost import CostModel  # noqa: E402
from sglang_hybrid.core.traffic.requests import Request  # noqa: E402
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace  # noqa: E402
from sglang_hybrid.extensions.lab.simulation.traces.lines import Reading  # noqa: E402
from tests.cache.backends import options  # noqa: E402
from tests.cache.driver import Server, Sizes, build_cache  # noqa: E402
from tests.traces import REPLY_OPENER, leave_out_thoughts  # noqa: E402

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


@dataclass(frozen=True)
class Cache:
    """SGLang's own, or ours under `policies`: an eviction and an admission. boundaries: what is
    known of where replies begin.
    """

    policies: tuple[str, str] | None = None
    boundaries: MessageBoundaries | None = None

    def hit_rate(self, requests: list[Request], kv: int, slots: int) -> float:
        """Percent of the prompt tokens. A running request holds three slots under SGLang's
        tracking, one where checkpoints are planned.
        """
        planned = self.policies is not None and self.policies[1] == "judicious"
        context = max(len(request.tokens) for request in requests) + 8
        sizes = Sizes(
            kv=kv, states=slots, extra_buffer=not planned, grid=64, rows=8, context=context
        )
        ours = None if self.policies is None else options(*self.policies)
        built = build_cache(sizes, ours, COST, message_boundaries=self.boundaries)
        hits = Server(built, sizes, chunk=2_048).play(requests)
        return 100 * sum(hits) / sum(request.input_len for request in requests)


REUSE = Cache(("reuse", "judicious"))
CACHES = {
    "SGLang's own": Cache(),
    "ours, sglang-lru + all": Cache(("sglang-lru", "all")),
    "ours, sglang-lru": Cache(("sglang-lru", "judicious")),
    "ours, marconi": Cache(("marconi", "judicious")),
    "ours, reuse": REUSE,
}
OF_THOUGHTS = {
    "SGLang's own": Cache(),
    "ours, states at prompts' ends": REUSE,
    "ours": replace(REUSE, boundaries=MessageBoundaries(reply_opener=REPLY_OPENER)),
}


def admission(
    *traces: Annotated[str, {"metavar": "TRACE"}, "a file, or a trace's name"],
    thoughts: Annotated[bool, "prompts of a model whose thoughts are left out of history"] = False,
) -> None:
    """Hit rates of traces on the real cache with real pools and no model, in seconds.

    SGLang's own cache at its defaults, the same with ours under `sglang-lru` + `all`, and our
    policies with planned checkpoints, on pools of so many KV tokens and state slots; one request at
    a time, prefill chunks of 2,048 tokens, SGLang's grid of 64. Costs are the paper's 7B model's.
    With --thoughts each prompt ends as those of models that think do, and later ones of the same
    chat leave it there: SGLang's own, ours with states at prompts' ends, and ours.
    """
    columns = OF_THOUGHTS if thoughts else CACHES
    table = Table("trace", "requests", "KV tokens", "slots", *columns)
    for path in map(find, traces or SIZES):
        preset = preset_of(PRESETS, path)
        requests = preset.read(path)
        if thoughts:
            requests = leave_out_thoughts(requests)
        for slots in preset.slots:
            rates = [cache.hit_rate(requests, preset.kv, slots) for cache in columns.values()]
            name = path.name.split(".")[0]
            cells = (f"{rate:.1f}" for rate in rates)
            table.row(name, len(requests), f"{preset.kv:,}", slots, *cells)
