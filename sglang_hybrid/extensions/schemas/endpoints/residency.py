"""The tiers that store the prefixes of a schema, as reported to its own tenant."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sglang_hybrid.explain.ranks import ask_ranks, has_our_cache
from sglang_hybrid.extensions.schemas.declared.registry import Registered, Registry
from sglang_hybrid.extensions.schemas.declared.tree import PrefixNode, as_imports, prefix_tree
from sglang_hybrid.serving.requests.long_requests import in_side_thread
from sglang_hybrid.serving.stored_keys import stored_under
from sglang_hybrid.serving.tenants import Tenant

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

MOST_PREFIXES: Final = 256
"""Prefixes of a schema that are reported, the likeliest ones."""

MOST_TOKENS: Final = 1 << 20
"""Tokens of all reported prefixes together; those that several have in common count once."""


@dataclass(frozen=True)
class AskedPrefix:
    """A prefix whose tiers are asked for. parent: index of the prefix that it continues, -1 for
    none. edge: its tokens behind that prefix. position: of its end, in tokens from the start.
    """

    node: PrefixNode
    parent: int
    edge: list[int]
    position: int


async def residency(
    manager: TokenizerManager, registry: Registry, own: Tenant, registered: Registered
) -> dict[str, Any] | None:
    """The likeliest prefixes of a schema, each with the tiers of its KV and of its state; None
    where that cannot be told. more: whether there are others.
    """
    if not has_our_cache(manager):
        return None
    try:
        prefixes, more = await in_side_thread(_likeliest, registry, registered)
    except ValueError:  # there are too many to weigh
        return None
    places = await _places(manager, own, prefixes)
    told = [
        {
            "imports": ["/".join(path) for path in asked.node.imports],
            "position": asked.position,
            "probability": asked.node.probability,
            "kv": kv,
            **({} if state is None else {"state": state}),
        }
        for asked, (kv, state) in zip(prefixes, places, strict=False)
    ]
    return {"prefixes": told, "more": more}


def _likeliest(registry: Registry, registered: Registered) -> tuple[list[AskedPrefix], bool]:
    """Parents first. Raises ValueError if the schema has too many prefixes to weigh."""
    root = prefix_tree(
        registered.schema, registered.length, registered.imports, registered.requests
    )
    found: list[AskedPrefix] = []
    tokens = came = 0
    waiting: list[tuple[float, int, PrefixNode, int, int]] = []

    def add(node: PrefixNode, parent: int, level: int) -> None:
        nonlocal came
        for child in node.children:
            came += 1
            heapq.heappush(waiting, (-child.probability, came, child, parent, level))

    add(root, -1, 1)
    while waiting and len(found) < MOST_PREFIXES and tokens < MOST_TOKENS:
        _, _, node, parent, level = heapq.heappop(waiting)
        tokenized = registry.expand_path(registered, as_imports(node.imports))
        position = tokenized.piece_ends[level - 1]
        start = found[parent].position if parent >= 0 else 0
        found.append(AskedPrefix(node, parent, tokenized.ids[start:position], position))
        tokens += position - start
        add(node, len(found) - 1, level + 1)
    return found, bool(waiting)


async def _places(
    manager: TokenizerManager, own: Tenant, prefixes: Sequence[AskedPrefix]
) -> list[tuple[str, str | None]]:
    from sglang_hybrid.explain.messages import ResidencyReq, ResidencyReqOutput
    from sglang_hybrid.explain.prefix_tiers import fastest

    if not prefixes:
        return []
    extra_key, cache_salt = own or (None, None)
    asked = ResidencyReq(
        prefixes=[(prefix.parent, prefix.edge) for prefix in prefixes],
        extra_key=stored_under(extra_key, None),
        cache_salt=cache_salt,
    )
    answers = await ask_ranks(manager, asked, ResidencyReqOutput)
    return fastest([answer.places for answer in answers])
