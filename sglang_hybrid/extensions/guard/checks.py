"""Checks of every request that SGLang's tokenizer manager gets, from HTTP or an engine.
serving/requests/checks.py, which has those for the cache, calls them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlparse

import msgspec
from pydantic import TypeAdapter, ValidationError
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.multimodal.mm_utils import has_valid_data

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.guard import parameters
from sglang_hybrid.extensions.guard.patterns import schema_with_escaped_ends, with_escaped_ends
from sglang_hybrid.extensions.guard.sizes import (
    ModelSizes,
    by_position,
    check_embeddings,
    check_sizes,
)
from sglang_hybrid.serving.requests import fields

if TYPE_CHECKING:
    import fastapi
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams

    Request: TypeAlias = GenerateReqInput | EmbeddingReqInput

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

RANGES: Mapping[str, tuple[int, int]] = {
    "bootstrap_port": (0, (1 << 16) - 1),
    "bootstrap_room": (0, fields.INT64 - 1),
    "decode_tp_size": (1, (1 << 16) - 1),
    "disagg_prefill_dp_rank": (0, (1 << 16) - 1),
    "max_thinking_tokens": (0, fields.INT32 - 1),
    "routed_experts_start_len": (0, fields.INT32 - 1),
}
"""Bounds of numbers of a request, beside what SGLang itself checks (tokenizer_manager.py)."""

MOST_ANSWERS = 1 << 14
"""Prompts of one HTTP request, times the samples of each (`n`). SGLang makes a request of each
before it looks at any, and serves nothing else meanwhile: so many take 30 MB and a second or more.
"""

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


def normalize(
    request: Request,
    http: fastapi.Request | None,
    cache_normalizes: Callable[[Request, fastapi.Request | None], None],
) -> None:
    """`cache_normalizes` with the same arguments; its mistakes are ValueErrors here."""
    samples = _samples(request.sampling_params)
    if http is not None and (answers := samples * _prompts(request)) > MOST_ANSWERS:
        raise ValueError(
            f"the request asks for {answers:,} answers, to all prompts and samples of them; it may "
            f"ask for {MOST_ANSWERS:,} at most. Send several requests."
        )
    for key, value in (getattr(request, "external_trace_header", None) or {}).items():
        if not isinstance(value, str):
            raise ValueError(
                f"external_trace_header[{quote(key)}] is {quote(value)}; it is a text."
            )
    try:
        cache_normalizes(request, http)
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
    request: Request,
    ids: Sequence[int],
) -> None:
    """One request of a batch, tokenized to `ids`."""
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
        value = quote(getattr(request, given))
        raise ValueError(f"{given} is {value}; a prompt must have one token at least.")
    if not media:  # a processor has put ids of its own there
        context = manager.context_len
        looked_at = ids if len(ids) <= context else ids[:context]
        fields.token_ids("input_ids", looked_at, manager.model_config.vocab_size)
    parameters.sampling_params(
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
                raise ValueError(f"{name} is {quote(number)}; it must be an int.")
            fields.within(name, number, least, most)
    if in_session and embeddings is not None:
        raise ValueError("a request of a session has token ids; leave input_embeds out.")
    overrides = getattr(request, "embed_overrides", None)
    if overrides is not None:
        check_embeddings("embed_overrides", overrides, manager.model_config.hidden_size)
    for name in ("multi_item_delimiter_indices", "token_indices_to_pool"):
        positions = getattr(request, name, None)
        if positions is not None:
            parameters.positions(name, positions, len(ids))
    if isinstance(request, GenerateReqInput):
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
        raise ValueError(f"{place} is {quote(first['input'])}: {first['msg']}.") from None


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
    tokenized: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput,
) -> None:
    """Raise ValueError for a tokenized request that a scheduler could not read, or the model not
    compute.
    """
    if isinstance(tokenized, TokenizedGenerateReqInput):
        _escape_line_ends(tokenized.sampling_params)
    by_position(tokenized, check_sizes(tokenized, ModelSizes.of(manager)))
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
        sentence = parameters.of_types(msgspec.ValidationError(text), "", value)
        raise ValueError(sentence.removeprefix(".")) from None
    except (TypeError, OverflowError, UnicodeError) as error:
        raise ValueError(f"the request cannot be sent to a scheduler: {error}.") from None


def _escape_line_ends(params: SamplingParams) -> None:
    """Line ends in regular expressions that the answer follows."""
    if params.regex:
        params.regex = with_escaped_ends(params.regex)
    for name in parameters.JSON_TEXTS:
        if text := getattr(params, name):
            setattr(params, name, schema_with_escaped_ends(text))


def _session(params: object) -> None:
    parameters.typed("session_params", params, _schema(SessionParams))
    said: Mapping[str, Any] = params if isinstance(params, dict) else {}
    fields.within("session_params.offset", said.get("offset") or 0, 0, fields.INT64 - 1)


def _media(request: GenerateReqInput | EmbeddingReqInput, http: fastapi.Request | None) -> None:
    """Refuse what would end in processors of images with an error of the server's."""
    for at, one in enumerate(_listed(getattr(request, "mm_hashes", None))):
        if not isinstance(one, str) or not _HASH.fullmatch(one):
            raise ValueError(f"mm_hashes[{at}] is {quote(one)}; it must be 1 to 16 hex digits.")
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
                    f"{name} has the format {quote(form)}, which takes tensors and so an "
                    "sglang.Engine; send what it was made of."
                )
            _local_file(name, getattr(one, "url", one))
    if request.video_data and not _reads_videos():
        raise ValueError(
            "the request has a video, and this server reads none: it lacks torchvision, or both "
            "torchcodec and decord; send frames as images."
        )


