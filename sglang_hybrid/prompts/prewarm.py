"""Prepare the prefixes of a schema before anybody asks for them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_hybrid.prompts.budget import Plan, best_prefixes
from sglang_hybrid.prompts.registry import Registered, Registry
from sglang_hybrid.prompts.tree import Node, as_imports, prefix_tree
from sglang_hybrid.requests.kv_hints import MOST_POSITIONS, checkpoint_hint
from sglang_hybrid.tenants import Tenant

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

IDLE_CHECK = 0.02
"""Seconds between two looks whether requests run."""


@dataclass(frozen=True)
class Prepared:
    """A prompt to prefill: its tokens, and the positions at which checkpoints are wanted."""

    ids: list[int]
    positions: list[int]


def plan_for(
    registry: Registry, registered: Registered, budget: int, state_bytes: int, kv_bytes: int
) -> Plan:
    """The prefixes of a schema that are worth most within `budget` bytes, by the imports seen."""
    root = prefix_tree(
        registered.schema, registry.tokenizer.length, registered.imports, registered.requests
    )
    return best_prefixes(root, budget, state_bytes, kv_bytes)


def prompts_for(
    registry: Registry, registered: Registered, nodes: Sequence[Node]
) -> list[Prepared]:
    """Prompts that pass all `nodes`, each of them once; the longest cover those before them."""
    chosen = set(nodes)
    passed = {above for node in nodes for above in node.above()}
    prepared = []
    for node in nodes:
        if node in passed:
            continue
        tokenized = registry.expand_path(registered, as_imports(node.imports))
        path = [node, *node.above()]
        held = [len(path) - at for at, one in enumerate(path) if one in chosen]
        positions = sorted(tokenized.piece_ends[level - 1] for level in held)
        prepared.append(Prepared(tokenized.ids[: positions[-1]], positions))
    return prepared


async def prefill(manager: TokenizerManager, tenant: Tenant, prepared: Sequence[Prepared]) -> None:
    """Compute these prompts, one after the other, each while no other request runs."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    extra_key, cache_salt = tenant or (None, None)
    for one in prepared:
        while manager.rid_to_state:
            await asyncio.sleep(IDLE_CHECK)
        inside = [at for at in one.positions if at < len(one.ids)][-MOST_POSITIONS:]
        request: Any = GenerateReqInput(
            rid=f"prewarm-{uuid.uuid4().hex}",
            input_ids=one.ids,
            sampling_params={"max_new_tokens": 0, "temperature": 0},
            extra_key=extra_key,
            cache_salt=cache_salt,
            kv_hints=checkpoint_hint(inside) if inside else None,
        )
        async for _ in manager.generate_request(request, None):
            pass
