"""`hybrid.segments` in a request's `kv_hints`: spans of its prompt that are computed apart.

The client says spans of tokens, and nothing else: where segments are stored and where they stand
follows from its prompt, its tenant and the model. Text in front of a span or between two is a
segment, too; text behind the last one is new, and attends to all of them.

Keys of attention hold the positions at which they were computed. So on a model whose attention has
positions a segment is found again where it stands at the same one, and on others anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from sglang_hybrid.core.extensions import guard
from sglang_hybrid.core.returns.hints import MOST_POSITIONS, SEGMENTS
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.schemas.declared.modular import ModularPrompt, Segment
from sglang_hybrid.extensions.schemas.declared.registry import modular_answer
from sglang_hybrid.extensions.schemas.endpoints import apart
from sglang_hybrid.extensions.schemas.endpoints.actions import one_prompt
from sglang_hybrid.extensions.schemas.endpoints.server_registry import registry_of
from sglang_hybrid.serving.requests.fields import check_single
from sglang_hybrid.serving.requests.kv_hints import take
from sglang_hybrid.serving.requests.long_requests import in_thread_if_long
from sglang_hybrid.serving.requests.payloads import check_fields
from sglang_hybrid.serving.stored_keys import check_key

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

SHORTEST: Final = 16
"""Tokens of a span: each takes a prefill and a state of its own."""

Span = tuple[int, int]
"""Positions of the first token, and of the first one behind."""


@dataclass(frozen=True)
class Spans:
    """Stands where `Expanded` does, for a prompt of spans."""

    warnings: Sequence[str]
    on_not_composed: Callable[[Mapping[str, Any]], None] = lambda told: None

    def on_answer(self, meta_info: Mapping[str, Any]) -> dict[str, Any]:
        """`meta_info.prompt` of an answer."""
        return modular_answer(meta_info, self.warnings, self.on_not_composed)


async def ask_spans(manager: TokenizerManager, request: GenerateReqInput) -> bool:
    """Make a request with `hybrid.segments` one for a prompt of segments; False for one without.
    Raises ValueError.
    """
    payload, rest = take(getattr(request, "kv_hints", None), SEGMENTS)
    if payload is None:
        return False
    one_prompt(request, SEGMENTS)
    for name in ("pml", "input_embeds", "session_params"):
        if getattr(request, name, None):
            raise ValueError(f"the request has {SEGMENTS} and {name}; give one of them.")
    if getattr(request, "expanded", None) is not None or request.contains_mm_input():
        raise ValueError(f"{SEGMENTS} is for prompts of text alone; leave modules and media out.")
    check_single(request, ("extra_key", "cache_salt", "lora_path"), SEGMENTS)
    ids = request.input_ids
    if ids is None:
        registry_of(manager)  # raises where there is no tokenizer
        if (texts := guard("texts")) is not None:
            texts.check_text(manager, request.text)
        tokenized = await in_thread_if_long(manager.tokenizer, request.text or "")
        ids = tokenized["input_ids"]
    spans = read_spans(payload, len(ids))
    check_key(request.extra_key)
    request.text, request.input_ids, request.kv_hints = None, list(ids), rest
    asked: Any = request
    if whole := apart.why_whole(manager) or registry_of(manager).whole:
        asked.expanded = Spans([whole])
    else:
        prompt = prompt_of_spans(ids, spans, manager.model_config.hf_text_config)
        asked.expanded = Spans((), apart.ask_apart(manager, request, prompt))
    return True


def read_spans(payload: Mapping[str, Any], prompt_len: int) -> list[Span]:
    """The spans in the payload of `hybrid.segments`: in their order, apart, and before the last
    token of a prompt of `prompt_len` tokens. Raises ValueError.
    """
    check_fields(SEGMENTS, payload)
    said = payload.get("segments")
    if not isinstance(said, list) or not 0 < len(said) <= MOST_POSITIONS:
        raise ValueError(
            f"segments of {SEGMENTS} is {quote(said)}; it must be a list of 1 to {MOST_POSITIONS} "
            "spans."
        )
    spans: list[Span] = []
    for at, one in enumerate(said):
        if not isinstance(one, Mapping) or one.keys() != {"start", "end"}:
            raise ValueError(
                f"segments[{at}] of {SEGMENTS} is {quote(one)}; it must be an object with start "
                "and end."
            )
        start, end = one["start"], one["end"]
        least = spans[-1][1] if spans else 0
        if (
            type(start) is not int
            or type(end) is not int
            or not (least <= start <= end - SHORTEST and end < prompt_len)
        ):
            raise ValueError(
                f"segments[{at}] of {SEGMENTS} is from {quote(start)} to {quote(end)}; in a prompt "
                f"of {prompt_len:,} tokens it begins at {least:,} or behind that, has {SHORTEST} "
                f"tokens at least, and ends before the last token, at {prompt_len - 1:,} or before."
            )
        spans.append((start, end))
    return spans


def prompt_of_spans(ids: Sequence[int], spans: Sequence[Span], config: Any) -> ModularPrompt:
    """The segments of a prompt, and the new tokens behind them. config: of the model."""
    bounds = sorted({0, *(bound for span in spans for bound in span)})
    places = has_positions(config)
    segments = tuple(
        Segment(tuple(ids[start:end]), start if places else 0) for start, end in pairwise(bounds)
    )
    return ModularPrompt(segments, tuple(ids[bounds[-1] :]), bounds[-1])


def has_positions(config: Any) -> bool:
    """False if the attention of this model does not read where its tokens stand."""
    kind = config.model_type
    if kind == "granitemoehybrid":
        return bool(config.position_embedding_type == "rope")
    return kind not in ("nemotron_h", "kimi_linear")
