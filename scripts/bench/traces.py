"""Traces that several benchmarks replay or send, and traffic made from a seed."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeVar

from scripts.bench.report import ROOT, BenchFailed
from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.server_settings import Serving
from sglang_hybrid.core.traffic.requests import Request
from sglang_hybrid.extensions.cpu.models.tokenizer import FIRST_TEXT_ID
from sglang_hybrid.extensions.lab.runner import Runner
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import Draw
from sglang_hybrid.extensions.lab.simulation.traces.formats import read_trace
from sglang_hybrid.extensions.lab.simulation.traces.generators import Traffic, generate, traffic
from sglang_hybrid.extensions.lab.simulation.traces.lines import (
    Reading,
    numbered_lines,
    write_line,
)
from sglang_hybrid.extensions.lab.simulation.traces.slices import to_vocabulary

TRACES = ROOT.parent / "shared" / "traces"
SIZES: dict[str, tuple[float, ...]] = {  # GB, by trace
    "taubench_airline": (5, 10),
    "sharegpt_55": (2, 4),
    "bbh_fewshot": (1, 2, 4),
    "claude_code_64k": (20, 40, 80),
    "mooncake_conversation_trace": (40, 80),
}
GENERATED: dict[str, tuple[float, ...]] = {
    "chat": (0.5, 1, 2),
    "agent": (5, 10),
    "few-shot": (1, 2, 4),
    "fan-out": (2, 5),
    "transcript": (1, 2, 3, 5),
}
Folder = Annotated[Path, "the folder of the traces"]
Seeds = Annotated[int | None, {"metavar": "SEEDS"}, "generated traffic instead, from these seeds"]
"""Types of options: the folder of the traces, and the seeds of traffic generated instead."""

AGENTS = "agentx_dev"
AGENT_SIZES = (5, 10, 20, 40)
"""Conversations of agents at their full length, up to 707,000 tokens, and GB for them."""

WORKFLOWS = 40
WORKFLOW_SIZES = (1, 2, 4, 8)
"""Generated workflows of agents, and GB for them."""

COST = CostModel.paper_7b()
RULES = {"paper": None, "served": Serving(), "one": Serving(one_memory=True)}
"""Rules by which requests are served in a replay: the paper's, or a server's."""

Preset = TypeVar("Preset")
Row = tuple[str, float]  # trace, GB
Phase = tuple[str, Traffic]
"""A kind of generated traffic, and its parameters."""


def find(name: str, folder: Path = TRACES) -> Path:
    """A trace's file, by its path or by its name in the folder. Raises BenchFailed."""
    for path in (Path(name), folder / f"{name}.jsonl.gz"):
        if path.is_file():
            return path
    raise BenchFailed(f"{name} is neither a file nor one of the traces in {folder.name}/")


def preset_of(presets: Mapping[str, Preset], trace: Path) -> Preset:
    """The preset whose name the trace's file name begins with. Raises BenchFailed."""
    for name, preset in presets.items():
        if trace.name.startswith(name):
            return preset
    raise BenchFailed(f"no preset is for {trace.name}; there are {', '.join(presets)}")


def read_named(folder: Path, name: str) -> list[Request]:
    """One of SIZES; Mooncake's are the first 2,000 of at most 32 Ki tokens."""
    limit = 2_000 if name.startswith("mooncake") else None
    return read_trace(find(name, folder), Reading(limit, max_input=32_768))


def write_longer(trace: Path, requests: int, longer: Path) -> None:
    """Write `requests` requests to `longer`: those of Mooncake's `trace` again and again, hour
    after hour. Each time its conversations are new ones of the same lengths, which share as much
    among each other; blocks that one request in a hundred has (a system prompt) stay the same.
    """
    lines = [json.loads(line) for _, line in numbered_lines(trace)]
    uses = Counter(block for line in lines for block in set(line["hash_ids"]))
    common = {block for block, used in uses.items() if 100 * used >= len(lines)}
    span, blocks = lines[-1]["timestamp"] + 1_000, max(uses) + 1
    with longer.open("wb") as file:
        for number in range(requests):
            again, at = divmod(number, len(lines))
            line = lines[at]
            ids = [one if one in common else one + again * blocks for one in line["hash_ids"]]
            arrival = line["timestamp"] + again * span
            write_line(file, {**line, "timestamp": arrival, "hash_ids": ids})


def read_agents(folder: Path) -> tuple[Runner, list[Row]]:
    """The conversations of `AGENTS`, one beginning each 100 s, and their rows. Raises
    BenchFailed.
    """
    packed = folder / f"{AGENTS}.tar.gz"
    if not packed.is_file():
        raise BenchFailed(f"{packed.name} is not in {folder.name}/")
    with TemporaryDirectory() as unpacked, tarfile.open(packed) as archive:
        archive.extractall(unpacked, filter="data")
        found = read_trace(Path(unpacked) / AGENTS, Reading(session_rate=0.01), "blocks")
    return Runner({AGENTS: found}), rows_of({AGENTS: AGENT_SIZES})


def generate_workflows() -> tuple[Runner, list[Row]]:
    """Generated workflows of agents, whose roles and tools have names, and their rows."""
    made = generate("workflow", traffic("workflow", sessions=WORKFLOWS), seed=0)
    return Runner({"workflow": made}), rows_of({"workflow": WORKFLOW_SIZES})


def read_or_generate(folder: Path, seeds: int | None) -> tuple[Runner, list[Row]]:
    """The traces of SIZES, or with `seeds` so many of each kind of GENERATED, and their rows."""
    if not seeds:
        return Runner({name: read_named(folder, name) for name in SIZES}), rows_of(SIZES)
    sizes: dict[str, Sequence[float]] = {}
    traces: dict[str, Sequence[Request]] = {}
    for kind, gigabytes in GENERATED.items():
        how = traffic(kind, sessions=60) if kind == "agent" else traffic(kind)
        for seed in range(seeds):
            traces[f"{kind} {seed}"] = generate(kind, how, seed)
            sizes[f"{kind} {seed}"] = gigabytes
    return Runner(traces), rows_of(sizes)


def read_and_generate(folder: Path, seeds: int) -> tuple[Runner, list[Row]]:
    """The traces of SIZES and so many of each kind of GENERATED, and their rows."""
    (runner, rows), (made, more) = (read_or_generate(folder, it) for it in (None, seeds))
    return Runner({**runner.traces, **made.traces}), rows + more


def rows_of(sizes: Mapping[str, Sequence[float]]) -> list[Row]:
    return [(trace, size) for trace, gigabytes in sizes.items() for size in gigabytes]


def documents(count: int, templates: int, shared: Draw, question: Draw | None = None) -> Phase:
    """Questions behind long documents that are shared; short answers."""
    how = traffic(
        "few-shot",
        sessions=count,
        templates=templates,
        shared=shared,
        question=question,
        answer=Draw("const", 4),
    )
    return "few-shot", how


def chats(count: int, **more: Draw) -> Phase:
    """Sessions of some turns, one beginning each second."""
    return "chat", traffic("chat", sessions=count, session_rate=1.0, **more)


def in_phases(phases: Sequence[Phase], seed: int) -> list[list[Request]]:
    """Traffic of each phase, each from a seed of its own."""
    return [generate(kind, how, seed + nth) for nth, (kind, how) in enumerate(phases)]


def in_vocabulary(traces: Sequence[Sequence[Request]], size: int) -> list[list[Request]]:
    """Traces whose tokens are text tokens of a model with a vocabulary of `size`."""
    return [to_vocabulary(trace, FIRST_TEXT_ID, size)[0] for trace in traces]
