"""What pre-warming a schema saves, with states alone and on a real server."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Container, Sequence

from transformers import PreTrainedTokenizerFast

from scripts.bench.commands import Count
from scripts.bench.report import Table
from scripts.bench.servers import exactly, flush, hybrid_cache, post
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model
from sglang_hybrid.extensions.schemas.declared.budget import all_prefixes, best_prefixes
from sglang_hybrid.extensions.schemas.declared.registry import Registry
from sglang_hybrid.extensions.schemas.declared.schema import Schema, Union, read_schema
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer
from sglang_hybrid.extensions.schemas.declared.tree import PrefixNode, prefix_tree
from sglang_hybrid.extensions.schemas.endpoints.prewarm import prompts_for
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.server_process import ServerProcess

SIZES = (6, 4, 6, 5, 5, 4)
"""Modules of each union of the schema."""
LENGTH = 60
"""Words of a module."""
WORDS = (
    *("the", "keeper", "counts", "lanterns", "in", "a", "quiet", "room", "of", "archive"),
    *("before", "many", "open"),
)

Prompt = tuple[str, ...]
"""The modules that a prompt imports, one of each union."""


def markup() -> str:
    """The schema, each module of it with other words."""

    def module(at: int, number: int) -> str:
        source = random.Random(f"{at} {number}")
        words = " ".join(source.choice(WORDS) for _ in range(LENGTH))
        return f'<module name="m{at}.{number}">{words}. </module>'

    unions = (
        f"<union>{''.join(module(at, number) for number in range(size))}</union>"
        for at, size in enumerate(SIZES)
    )
    return f'<schema name="pupil">{"".join(unions)}</schema>'


def draw_prompts(schema: Schema, requests: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to learn from, and as many to measure, by the skewed distribution of imports."""
    source = random.Random(seed)
    unions = [part for part in schema.parts if isinstance(part, Union)]

    def choose() -> Prompt:
        return tuple(
            source.choices(
                [module.name for module in union.modules],
                [2.0**-rank for rank in range(len(union.modules))],
            )[0]
            for union in unions
        )

    drawn = [choose() for _ in range(2 * requests)]
    return drawn[:requests], drawn[requests:]


def prewarm(
    states: tuple[Count, ...] = (16, 64, 256), requests: Count = 5_000, seed: int = 0
) -> None:
    """What pre-warming a schema saves: the budgeted choice, all prefixes level by level, and LRU.

    A schema of six unions with 14,400 selections is asked for with skewed imports: of each union
    the first module is imported by half of the prompts, the second by a quarter, and so on; the
    choices are independent. States are the only memory. LRU keeps a state at the end of each module
    of each prompt and evicts the one used longest ago; it is counted once it has seen as many
    prompts as are counted.
    """
    schema = read_schema(markup())
    learnt, measured = draw_prompts(schema, requests, seed)
    counts: dict[tuple[str, ...], int] = {
        (module.name,): sum(module.name in prompt for prompt in learnt)
        for module in schema.modules()
    }
    tokens = len(SIZES) * LENGTH
    print(f"Share of {tokens} prompt tokens that need not be computed, by states held:\n")
    table = Table("states", "budgeted", "expected", "level by level", "LRU", text=0)
    for held in states:
        root = prefix_tree(schema, lambda text: len(text.split()), counts, requests)
        budget = held * 1_000  # a state is 1,000 bytes; KV takes nothing
        best = best_prefixes(root, budget, 1_000, 0)
        plain = all_prefixes(root, budget, 1_000, 0)
        saved = (
            tokens_hit(best.nodes, measured),
            best.saved,
            tokens_hit(plain.nodes, measured),
            tokens_hit_by_lru(learnt, measured, held),
        )
        table.row(f"{held:,}", *(f"{each / tokens:.1%}" for each in saved))


def tokens_hit(nodes: Sequence[PrefixNode], prompts: Sequence[Prompt]) -> float:
    """Mean tokens from the cache if exactly these prefixes are held."""
    held = {tuple(path[-1] for path in node.imports) for node in nodes}
    return sum(deepest(held, prompt) for prompt in prompts) * LENGTH / len(prompts)


def tokens_hit_by_lru(learnt: Sequence[Prompt], measured: Sequence[Prompt], states: int) -> float:
    """Mean tokens of the measured prompts from a cache of so many states."""
    held: OrderedDict[Prompt, None] = OrderedDict()
    total = 0
    for at, prompt in enumerate([*learnt, *measured]):
        hit = deepest(held.keys(), prompt)
        total += hit if at >= len(learnt) else 0
        for end in range(max(hit, 1), len(prompt) + 1):  # the hit itself, and what is computed
            held[prompt[:end]] = None
            held.move_to_end(prompt[:end])
        while len(held) > states:
            held.popitem(last=False)
    return total * LENGTH / len(measured)


def deepest(held: Container[Prompt], prompt: Prompt) -> int:
    """Modules of the longest prefix that is held."""
    return next((end for end in range(len(prompt), 0, -1) if prompt[:end] in held), 0)


RUNNING = 1_024
"""Tokens of room for the request that runs, beside what is to be held."""


