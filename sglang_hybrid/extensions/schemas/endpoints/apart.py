"""Requests of modular mode: a prompt that names its segments, and those that compute them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.schemas.composition.losses import why_refused
from sglang_hybrid.extensions.schemas.declared.modular import (
    Layout,
    ModularPrompt,
    Segment,
    prepared_segments,
)
from sglang_hybrid.extensions.schemas.declared.registry import Expanded
from sglang_hybrid.extensions.schemas.endpoints.prewarm import compute, gone_from
from sglang_hybrid.extensions.schemas.endpoints.server_registry import registry_of
from sglang_hybrid.serving.config import BACKEND
from sglang_hybrid.serving.requests.cache_fields import Imported, ServerPart, server_part
from sglang_hybrid.serving.stored_keys import check_key, composed_key, segment_key
from sglang_hybrid.serving.tenants import Tenant, tenant

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_computing: set[asyncio.Task[None]] = set()  # tasks, which nobody else holds
_under_way: set[tuple[Any, ...]] = set()  # their segments, each with its tenant and its adapter


@lru_cache(maxsize=1)
def why_whole(manager: TokenizerManager) -> str:
    """The reason why modules cannot be computed apart here, a sentence; empty if they can."""
    if manager.server_args.radix_cache_backend != BACKEND:
        return (
            f"Modules are computed apart with --radix-cache-backend {BACKEND} only, so the prompt "
            "was computed as a whole."
        )
    if manager.server_args.page_size not in (None, 1):
        return (
            f"Pages have {manager.server_args.page_size} tokens, and modules end within pages, so "
            "the prompt was computed as a whole."
        )
    if not CostModel.from_config(manager.model_config.hf_config.to_dict()).state_bytes:
        return ""
    if why := why_refused(manager.model_config.hf_text_config.model_type):
        return f"{why[0].upper()}{why[1:]}, so the prompt was computed as a whole."
    if manager.server_args.speculative_algorithm is not None:
        return (
            "With speculative decoding no states are left where modules end, so the prompt was "
            "computed as a whole."
        )
    return ""


def ask(manager: TokenizerManager, request: GenerateReqInput, expanded: Expanded) -> None:
    """Make `request` one for a prompt of modules. Raises ValueError if it cannot be."""
    check_key(request.extra_key)
    server_part(request).hints = PromptHints(tuple(expanded.positions))
    if expanded.modular is not None:
        expanded.on_not_composed = ask_apart(manager, request, expanded.modular)
    request.expanded = expanded


def ask_apart(
    manager: TokenizerManager, request: GenerateReqInput, prompt: ModularPrompt
) -> Callable[[Mapping[str, Any]], None]:
    """Make `request` one for modules computed apart; returns what computes the segments that its
    answer says are missing. Raises ValueError if its positions do not fit. One without segments is
    a prompt like others.
    """
    if not prompt.segments:
        return lambda told: None
    if isinstance(request.sampling_params, list):
        raise ValueError("sampling_params is a list; a prompt of modules is a single one.")
    answer = (request.sampling_params or {}).get("max_new_tokens")
    last = prompt.last_position + (answer if isinstance(answer, int) else 0)  # checked later
    if last >= manager.context_len:
        raise ValueError(
            f"the places of modules, the new text and the answer end at position {last:,}; the "
            f"model has {manager.context_len:,}."
        )
    request.input_ids = prompt.ids
    key, salt, adapter = request.extra_key, request.cache_salt, request.lora_path
    request.extra_key = composed_key(key, prompt.digest)
    places = tuple((one.start, len(one.ids)) for one in prompt.segments)
    server_part(request).imported = Imported(places, prompt.position, key)

    begun: set[int] = set()  # by an earlier sample of the prompt

    def on_not_composed(told: Mapping[str, Any]) -> None:
        registry_of(manager).whole = told.get("composes_nothing", "")
        missing = [at for at in told.get("missing_segments", ()) if at not in begun]
        begun.update(missing)
        names = {(key, salt, adapter, prompt.segments[at]): None for at in missing}
        new = [name for name in names if name not in _under_way]
        if not new:
            return
        segments = [segment for *_, segment in new]
        work = compute_apart(manager, key, salt, segments, adapter=adapter)
        task = asyncio.get_running_loop().create_task(work)
        _computing.add(task)
        _under_way.update(new)

        def on_done(task: asyncio.Task[None]) -> None:
            _computing.discard(task)
            _under_way.difference_update(new)

        task.add_done_callback(on_done)

    return on_not_composed


async def compute_apart(
    manager: TokenizerManager,
    extra_key: str | None,
    cache_salt: str | None,
    segments: Iterable[Segment],
    http: fastapi.Request | None = None,
    *,
    adapter: Any = None,
) -> None:
    """Compute each of these segments apart. extra_key: of the client. http: the request that waits
    for them, if one does; raises ValueError when its client goes away. adapter: the name of the one
    with which they are computed.
    """
    gone = gone_from(http)
    for one in segments:
        if gone is not None and await gone():
            raise ValueError("the client went away before its modules were computed.")
        owner = tenant(segment_key(extra_key, one.start), cache_salt)
        part = ServerPart(imported=Imported((), one.start, extra_key))
        await compute(manager, "segment", owner, one.ids, part, http, adapter)


async def compute_all(
    manager: TokenizerManager, own: Tenant, layout: Layout, http: fastapi.Request
) -> dict[str, int]:
    """Compute every module of a schema that holds no values, for one tenant; returns how many
    segments and tokens that were. Raises ValueError where modules cannot be computed apart, and
    when the client of `http` goes away.
    """
    why = why_whole(manager) or registry_of(manager).whole
    if why:
        raise ValueError(why.replace(", so the prompt was computed as a whole", ""))
    extra_key, cache_salt = own or (None, None)
    segments = prepared_segments(layout)
    await compute_apart(manager, extra_key, cache_salt, segments, http)
    return {"segments": len(segments), "tokens": sum(len(one.ids) for one in segments)}
