"""Prepare the prefixes of a schema before anybody asks for them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.records.pin import PinRequest, Priority
from sglang_hybrid.core.returns.hints import MOST_POSITIONS, PromptHints
from sglang_hybrid.extensions.schemas.declared.budget import Plan, best_prefixes
from sglang_hybrid.extensions.schemas.declared.registry import Registered, Registry
from sglang_hybrid.extensions.schemas.declared.tree import PrefixNode, as_imports, prefix_tree
from sglang_hybrid.serving.requests.cache_fields import ServerPart
from sglang_hybrid.serving.tenants import Tenant

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

IDLE_CHECK = 0.02
"""Seconds between two checks whether requests run."""

AT_ONCE = 20
"""Prompts that wait and look so often; more of them look more seldom, so that the event loop, in
which they look, has time for other requests.
"""

LONGEST_WAIT = 86_400.0
"""Seconds that a rate holds up a payer's next prompt at most, and that it is remembered: a day."""


MOST_PAYERS = 1 << 12
"""Payers whose rates are remembered, the latest ones: a client may name any number of them."""


class Unasked:
    """Stands where `Expanded` does, for a prompt that the server itself sends."""

    def on_answer(self, meta_info: Any) -> None:
        """Do nothing: nobody reads the answer."""


@dataclass(frozen=True)
class Prepared:
    """A prompt to prefill: its tokens, and the positions at which checkpoints are wanted."""

    ids: list[int]
    positions: list[int]


def plan_for(registered: Registered, budget: int, state_bytes: int, kv_bytes: int) -> Plan:
    """The prefixes of a schema that are worth most within `budget` bytes, by the imports seen."""
    root = prefix_tree(
        registered.schema, registered.length, registered.imports, registered.requests
    )
    return best_prefixes(root, budget, state_bytes, kv_bytes)


def prompts_for(
    registry: Registry, registered: Registered, nodes: Sequence[PrefixNode]
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


class PrewarmTurns:
    """The times at which prompts that no client waits for may be computed.

    busy: returns whether requests run. clock: returns seconds.
    """

    def __init__(
        self, busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._busy = busy
        self._clock = clock
        self._due: dict[str | None, float] = {}
        self._waiting = 0

    async def take(
        self,
        tokens: int,
        rate: float | None,
        gone: Callable[[], Awaitable[bool]] | None = None,
        payer: str | None = None,
    ) -> None:
        """Return when a prompt of so many `tokens` may run: while no other request does, or at
        `rate` tokens per second even then. gone: whether its client waits no more; raises
        ValueError if so, also where the prompt might run. payer: whose the rate is; a slow one
        holds up no other's prompts.
        """
        while True:
            if gone is not None and await gone():
                raise ValueError("the client went away before its prompt was computed.")
            now = self._clock()
            due = max(now, self._due.get(payer, now))
            if not self._busy() or (rate is not None and due == now):
                break
            self._waiting += 1
            try:
                await asyncio.sleep(IDLE_CHECK * max(1.0, self._waiting / AT_ONCE))
            finally:
                self._waiting -= 1
        if rate is not None:
            self._due.pop(payer, None)  # so that the first one is that of the longest ago
            self._due[payer] = min(due + tokens / rate, now + LONGEST_WAIT)
            if len(self._due) > MOST_PAYERS:
                del self._due[next(iter(self._due))]


@lru_cache(maxsize=1)
def turns_of(manager: TokenizerManager) -> PrewarmTurns:
    """The turns of this server."""
    return PrewarmTurns(lambda: bool(manager.rid_to_state))


async def prefill(
    manager: TokenizerManager,
    tenant: Tenant,
    prepared: Sequence[Prepared],
    rate: float | None = None,
    pinned: tuple[float, Priority] | None = None,
    http: fastapi.Request | None = None,
) -> None:
    """Compute these prompts, one after the other, as `PrewarmTurns.take` lets them. pinned: the
    lifetime, in seconds, and the priority with which they are pinned; None: they are not. http: the
    request that asked for it, if one did. When its client goes away, the prompt that is being
    computed is aborted (SGLang asks every few seconds), the others are left out, and ValueError
    is raised.
    """
    payer = None if tenant is None else tenant.payer
    for one in prepared:
        await turns_of(manager).take(len(one.ids), rate, gone_from(http), payer)
        positions = one.positions[-MOST_POSITIONS:]
        if pinned is None:
            said = PromptHints(tuple(at for at in positions if at < len(one.ids)))
        else:
            said = PromptHints(pins=tuple(PinRequest(at, *pinned) for at in positions))
        await compute(manager, "prewarm", tenant, one.ids, ServerPart(said), http)


async def compute(
    manager: TokenizerManager,
    purpose: str,
    tenant: Tenant,
    ids: Sequence[int],
    part: ServerPart,
    http: fastapi.Request | None,
    adapter: Any = None,
) -> None:
    """Prefill one prompt of the server itself; nothing is generated. purpose: begins its id. part:
    what is said of it. http: the request that waits for it, if one does. adapter: the name of the
    one with which it is computed.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    extra_key, cache_salt = tenant or (None, None)
    request: Any = GenerateReqInput(
        rid=f"{purpose}-{uuid.uuid4().hex}",
        input_ids=list(ids),
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        extra_key=extra_key,
        cache_salt=cache_salt,
        lora_path=adapter,
    )
    request.expanded, request.server_part = Unasked(), part
    async for _ in manager.generate_request(request, http):
        pass


def gone_from(http: fastapi.Request | None) -> Callable[[], Awaitable[bool]] | None:
    """A function that tells whether the client of an HTTP request has gone; None without one."""
    return None if http is None else http.is_disconnected
