"""Checks that SGLang's tokenizer manager calls for every request, from HTTP or an engine (patch
0015).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import TypeAdapter, ValidationError
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.multimodal.mm_utils import has_valid_data

from sglang_hybrid.core.returns.hints import EXACT
from sglang_hybrid.core.sentences import shown
from sglang_hybrid.serving.names import check_name
from sglang_hybrid.serving.requests import fields, kv_hints
from sglang_hybrid.serving.requests.cache_fields import CacheFields, server_part
from sglang_hybrid.serving.requests.ids import own_ids
from sglang_hybrid.serving.requests.patterns import schema_with_escaped_ends, with_escaped_ends
from sglang_hybrid.serving.requests.sizes import (
    ModelSizes,
    by_position,
    check_embeddings,
    check_sizes,
)
from sglang_hybrid.serving.routes import asked_route
from sglang_hybrid.serving.stored_keys import check_key

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.io_struct import (
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams

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

SAMPLING_OF_THE_SERVER = ("ebnf_full_assistant",)
"""Fields of `SamplingParams` that SGLang's endpoints put there, beside `INTERNAL`."""

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

RANGES: Mapping[str, tuple[int, int]] = {
    "bootstrap_port": (0, (1 << 16) - 1),
    "bootstrap_room": (0, fields.INT64 - 1),
    "decode_tp_size": (1, (1 << 16) - 1),
    "disagg_prefill_dp_rank": (0, (1 << 16) - 1),
    "max_thinking_tokens": (0, fields.INT32 - 1),
    "routed_experts_start_len": (0, fields.INT32 - 1),
}
"""Bounds of numbers of a request, beside what SGLang itself checks (tokenizer_manager.py)."""

MEDIA = ("image_data", "video_data", "audio_data")

PROCESSED = ("processor_output", "precomputed_embedding")
"""Formats of media that hold tensors, which JSON has not: an `sglang.Engine` takes them."""

_HASH = re.compile(r"(0x)?[0-9a-fA-F]{1,16}")
"""One of `mm_hashes`: 64 bits."""

DECODERS = ("torchcodec", "decord")
"""Packages of which SGLang needs one to read a video."""

HEAVY = (
    "input_ids",
    "input_text",
    "input_embeds",
    "positional_embed_overrides",
    "mm_inputs",
    "time_stats",
)
"""Fields of a tokenized request: fields that are large, and whose types are right."""

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
    body = getattr(http, "_json", None)
    if path in NATIVE:
        _only_what_clients_set(request, body)
    _no_private_params(body)
    for name in NAMES:
        check_name(name, getattr(request, name, None))
    if not path.startswith("/health"):
        _no_health_check(request.rid)
    _samples(request.sampling_params)
    for key, value in (getattr(request, "external_trace_header", None) or {}).items():
        if not isinstance(value, str):
            raise ValueError(
                f"external_trace_header[{shown(key)}] is {shown(value)}; it is a text."
            )
    try:
        request.normalize_batch_and_arguments()
        for name in ("rid", "sampling_params"):
            value = getattr(request, name)
            for one in [value] if request.is_single else value:
                if isinstance(one, list):
                    raise ValueError(f"{name} is {shown(one)}; a request of one prompt has one.")
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
    if not parts:
        raise ValueError("the request is a batch without a prompt; give one at least.")
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
    if media and manager.mm_processor is None:
        given = ", ".join(name for name in MEDIA if has_valid_data(getattr(request, name)))
        raise ValueError(f"the request has {given}, and this model reads text only; leave it out.")
    in_session = bool((getattr(request, "session_params", None) or {}).get("id"))
    embeddings = getattr(request, "input_embeds", None)
    if embeddings is not None and (request.text is not None or request.input_ids is not None):
        raise ValueError("the request has input_embeds beside text or input_ids; give one of them.")
    if not ids and not media and not in_session and embeddings is None:
        given = "input_ids" if request.text is None else "text"
        value = shown(getattr(request, given))
        raise ValueError(f"{given} is {value}; a prompt must have one token at least.")
    if not media:  # a processor has put ids of its own there
        context = manager.context_len
        looked_at = ids if len(ids) <= context else ids[:context]
        fields.token_ids("input_ids", looked_at, manager.model_config.vocab_size)
    fields.sampling_params(
        request.sampling_params,
        _schema(manager.sampling_params_class),
        INTERNAL,
        manager.model_config.vocab_size,
    )
    if in_session or getattr(request, "session_params", None):
        _session(request.session_params)
    for name, (least, most) in RANGES.items():
        number = getattr(request, name, None)
        if number is not None:
            if type(number) is not int:
                raise ValueError(f"{name} is {shown(number)}; it must be an int.")
            fields.within(name, number, least, most)
    if in_session and embeddings is not None:
        raise ValueError("a request of a session has token ids; leave input_embeds out.")
    overrides = getattr(request, "embed_overrides", None)
    if overrides is not None:
        check_embeddings("embed_overrides", overrides, manager.model_config.hidden_size)
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
        part.fields = CacheFields(said, part.imported, asked_route())
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
        return _adapter(kind).validate_python(fields_of_it)
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
    manager: TokenizerManager,
    request: GenerateReqInput | EmbeddingReqInput,
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
) -> None:
    """Put our fields on a tokenized request, which the scheduler will be able to read, and the
    model to compute.
    """
    if isinstance(request, GenerateReqInput):
        tokenized.hybrid = server_part(request).fields
        _escape_line_ends(tokenized.sampling_params)
    check_sizes(tokenized, ModelSizes.of(manager))
    by_position(tokenized)
    light = copy.copy(tokenized)
    for name in HEAVY:
        if hasattr(light, name):
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
    except (TypeError, OverflowError, UnicodeError) as error:
        raise ValueError(f"the request cannot be sent to a scheduler: {error}.") from None


