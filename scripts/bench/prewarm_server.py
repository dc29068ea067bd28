"""What pre-warming a schema saves on a real server: the budgeted choice, all prefixes, and LRU.

The schema and the skewed imports of `prewarm`, on a server whose memory holds so many states of
modules with their KV. It learns the imports from `--requests` prompts. "ready": the share of the
next prompts' tokens that is stored right after pre-warming, asked of the server without sending
them (`/hybrid_cache/explain`), beside what the plan expected. "served": the share that is not
computed when these prompts are then sent, each of them leaving its own states. LRU keeps a state at
the end of each module; "cold" it begins empty, "warm" after the prompts that were learnt from.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from scripts.bench.prewarm import SIZES, choose
from scripts.bench.report import Table, positive
from scripts.bench.servers import exactly, flush, hybrid_cache, post
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.models import ensure_default_model
from sglang_hybrid.prompts.endpoints.prewarm import prompts_for
from sglang_hybrid.prompts.schemas.budget import all_prefixes
from sglang_hybrid.prompts.schemas.registry import Registry
from sglang_hybrid.prompts.schemas.schema import Schema, Union
from sglang_hybrid.prompts.schemas.tokens import PromptTokenizer
from sglang_hybrid.prompts.schemas.tree import prefix_tree
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.server_process import ServerProcess

WORDS = [
    "the",
    "keeper",
    "counts",
    "lanterns",
    "in",
    "a",
    "quiet",
    "room",
    "of",
    "archive",
    "before",
    "many",
    "open",
]
LENGTH = 60
RUNNING = 1_024
"""Tokens of room for the request that runs, beside what is to be held."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--states", type=positive, nargs="+", default=[16, 64, 256])
    parser.add_argument("--requests", type=positive, default=300)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> None:
    heads = ("budgeted, expected", "ready", "all prefixes, ready")
    served = ("budgeted, served", "all prefixes, served", "LRU, cold", "LRU, warm")
    table = Table("states", *heads, *served, text=0)
    for states in options.states:
        budgeted = _pre_warmed(states, options)
        cold, warm = _lru(states, options)
        shares = [
            *(budgeted.expected, budgeted.ready, budgeted.plain_ready),
            *(budgeted.served, budgeted.plain_served, cold, warm),
        ]
        table.row(states, *(f"{share:.1%}" for share in shares))


@dataclass(frozen=True)
class PreWarmed:
    """Shares of prompt tokens; plain: with all prefixes, level by level."""

    expected: float
    ready: float
    served: float
    plain_ready: float
    plain_served: float


