"""`hybrid.import` and `hybrid.prewarm` in a request's `kv_hints`: actions that are done before a
scheduler sees the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sglang_hybrid.chats.fields import PromptSchema
from sglang_hybrid.core.extensions import guard
from sglang_hybrid.core.returns.hints import IMPORT, PREWARM
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.explain.prompt_route import is_prompt_query
from sglang_hybrid.extensions.schemas.endpoints.chat import prompt_of
from sglang_hybrid.extensions.schemas.endpoints.prewarm import gone_from, turns_of
from sglang_hybrid.serving.requests.fields import check_single
from sglang_hybrid.serving.requests.kv_hints import take
from sglang_hybrid.serving.requests.long_requests import in_thread_if_long
from sglang_hybrid.serving.requests.payloads import read_rate
from sglang_hybrid.serving.tenants import tenant_of_prompt

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from sglang_hybrid.extensions.schemas.declared.resolve import Prompt


@dataclass(frozen=True)
class Waits:
    """A request that waits for its turn. rate: tokens per second, as `read_rate` returns it."""

    rate: float | None


def imported_prompt(request: Any) -> Prompt | None:
    """The imports of `hybrid.import` in the request's hints, None without one. The action is taken
    out. Raises ValueError.
    """
    payload, rest = take(getattr(request, "kv_hints", None), IMPORT)
    if payload is None:
        return None
    one_prompt(request, IMPORT)
    try:
        prompt = prompt_of(PromptSchema.model_validate(payload))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the payload"
        raise ValueError(
            f"{place} of {IMPORT} is {quote(first['input'])}: {first['msg']}."
        ) from None
    request.kv_hints = rest
    return prompt


def prepare_prewarm(request: Any) -> None:
    """A request with `hybrid.prewarm` generates nothing and waits for its turn. Raises
    ValueError.
    """
    payload, rest = take(getattr(request, "kv_hints", None), PREWARM)
    if payload is None:
        return
    one_prompt(request, PREWARM)
    check_single(request, ("sampling_params",), PREWARM)
    request.prewarm = Waits(read_rate(payload))
    request.sampling_params = {**(request.sampling_params or {}), "max_new_tokens": 0}
    request.kv_hints = rest


async def take_turn(manager: TokenizerManager, request: Any, http: fastapi.Request | None) -> None:
    """Return when `request` may run: at once, unless it has `hybrid.prewarm` and is to run. Raises
    ValueError if its client has gone.

    http: the HTTP request that it came with, if it did.
    """
    waits: Waits | None = getattr(request, "prewarm", None)
    if waits is None or is_prompt_query():
        return
    tokens = 0 if waits.rate is None else await _length(manager, request)
    own = tenant_of_prompt(request)
    payer = None if own is None else own.payer
    await turns_of(manager).take(tokens, waits.rate, gone_from(http), payer)


async def _length(manager: TokenizerManager, request: Any) -> int:
    """Tokens of a request's prompt. Raises ValueError for a text that cannot fit."""
    if request.input_ids or not request.text or manager.tokenizer is None:
        return len(request.input_ids or ())
    if (texts := guard("texts")) is not None:
        texts.check_text(manager, request.text)
    return len((await in_thread_if_long(manager.tokenizer, request.text))["input_ids"])


def one_prompt(request: Any, kind: str) -> None:
    """Raise ValueError for a batch, which may not have the action `kind`."""
    ids = request.input_ids
    if isinstance(request.text, list) or (bool(ids) and isinstance(ids[0], list)):
        raise ValueError(f"kv_hints has {kind}, which is for a request of one prompt.")