def _escape_line_ends(params: SamplingParams) -> None:
    """Line ends in regular expressions that the answer follows."""
    if params.regex:
        params.regex = with_escaped_ends(params.regex)
    for name in fields.JSON_TEXTS:
        if text := getattr(params, name):
            setattr(params, name, schema_with_escaped_ends(text))


def _only_what_clients_set(
    request: GenerateReqInput | EmbeddingReqInput, body: Mapping[str, Any] | None
) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(request)}
    for name in (body or {}).keys() & _sent_fields() - defaults.keys():
        raise ValueError(f"{name} is no field of a request; the server makes it, so leave it out.")
    for name in SET_BY_THE_SERVER:
        value = getattr(request, name, None)
        if value is not None and value is not defaults[name]:
            raise ValueError(
                f"{name} is {shown(value)}; the server sets it itself, so leave it out."
            )
    params = request.sampling_params
    for one in params if isinstance(params, list) else [params]:
        for name in SAMPLING_OF_THE_SERVER:
            if isinstance(one, dict) and one.get(name) is not None:
                raise ValueError(
                    f"sampling_params.{name} is set by the server itself; leave it out."
                )
        _no_private_params(one)


def _no_private_params(said: object) -> None:
    """Refuse private fields of a body, or of sampling parameters."""
    params = said.get("custom_params") if isinstance(said, dict) else None
    for key in params if isinstance(params, dict) else ():
        if isinstance(key, str) and key.startswith(PRIVATE):
            raise ValueError(
                f"custom_params has the key {shown(key)}; keys that begin with {PRIVATE} are the "
                "server's own."
            )


def _no_health_check(rid: object) -> None:
    """A busy server drops its health checks without an answer."""
    for one in rid if isinstance(rid, list) else [rid]:
        if isinstance(one, str) and one.startswith(HEALTH_CHECK_RID_PREFIX):
            raise ValueError(
                f"rid is {shown(one)}; names that begin with {HEALTH_CHECK_RID_PREFIX} are "
                "the server's own."
            )


def _session(params: object) -> None:
    fields.typed("session_params", params, _schema(SessionParams))
    said: Mapping[str, Any] = params if isinstance(params, dict) else {}
    fields.within("session_params.offset", said.get("offset") or 0, 0, fields.INT64 - 1)


def _media(request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None) -> None:
    """Refuse what would end in processors of images with an error of the server's."""
    for at, one in enumerate(_listed(getattr(request, "mm_hashes", None))):
        if not isinstance(one, str) or not _HASH.fullmatch(one):
            raise ValueError(f"mm_hashes[{at}] is {shown(one)}; it must be 1 to 16 hex digits.")
    if not request.contains_mm_input():
        return
    if request.input_ids is not None:
        fields.token_ids("input_ids", request.input_ids, 1 << 31)
    if http is None:
        return
    for name in MEDIA:
        for one in _listed(getattr(request, name)):
            form = one.get("format") if isinstance(one, dict) else None
            if isinstance(form, str) and form.lower() in PROCESSED:
                raise ValueError(
                    f"{name} has the format {shown(form)}, which takes tensors and so an "
                    "sglang.Engine; send what it was made of."
                )
    if request.video_data and not _reads_videos():
        raise ValueError(
            "the request has a video, and this server reads none: it lacks torchvision, or both "
            "torchcodec and decord; send frames as images."
        )


def _listed(data: Any) -> list[Any]:
    if not isinstance(data, list):
        return [] if data is None else [data]
    return [one for each in data for one in _listed(each)]


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
    if asked == 0 and request.return_sampling_mask:
        raise ValueError(
            "return_sampling_mask is of tokens that are sampled, and max_new_tokens is 0; leave "
            "one of them out."
        )
    if not request.return_logprob:
        start = -1
    chosen, vocabulary = request.token_ids_logprob or [], manager.model_config.vocab_size
    if not isinstance(chosen, list):
        raise ValueError(f"token_ids_logprob is {shown(chosen)}; it must be a list.")
    fields.token_ids("token_ids_logprob", chosen, vocabulary)
    fields.logprobs(start, top, len(chosen), prompt, answer, vocabulary)


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _sent_fields() -> frozenset[str]:
    """The fields of tokenized requests."""
    kinds = (io_struct.TokenizedGenerateReqInput, io_struct.TokenizedEmbeddingReqInput)
    return frozenset(field.name for kind in kinds for field in msgspec.structs.fields(kind))


@cache
def _schema(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A structure of SGLang's as clients give it: by name, any field may be null, and no other."""
    return msgspec.defstruct(
        kind.__name__,
        [(field.name, field.type | None, None) for field in msgspec.structs.fields(kind)],
        kw_only=True,
        forbid_unknown_fields=True,
    )
