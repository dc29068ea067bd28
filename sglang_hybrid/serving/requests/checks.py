"""What SGLang's tokenizer manager calls for every request, from HTTP or an engine (patch 0015)."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import TypeAdapter, ValidationError
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams

from sglang_hybrid.core.returns.hints import EXACT
from sglang_hybrid.core.sentences import shown
from sglang_hybrid.serving.requests import fields, kv_hints
from sglang_hybrid.serving.requests.cache_fields import CacheFields, server_part
from sglang_hybrid.serving.requests.ids import own_ids
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
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "encoder_urls",
    "custom_labels",  # a label that the metrics do not have ends the server
)

INTERNAL = frozenset(
    (
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "stop_regex_max_len",
        "is_normalized",
    )
)
"""Fields of `SamplingParams` that SGLang works out."""

DECODERS = ("torchcodec", "decord")
"""Packages of which SGLang needs one to read a video."""

HEAVY = ("input_ids", "input_text", "mm_inputs", "time_stats")
"""Of a tokenized request: fields that are large, and whose types are right."""

_PLACE = re.compile(r" - at `\$\[(?P<index>\d+)\](?P<rest>[^`]*)`")


def read_headers(
    request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None
) -> None:
    """Join what the headers of an HTTP request say to the client's own hints. Raises ValueError."""
    if http is not None and isinstance(request, GenerateReqInput):
        request.kv_hints = kv_hints.with_headers(request.kv_hints, http.headers)


def normalize(request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None) -> None:
    """SGLang's `normalize_batch_and_arguments`, whose mistakes are ValueErrors here.

    http: the HTTP request that it came with, if it did.
    """
    path = getattr(getattr(http, "scope", {}).get("route"), "path", "")
    if path in NATIVE:
        _only_what_clients_set(request)
    if not path.startswith("/health"):
        _no_health_check(request.rid)
    _samples(request.sampling_params)
    try:
        request.normalize_batch_and_arguments()
        own_ids(request, http)
        if not request.is_single:
            for item in range(len(request.rid)):
                part = request[item]  # SGLang makes the requests of a batch now, and keeps them
                for name in ("expanded", "server_part"):
                    if name in request.__dict__:
                        setattr(part, name, copy.copy(getattr(request, name)))
    except (TypeError, LookupError, AttributeError, AssertionError) as error:
        raise ValueError(
            f"the fields of the request do not fit together ({error}); each is one value, or a "
            "list with one for every prompt."
        ) from error
    parts = [request] if request.is_single else [request[i] for i in range(len(request.rid))]
    for part in parts:
        _media(part, http)


def check(
    manager: TokenizerManager,
    request: GenerateReqInput | EmbeddingReqInput,
    input_ids: Sequence[int] | None,
) -> None:
    """One request of a batch, tokenized."""
    ids = () if input_ids is None else input_ids
    media = request.contains_mm_input()
    in_session = bool((getattr(request, "session_params", None) or {}).get("id"))
    if not ids and not media and not in_session and getattr(request, "input_embeds", None) is None:
        given = "input_ids" if request.text is None else "text"
        value = shown(getattr(request, given))
        raise ValueError(f"{given} is {value}; a prompt must have one token at least.")
    if not media:  # a processor has put ids of its own there
        context = manager.context_len
        fields.token_ids("input_ids", ids[:context], manager.model_config.vocab_size)
    fields.sampling_params(
        request.sampling_params, _schema(manager.sampling_params_class), INTERNAL
    )
    if in_session or getattr(request, "session_params", None):
        fields.typed("session_params", request.session_params, _schema(SessionParams))
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        positions = getattr(request, name, None)
        if positions is not None:
            fields.positions(name, positions, len(ids))
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
        part.fields = CacheFields(said, part.imported)
        if in_session and said.exact:
            raise ValueError(
                f"a request of a session asks for {EXACT}; its session's KV may come from "
                "smaller copies, so send it without session_params."
            )
        _check_logprobs(manager, request, len(ids))


def from_json(kind: type, fields_of_it: dict[str, Any]) -> Any:
    """A request object whose fields FastAPI has not checked; raises ValueError."""
    unknown = fields_of_it.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"there is no field {min(unknown)!r}; leave it out.")
    try:
        return TypeAdapter(kind).validate_python(fields_of_it)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{place} is {shown(first['input'])}: {first['msg']}.") from None