class Traffic:
    """Prompts of the schema for one server, and what it says of them."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        tokenizer = PreTrainedTokenizerFast.from_pretrained(ensure_default_model())
        self.registry = Registry(PromptTokenizer(tokenizer))
        self.registered = self.registry.register(None, markup())
        source = random.Random(options.seed)
        unions = _unions(self.registered.schema)
        prompts = [choose(unions, source) for _ in range(2 * options.requests)]
        self.learnt, self.measured = prompts[: options.requests], prompts[options.requests :]
        post(self.url, "/v1/prompt_schemas", {"pml": markup()})

    @property
    def name(self) -> str:
        return self.registered.schema.name

    def send(self, prompts: Sequence[tuple[str, ...]]) -> float:
        """The share of the tokens of these prompts that came from the cache."""
        metas = [
            post(self.url, "/generate", {"pml": self._pml(prompt), "text": " Go.", **exactly(1)})[
                "meta_info"
            ]
            for prompt in prompts
        ]
        cached, prompt_tokens = (
            sum(int(meta[name]) for meta in metas) for name in ("cached_tokens", "prompt_tokens")
        )
        return cached / prompt_tokens

    def ready(self, prompts: Sequence[tuple[str, ...]]) -> float:
        """The share that would come from the cache now."""
        hits = tokens = 0
        for prompt in prompts:
            ids = self.registry.expand(None, self._pml(prompt), text=" Go.").tokenized.ids
            hits += post(self.url, "/hybrid_cache/explain", {"input_ids": ids})["hit"]
            tokens += len(ids)
        return hits / tokens

    def mean_tokens(self, prompts: Sequence[tuple[str, ...]]) -> float:
        """Tokens of a prompt."""
        expanded = (self.registry.expand(None, self._pml(one), text=" Go.") for one in prompts)
        return sum(len(one.tokenized.ids) for one in expanded) / len(prompts)

    def budgeted(self, budget: int) -> float:
        """Pre-warm as the server chooses; returns the tokens that it expects to save."""
        body = {"budget_mb": budget / (1 << 20)}
        told = post(self.url, f"/v1/prompt_schemas/{self.name}/prewarm", body)
        saved: float = told["expected_saved_tokens"]
        return saved

    def all_prefixes(self, budget: int, state_bytes: int, kv_bytes: int) -> None:
        """Compute prefixes level by level until one does not fit into the budget."""
        length = self.registry.tokenizer.length
        root = prefix_tree(self.registered.schema, length, {}, 0)
        plan = all_prefixes(root, budget, state_bytes, kv_bytes)
        for one in prompts_for(self.registry, self.registered, plan.nodes):
            inside = [at for at in one.positions if at < len(one.ids)]
            hints = {"kv_hints": kv_hints.write(PromptHints(tuple(inside)))} if inside else {}
            post(self.url, "/generate", {"input_ids": one.ids, **hints, **exactly(0)})

    def _pml(self, prompt: tuple[str, ...]) -> str:
        return f'<prompt schema="{self.name}">{"".join(f"<{name}/>" for name in prompt)}</prompt>'


def markup() -> str:
    """The schema, each module of it with other words."""
    unions = "".join(
        "<union>" + "".join(_module(at, number) for number in range(size)) + "</union>"
        for at, size in enumerate(SIZES)
    )
    return f'<schema name="pupil">{unions}</schema>'


def _module(at: int, number: int) -> str:
    source = random.Random(f"{at} {number}")
    words = " ".join(source.choice(WORDS) for _ in range(LENGTH))
    return f'<module name="m{at}.{number}">{words}. </module>'


def _pre_warmed(states: int, options: argparse.Namespace) -> PreWarmed:
    with ServerProcess(_flags(states), timeout=600) as running:
        traffic = Traffic(running.url, options)
        sizes = hybrid_cache(running.url)
        state_bytes, kv_bytes = sizes["state_bytes"], sizes["kv_bytes_per_token"]
        budget = states * (state_bytes + LENGTH * kv_bytes)
        tokens = traffic.mean_tokens(traffic.measured)
        traffic.send(traffic.learnt)
        flush(traffic.url)
        expected = traffic.budgeted(budget) / tokens
        ready, served = _ready_and_served(traffic)
        plain = _ready_and_served(
            traffic, lambda: traffic.all_prefixes(budget, state_bytes, kv_bytes)
        )
        return PreWarmed(expected, ready, served, *plain)


def _ready_and_served(
    traffic: Traffic, prepare: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    prepare()
    found = traffic.ready(traffic.measured), traffic.send(traffic.measured)
    flush(traffic.url)
    return found


def _lru(states: int, options: argparse.Namespace) -> tuple[float, float]:
    with ServerProcess([*_flags(states), "--hybrid-eviction", "lru"], timeout=600) as running:
        traffic = Traffic(running.url, options)
        traffic.send(traffic.learnt)
        warm = traffic.send(traffic.measured)
        flush(traffic.url)
        return traffic.send(traffic.measured), warm


def _flags(states: int) -> list[str]:
    """One memory for so many states, their KV, and a request."""
    return [
        *("--hybrid-memory", "one", "--max-running-requests", "1"),
        *("--max-total-tokens", str(states * LENGTH + RUNNING)),
        *("--max-mamba-cache-size", str(states + 2)),
    ]


def _unions(schema: Schema) -> list[Union]:
    return [part for part in schema.parts if isinstance(part, Union)]
