"""Values of a request that the cache reads, the server's own and those that clients set: checked
and put on the tokenized request. SGLang's tokenizer manager calls this for every request, from HTTP
or an engine (patch 0015). All other checks are the guard's (extensions/guard/checks.py).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_hybrid.core.extensions import guard
from sglang_hybrid.core.returns.hints import EXACT
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.serving.names import check_name
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.requests.cache_fields import CacheFields, server_part
from sglang_hybrid.serving.requests.ids import own_ids, refuse_health_check
from sglang_hybrid.serving.routes import current_route
from sglang_hybrid.serving.stored_keys import check_key

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.io_struct import (
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

NATIVE = ("/generate", "/encode", "/classify", "/vertex_generate")
"""Endpoints whose body is SGLang's own request object, with fields that only the server sets."""

SET_BY_THE_SERVER = (
    "received_time",  # would be every tenant's clock
    "http_worker_ipc",
    "lora_id",
    "multi_item_delimiter_indices",
    "token_indices_to_pool",
    "positional_embed_overrides",
    "embed_overrides",
    "decision_layout",
    "is_cross_encoder_request",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "encoder_urls",
    "custom_labels",  # a label that the metrics do not have ends the server
    "return_bytes",
)

SAMPLING_OF_THE_SERVER = ("ebnf_full_assistant",)
"""Fields of `SamplingParams` that SGLang's endpoints put there."""

PRIVATE = "__"
"""Keys of `custom_params` that begin so are SGLang's own."""

NAMES = (
    "rid",
    "lora_path",
    "routing_key",
    "conversation_id",
    "bootstrap_host",
    "bootstrap_pair_key",
)


def read_headers(
    request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None
) -> None:
    """Join what the headers of an HTTP request say to the client's own hints. Raises ValueError."""
    if http is not None and isinstance(request, GenerateReqInput):
        request.kv_hints = kv_hints.with_headers(request.kv_hints, http.headers)


def normalize(request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None) -> None:
    """SGLang's `normalize_batch_and_arguments`, whose mistakes are ValueErrors under the guard.

    http: the HTTP request that it came with, if it did.
    """
    path = getattr(getattr(http, "scope", {}).get("route"), "path", "")
    body = getattr(http, "_json", None)
    if path in NATIVE:
        _reject_server_fields(request, body)
    _reject_private_params(body)
    for name in NAMES:
        check_name(name, getattr(request, name, None))
    if not path.startswith("/health"):
        refuse_health_check(request.rid)
    checks = guard("checks")
    if checks is None:
        _normalize(request, http)
    else:
        checks.normalize(request, http, _normalize)


def _normalize(request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None) -> None:
    """Each prompt gets an id of its tenant's, and those of a batch what the server gave it."""
    request.normalize_batch_and_arguments()
    for name in ("rid", "sampling_params"):
        value = getattr(request, name)
        for one in [value] if request.is_single else value:
            if isinstance(one, list):
                raise ValueError(f"{name} is {quote(one)}; a request of one prompt has one.")
    own_ids(request, http)
    if not request.is_single:
        for item in range(len(request.rid)):
            part = request[item]  # SGLang makes the requests of a batch now, and keeps them
            for name in ("expanded", "server_part"):
                if name in request.__dict__:
                    setattr(part, name, copy.copy(getattr(request, name)))


def check(
    manager: TokenizerManager,
    request: GenerateReqInput | EmbeddingReqInput,
    input_ids: Sequence[int] | None,
) -> None:
    """One request of a batch, tokenized."""
    ids = () if input_ids is None else input_ids
    checks = guard("checks")
    if checks is not None:
        checks.check(manager, request, ids)
    if isinstance(request, GenerateReqInput):
        if getattr(request, "expanded", None) is None:
            check_key(request.extra_key)
        part = server_part(request)
        said = kv_hints.read(request.kv_hints, len(ids))
        if part.imported is not None and said.positions:
            raise ValueError(
                "a prompt of mode 'modular' declares positions in kv_hints, which have no effect "
                "there; leave them out."
            )
        said = said.joined(part.hints)
        if part.place is not None:
            said = said.joined(part.place(ids))
        part.fields = CacheFields(said, part.imported, current_route())
        if said.exact and (request.session_params or {}).get("id"):
            raise ValueError(
                f"a request of a session asks for {EXACT}; its session's KV may come from "
                "smaller copies, so send it without session_params."
            )


def to_wire(
    manager: TokenizerManager,
    request: GenerateReqInput | EmbeddingReqInput,
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
) -> None:
    """Put our fields on a tokenized request."""
    if isinstance(request, GenerateReqInput):
        tokenized.hybrid = server_part(request).fields
    checks = guard("checks")
    if checks is not None:
        checks.to_wire(manager, tokenized)


def _reject_server_fields(
    request: GenerateReqInput | EmbeddingReqInput, body: Mapping[str, Any] | None
) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(request)}
    for name in (body or {}).keys() & _sent_fields() - defaults.keys():
        raise ValueError(f"{name} is no field of a request; the server makes it, so leave it out.")
    for name in SET_BY_THE_SERVER:
        value = getattr(request, name, None)
        if value is not None and value is not defaults[name]:
            raise ValueError(
                f"{name} is {quote(value)}; the server sets it itself, so leave it out."
            )
    params = request.sampling_params
    for one in params if isinstance(params, list) else [params]:
        for name in SAMPLING_OF_THE_SERVER:
            if isinstance(one, dict) and one.get(name) is not None:
                raise ValueError(
                    f"sampling_params.{name} is set by the server itself; leave it out."
                )
        _reject_private_params(one)


def _reject_private_params(said: object) -> None:
    """Refuse private fields of a body, or of sampling parameters."""
    params = said.get("custom_params") if isinstance(said, dict) else None
    for key in params if isinstance(params, dict) else ():
        if isinstance(key, str) and key.startswith(PRIVATE):
            raise ValueError(
                f"custom_params has the key {quote(key)}; keys that begin with {PRIVATE} are the "
                "server's own."
            )


@cache
def _sent_fields() -> frozenset[str]:
    """The fields of tokenized requests."""
    kinds = (io_struct.TokenizedGenerateReqInput, io_struct.TokenizedEmbeddingReqInput)
    return frozenset(field.name for kind in kinds for field in msgspec.structs.fields(kind))