def check_tokens(manager: TokenizerManager, tokens: Sequence[Any]) -> None:
    """Tokens that are to become text: a list, or a list of lists."""
    vocabulary = manager.model_config.vocab_size
    if tokens and isinstance(tokens[0], list):
        for number, row in enumerate(tokens):
            fields.token_ids(f"tokens[{number}]", row, vocabulary)
    else:
        fields.token_ids("tokens", tokens, vocabulary)


def to_wire(
    request: GenerateReqInput | EmbeddingReqInput,
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
) -> None:
    """Put our fields on a tokenized request, which the scheduler will be able to read."""
    if isinstance(request, GenerateReqInput):
        tokenized.hybrid = server_part(request).fields
    if io_struct._USE_PICKLE_IPC:
        return
    light = copy.copy(tokenized)
    for name in HEAVY:
        setattr(light, name, None)
    try:
        io_struct.msgpack_decode(io_struct.msgpack_encode(light))
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        name = "request"
        if found is not None:
            names = [field.name for field in msgspec.structs.fields(type(light))]
            name = names[int(found["index"]) - 1]  # the first place is the type's tag
        value = {name: getattr(light, name, None)}
        text = _PLACE.sub(lambda place: f" - at `$.{name}{place['rest']}`", str(error))
        sentence = fields.of_types(msgspec.ValidationError(text), "", value)
        raise ValueError(sentence.removeprefix(".")) from None
    except (TypeError, OverflowError) as error:
        raise ValueError(f"the request cannot be sent to a scheduler: {error}.") from None


def _only_what_clients_set(request: GenerateReqInput | EmbeddingReqInput) -> None:
    for name in SET_BY_THE_SERVER:
        value = getattr(request, name, None)
        if value is not None:
            raise ValueError(
                f"{name} is {shown(value)}; the server sets it itself, so leave it out."
            )


def _no_health_check(rid: object) -> None:
    """A busy server drops its health checks without an answer."""
    for one in rid if isinstance(rid, list) else [rid]:
        if isinstance(one, str) and one.startswith(HEALTH_CHECK_RID_PREFIX):
            raise ValueError(
                f"rid is {shown(one)}; names that begin with {HEALTH_CHECK_RID_PREFIX} are "
                "the server's own."
            )


def _media(request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None) -> None:
    """What processors of images would end with an error of the server's."""
    if not request.contains_mm_input():
        return
    if request.input_ids is not None:
        fields.token_ids("input_ids", request.input_ids, 1 << 31)
    if http is not None and request.video_data and not _reads_videos():
        raise ValueError(
            "the request has a video, and this server reads none: it lacks torchvision, or both "
            "torchcodec and decord; send frames as images."
        )


@cache
def _reads_videos() -> bool:
    found = {name: importlib.util.find_spec(name) for name in ("torchvision", *DECODERS)}
    return found["torchvision"] is not None and any(map(found.get, DECODERS))


def _samples(params: object) -> None:
    """`n`, which SGLang multiplies the prompts by before it looks at anything else."""
    for one in params if isinstance(params, list) else [params]:
        if one is None:
            continue
        if not isinstance(one, dict):
            raise ValueError(f"sampling_params is {shown(one)}; it must be an object.")
        count = one.get("n", 1)
        if count is None:
            one["n"] = 1  # as in SamplingParams
        elif type(count) is not int:
            raise ValueError(f"sampling_params.n is {shown(count)}; it must be an int.")
        else:
            fields.within("sampling_params.n", count, *fields.RANGES["n"])


def _check_logprobs(manager: TokenizerManager, request: GenerateReqInput, prompt: int) -> None:
    """Also where `return_logprob` is off: other requests of a step may turn it on."""
    start, top = request.logprob_start_len, request.top_logprobs_num
    for name, value in (("logprob_start_len", start), ("top_logprobs_num", top)):
        if type(value) is not int:
            raise ValueError(f"{name} is {shown(value)}; it must be an int.")
    longest = max(0, manager.context_len - prompt)
    asked = request.sampling_params.get("max_new_tokens")
    answer = longest if asked is None else min(longest, asked)
    if not request.return_logprob:
        start = -1
    fields.logprobs(start, top, len(request.token_ids_logprob or ()), prompt, answer)


@cache
def _schema(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A structure of SGLang's as clients give it: by name, any field may be null, and no other."""
    return msgspec.defstruct(
        kind.__name__,
        [(field.name, field.type | None, None) for field in msgspec.structs.fields(kind)],
        kw_only=True,
        forbid_unknown_fields=True,
    )