def prewarm_server(
    states: tuple[Count, ...] = (16, 64, 256), requests: Count = 300, seed: int = 0
) -> None:
    """What pre-warming a schema saves on a real server: the budgeted choice, all prefixes, and LRU.

    The schema and the skewed imports of `prewarm`, on a server whose memory holds so many states of
    modules with their KV. It learns the imports from `--requests` prompts. "ready": the share of
    the next prompts' tokens that is stored right after pre-warming, asked of the server without
    sending them (`/hybrid_cache/explain`), beside what the plan expected. "served": the share that
    is not computed when these prompts are then sent, each of them leaving its own states. LRU keeps
    a state at the end of each module; "cold" it begins empty, "warm" after the prompts that were
    learnt from.
    """
    heads = ("budgeted, expected", "ready", "all prefixes, ready")
    served = ("budgeted, served", "all prefixes, served", "LRU, cold", "LRU, warm")
    table = Table("states", *heads, *served, text=0)
    for held in states:
        memory = [
            *("--hybrid-memory", "one", "--max-running-requests", "1"),
            *("--max-total-tokens", str(held * LENGTH + RUNNING)),
            *("--max-mamba-cache-size", str(held + 2)),
        ]
        with ServerProcess(memory, timeout=600) as server:
            traffic = Traffic(server.url, requests, seed)
            traffic.send(traffic.learnt)
            flush(traffic.url)
            expected = traffic.prewarm(held)
            ready, budgeted = traffic.ready_and_served()
            traffic.prewarm_all_prefixes(held)
            plain_ready, plain = traffic.ready_and_served()
        with ServerProcess([*memory, "--hybrid-eviction", "lru"], timeout=600) as server:
            traffic = Traffic(server.url, requests, seed)
            traffic.send(traffic.learnt)
            warm = traffic.send(traffic.measured)
            flush(traffic.url)
            cold = traffic.send(traffic.measured)
        shares = (expected, ready, plain_ready, budgeted, plain, cold, warm)
        table.row(held, *(f"{share:.1%}" for share in shares))


class Traffic:
    """Prompts of the schema for one server, and what the server says of them."""

    def __init__(self, url: str, requests: int, seed: int) -> None:
        self.url = url
        tokenizer = PreTrainedTokenizerFast.from_pretrained(ensure_tiny_model())
        self.registry = Registry(PromptTokenizer(tokenizer))
        self.registered = self.registry.register(None, markup())
        self.schema = self.registered.schema
        self.learnt, self.measured = draw_prompts(self.schema, requests, seed)
        post(url, "/v1/prompt_schemas", {"pml": markup()})
        sizes = hybrid_cache(url)
        self.state_bytes, self.kv_bytes = sizes["state_bytes"], sizes["kv_bytes_per_token"]

    def send(self, prompts: Sequence[Prompt]) -> float:
        """The share of the tokens of these prompts that came from the cache."""
        bodies = ({"pml": self._pml(one), "text": " Go.", **exactly(1)} for one in prompts)
        metas = [post(self.url, "/generate", body)["meta_info"] for body in bodies]
        cached, tokens = (
            sum(int(meta[name]) for meta in metas) for name in ("cached_tokens", "prompt_tokens")
        )
        return cached / tokens

    def ready_and_served(self) -> tuple[float, float]:
        """Shares of the measured prompts: that would come from the cache now, and that does when
        they are sent. The cache is empty after it.
        """
        hits = [
            post(self.url, "/hybrid_cache/explain", {"input_ids": ids})["hit"]
            for ids in self._tokens()
        ]
        ready = sum(hits) / sum(map(len, self._tokens()))
        served = self.send(self.measured)
        flush(self.url)
        return ready, served

    def prewarm(self, states: int) -> float:
        """Pre-warm as the server chooses; returns the share that it expects to save."""
        body = {"budget_mb": self._budget(states) / (1 << 20)}
        told = post(self.url, f"/v1/prompt_schemas/{self.schema.name}/prewarm", body)
        tokens = sum(map(len, self._tokens())) / len(self.measured)
        return float(told["expected_saved_tokens"]) / tokens

    def prewarm_all_prefixes(self, states: int) -> None:
        """Compute prefixes level by level until one does not fit into the budget."""
        root = prefix_tree(self.schema, self.registry.tokenizer.length, {}, 0)
        plan = all_prefixes(root, self._budget(states), self.state_bytes, self.kv_bytes)
        for one in prompts_for(self.registry, self.registered, plan.nodes):
            inside = [at for at in one.positions if at < len(one.ids)]
            hints = {"kv_hints": kv_hints.write(PromptHints(tuple(inside)))} if inside else {}
            post(self.url, "/generate", {"input_ids": one.ids, **hints, **exactly(0)})

    def _budget(self, states: int) -> int:
        """Bytes of so many states of modules with their KV."""
        return int(states * (self.state_bytes + LENGTH * self.kv_bytes))

    def _tokens(self) -> list[list[int]]:
        """Of all measured prompts."""
        expanded = (self.registry.expand(None, self._pml(p), text=" Go.") for p in self.measured)
        return [one.tokenized.ids for one in expanded]

    def _pml(self, prompt: Prompt) -> str:
        imports = "".join(f"<{name}/>" for name in prompt)
        return f'<prompt schema="{self.schema.name}">{imports}</prompt>'
