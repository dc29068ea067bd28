"""What pre-warming a schema saves: the budgeted choice, all prefixes level by level, and LRU.

A schema of six unions with 14,400 selections is asked for with skewed imports: of each union the
first module is imported by half of the prompts, the second by a quarter, and so on; the choices are
independent. States are the only memory. LRU keeps a state at the end of each module of each prompt
and evicts the one used longest ago; it is counted once it has seen as many prompts as are counted.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Sequence

from scripts.bench.report import Table, positive
from sglang_hybrid.prompts.schemas.budget import all_prefixes, best_prefixes
from sglang_hybrid.prompts.schemas.schema import Union, read_schema
from sglang_hybrid.prompts.schemas.tree import PrefixNode, prefix_tree

SIZES = (6, 4, 6, 5, 5, 4)
WORDS = 60


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--states", type=positive, nargs="+", default=[16, 64, 256])
    parser.add_argument("--requests", type=positive, default=5_000)
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> None:
    schema = read_schema(_markup())
    unions = [part for part in schema.parts if isinstance(part, Union)]
    source = random.Random(options.seed)
    prompts = [choose(unions, source) for _ in range(2 * options.requests)]
    counts: dict[tuple[str, ...], int] = {
        (module.name,): sum(module.name in prompt for prompt in prompts[: options.requests])
        for module in schema.modules()
    }
    tokens = len(SIZES) * WORDS
    print(f"Share of {tokens} prompt tokens that need not be computed, by states held:\n")
    table = Table("states", "budgeted", "expected", "level by level", "LRU", text=0)
    for states in options.states:
        root = prefix_tree(schema, _words, counts, options.requests)
        budget = states * 1_000  # a state is 1,000 bytes; KV takes nothing
        best = best_prefixes(root, budget, 1_000, 0)
        plain = all_prefixes(root, budget, 1_000, 0)
        measured = prompts[options.requests :]
        table.row(
            f"{states:,}",
            f"{_hit(best.nodes, measured) / tokens:.1%}",
            f"{best.saved / tokens:.1%}",
            f"{_hit(plain.nodes, measured) / tokens:.1%}",
            f"{_lru(prompts, states, options.requests) / tokens:.1%}",
        )


def _markup() -> str:
    unions = "".join(
        "<union>"
        + "".join(
            f'<module name="m{at}.{number}">{"word " * WORDS}</module>' for number in range(size)
        )
        + "</union>"
        for at, size in enumerate(SIZES)
    )
    return f'<schema name="pupil">{unions}</schema>'


def _words(text: str) -> int:
    return len(text.split())


def choose(unions: Sequence[Union], source: random.Random) -> tuple[str, ...]:
    """One module of each union, by the skewed distribution."""
    return tuple(
        source.choices(
            [module.name for module in union.modules],
            [2.0**-rank for rank in range(len(union.modules))],
        )[0]
        for union in unions
    )


def _hit(nodes: Sequence[PrefixNode], prompts: Sequence[tuple[str, ...]]) -> float:
    """Mean tokens from the cache if exactly these prefixes are held."""
    held = {tuple(path[-1] for path in node.imports) for node in nodes}
    return sum(_deepest(held, prompt) for prompt in prompts) * WORDS / len(prompts)


def _lru(prompts: Sequence[tuple[str, ...]], states: int, skip: int) -> float:
    """Mean tokens from a cache of so many states, without its first `skip` prompts."""
    held: OrderedDict[tuple[str, ...], None] = OrderedDict()
    total = 0
    for at, prompt in enumerate(prompts):
        hit = _deepest(held.keys(), prompt)
        total += hit if at >= skip else 0
        for end in range(max(hit, 1), len(prompt) + 1):  # the hit itself, and what is computed
            held[prompt[:end]] = None
            held.move_to_end(prompt[:end])
        while len(held) > states:
            held.popitem(last=False)
    return total * WORDS / (len(prompts) - skip)


def _deepest(held: object, prompt: tuple[str, ...]) -> int:
    """Modules of the longest prefix that is held."""
    found = (end for end in range(len(prompt), 0, -1) if prompt[:end] in held)  # type: ignore[operator]
    return next(found, 0)