def _local_file(name: str, medium: Any) -> None:
    """Refuse what SGLang would open as a file of this machine where it is none that can be read:
    the error would be the server's, and a device may never end (`get_image_bytes` and `load_audio`
    of utils/common.py).
    """
    if not isinstance(medium, str):
        return
    is_url = medium.startswith(("data:", "http://", "https://"))
    if medium.startswith("file://"):
        path = unquote(urlparse(medium).path)
    elif medium.startswith("/") or (name == "audio_data" and not is_url):
        path = medium
    else:
        return
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise ValueError(
            f"{name} is {quote(medium)}, which is read as the path of a file of the server, and it "
            "has none there; send the bytes as a data: URL."
        )


def _listed(data: Any) -> list[Any]:
    if not isinstance(data, list):
        return [] if data is None else [data]
    return [one for each in data for one in _listed(each)]


@cache
def _reads_videos() -> bool:
    found = {name: importlib.util.find_spec(name) for name in ("torchvision", *DECODERS)}
    return found["torchvision"] is not None and any(map(found.get, DECODERS))


def _prompts(request: Request) -> int:
    """The number of prompts of a request that SGLang has not normalized."""
    text, ids = request.text, request.input_ids
    rows: Any = getattr(request, "input_embeds", None)
    if isinstance(text, list):
        return len(text)
    if ids and isinstance(ids[0], list):
        return len(ids)
    return len(rows) if rows and rows[0] and isinstance(rows[0][0], list) else 1


def _samples(params: object) -> int:
    """The most answers to each prompt (`n`), by which SGLang multiplies the prompts before it looks
    at anything else.
    """
    most = 1
    for one in params if isinstance(params, list) else [params]:
        if one is None:
            continue
        if not isinstance(one, dict):
            raise ValueError(f"sampling_params is {quote(one)}; it must be an object.")
        count = one.get("n", 1)
        if count is None:
            one["n"] = 1  # as in SamplingParams
        elif type(count) is not int:
            raise ValueError(f"sampling_params.n is {quote(count)}; it must be an int.")
        else:
            fields.within("sampling_params.n", count, *parameters.RANGES["n"])
            most = max(most, count)
    return most


def _check_logprobs(manager: TokenizerManager, request: GenerateReqInput, prompt: int) -> None:
    """Check them also without `return_logprob`: other requests of a step may turn it on."""
    start, top = request.logprob_start_len, request.top_logprobs_num
    for name, value in (("logprob_start_len", start), ("top_logprobs_num", top)):
        if type(value) is not int:
            raise ValueError(f"{name} is {quote(value)}; it must be an int.")
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
        raise ValueError(f"token_ids_logprob is {quote(chosen)}; it must be a list.")
    fields.token_ids("token_ids_logprob", chosen, vocabulary)
    parameters.logprobs(start, top, len(chosen), prompt, answer, vocabulary, manager.context_len)


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _schema(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A structure of SGLang's as clients give it: by name, any field may be null, and no other."""
    return msgspec.defstruct(
        kind.__name__,
        [(field.name, field.type | None, None) for field in msgspec.structs.fields(kind)],
        kw_only=True,
        forbid_unknown_fields=True,
    )
