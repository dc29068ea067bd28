"""The setter of each value that crosses from HTTP to a scheduler, and its bounds, in one row each.

A field that a release of SGLang adds has no row, and the first test fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform, which installs the patches)
from fastapi import HTTPException
from sglang.srt.entrypoints import request_headers
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import (
    EmbeddingReqInput,
    GenerateReqInput,
    SessionParams,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.requests import Request

from sglang_hybrid.core.extensions import GUARD, OFF
from sglang_hybrid.extensions.guard import checks
from sglang_hybrid.extensions.guard.parameters import MOST_SAMPLES
from sglang_hybrid.serving.names import LONGEST
from sglang_hybrid.serving.requests.fields import INT64

VOCABULARY, WIDTH, CONTEXT = 100, 4, 64
IDS = [5, 6, 7]
TOO_LONG = "a" * (LONGEST + 1)
HUGE = 10**4_208
"""4,209 digits."""
ACTION = {"action_id": "a", "action_type": "hybrid.pin", "action_version": "1"}
HINTS = {"protocol_version": "1", "message_id": "m"}


class Who(Enum):
    """NOBODY: SGLang has the field, and no route uses it. AN_ENGINE: who runs SGLang in a process
    of their own; over HTTP, nobody.
    """

    CLIENT = "client"
    ADMIN = "admin"
    SERVER = "server"
    AN_ENGINE = "an engine's user"
    NOBODY = "nobody"


@dataclass(frozen=True)
class Row:
    """who: may set it. bounds: in a few words. taken, refused: values within them, and beyond.
    beside: other fields of those requests.
    """

    who: Who
    bounds: str
    taken: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def client(bounds: str, taken: Any, refused: Any, **beside: Any) -> Row:
    return Row(Who.CLIENT, bounds, tuple(taken), tuple(refused), beside)


def server(*refused: Any, who: Who = Who.SERVER) -> Row:
    return Row(who, "", (), refused)


def flag() -> Row:
    return client("true or false", [True, False], ["maybe", 5, [], {}])


def name(bounds: str = f"a text of {LONGEST:,} characters") -> Row:
    return client(bounds, ["a", "a" * LONGEST], [TOO_LONG, "\ud800", {}])


def whole(least: int, most: int, **beside: Any) -> Row:
    refused = [least - 1, most + 1, HUGE, 1.5, "many"]
    return client(f"a whole number from {least} to {most}", [least, most], refused, **beside)


def number(least: float, most: float) -> Row:
    refused = [least - 1e-4, most + 1, math.nan, math.inf, "many"]
    return client(f"a number from {least} to {most}", [least, most], refused)


MEDIA = client("data or an address; for models that read it", [None], ["", "a", {"format": "a"}])
TRACE = client("an object of texts", [{"traceparent": "00-0"}], ["a", 5, {"traceparent": [1]}])
PATCHES = client("a whole number; read by processors of images", [None, 4], ["many", 1.5])
EMBEDDINGS = client(
    f"rows of {WIDTH} finite numbers, at most the context",
    [[[0.5] * WIDTH], [[0.5] * WIDTH] * CONTEXT],
    [
        [],
        [[]],
        [[0.5] * (WIDTH + 1)],
        [[0.5] * WIDTH, [0.5]],
        [[math.nan] * WIDTH],
        [[1e300] * WIDTH],
        [[0.5] * WIDTH] * (CONTEXT + 1),
        "a",
        [["a"] * WIDTH],
    ],
    input_ids=None,
)

COMMON: dict[str, Row] = {
    "rid": client(
        f"a text of {LONGEST:,} characters, or one for each prompt",
        ["a", "a" * LONGEST],
        [TOO_LONG, ["a"], ["a", "b"], {}, 5, "HEALTH_CHECK_1", "\ud800"],
    ),
    "text": client("a text within the context, or several", ["a"], [5, {}, []], input_ids=None),
    "input_ids": client(
        f"tokens below {VOCABULARY}, fewer than the context; or lists of them",
        [[0], [VOCABULARY - 1] * 40],
        [[], [-1], [VOCABULARY], [HUGE], [0.5], ["a"], [[]], [5] * CONTEXT, "a", {}],
    ),
    "image_data": MEDIA,
    "video_data": MEDIA,
    "audio_data": MEDIA,
    "modalities": client("a list of texts", [None, ["image"]], [[5], "image"]),
    "log_metrics": flag(),
    "lora_path": client(
        f"a text of {LONGEST:,} characters, or one for each prompt",
        ["a", "a" * LONGEST],
        [TOO_LONG, "\ud800", {}, 5],
    ),
    "routing_key": name(),
    "background": flag(),
    "priority": whole(-INT64, INT64 - 1),
    "return_prompt_token_ids": flag(),
    "external_trace_header": TRACE,
    "lora_id": server("a"),
    "http_worker_ipc": server("ipc:///tmp/a"),
    "received_time": server(1.0, 0),
    "multi_item_delimiter_indices": server([1], []),
    "token_indices_to_pool": server([1], []),
    "positional_embed_overrides": server([[0.5] * WIDTH], {}),
}

GENERATE: dict[str, Row] = COMMON | {
    "session_id": name(),
    "input_embeds": EMBEDDINGS,
    "mm_hashes": client(
        "1 to 16 hex digits for each image", [None, ["1f"]], [["zz"], ["1" * 17], [5], [""], "zz"]
    ),
    "mm_content_hashes": client("`sha256:` and 64 hex digits, for each image", [None], [5, [5]]),
    "use_audio_in_video": flag(),
    "video_config": client("an object", [{"fps": 1}], ["a", 5]),
    "sampling_params": client("an object, or one for each prompt", [{}], ["a", 5, [[]], [{}]]),
    "watermark": client(
        "an object of `enabled`, `key` and `context_window`",
        [None, {"enabled": False}],
        ["a", {"a": 1}, {"context_window": 0}, {"enabled": 5}],
    ),
    "return_logprob": flag(),
    "logprob_start_len": whole(-1, len(IDS), return_logprob=True),
    "top_logprobs_num": whole(0, VOCABULARY),
    "token_ids_logprob": client(
        f"tokens below {VOCABULARY}",
        [[0, VOCABULARY - 1]],
        [[-1], [VOCABULARY], [HUGE], ["a"], "a", {}, [[5]]],
    ),
    "return_sampling_mask": client(
        "true or false; not with max_new_tokens 0", [True, False], ["maybe", 5, [], {}]
    ),
    "sampling_logprobs_mode": client(
        "'selected' or 'full_support'", ["selected"], ["a", 5], return_sampling_mask=True
    ),
    "return_text_in_logprobs": flag(),
    "return_flat_raw_top_logprobs": flag(),
    "return_flat_raw_output_top_logprobs": flag(),
    "return_flat_raw_top_logprobs_b64": client(
        "true or false", [True], ["maybe", 5], return_flat_raw_top_logprobs=True
    ),
    "stream": flag(),
    "return_hidden_states": client(
        "true, false or 'last', as far as the server was started for", [False], [True, "a", 5]
    ),
    "return_routed_experts": flag(),
    "routed_experts_start_len": whole(0, (1 << 31) - 1),
    "return_indexer_topk": flag(),
    "session_params": client("an object, see SESSION", [{"id": "a"}], ["a", 5, {"a": 1}]),
    "custom_logit_processor": client(
        "a text, on a server that was started for it; it is code that runs in the scheduler",
        [None],
        ["{}", 5],
    ),
    "bootstrap_host": name(),
    "bootstrap_port": whole(0, (1 << 16) - 1),
    "bootstrap_room": whole(0, INT64 - 1),
    "bootstrap_pair_key": name(),
    "decode_tp_size": whole(1, (1 << 16) - 1),
    "routed_dp_rank": client("a rank that the server has", [0], [-1, 1, "a", 0.5]),
    "data_parallel_rank": client("the same", [0], [-1, 1, "a", 0.5]),
    "disagg_prefill_dp_rank": whole(0, (1 << 16) - 1),
    "conversation_id": name(),
    "require_reasoning": flag(),
    "max_thinking_tokens": client(
        "a whole number, on a server that was started for it", [None], [-1, 5, "a", HUGE]
    ),
    "extra_key": client(
        f"a text of {LONGEST:,} characters that looks like no key of the server's",
        ["a", "a" * LONGEST],
        [TOO_LONG, "modular/a", "module/1/-", "\0exact\0", {}, 5, ["a"], "\ud800"],
    ),
    "cache_salt": name(),
    "no_logs": flag(),
    "return_entropy": flag(),
    "max_dynamic_patch": PATCHES,
    "min_dynamic_patch": PATCHES,
    "image_max_dynamic_patch": PATCHES,
    "video_max_dynamic_patch": PATCHES,
    "images_config": client("an object", [{}], ["a", 5]),
    "mm_processor_kwargs": client("an object", [{}], ["a", 5]),
    "kv_hints": client(
        "SGLang's envelope; our actions in it as docs/hints.md says",
        [{**HINTS, "actions": [{**ACTION, "payload": {"positions": [1], "ttl": 5}}]}],
        [
            "a",
            5,
            {"a": 1},
            {**HINTS, "actions": [{**ACTION, "payload": {}}]},
            {**HINTS, "actions": [{**ACTION, "payload": {"positions": [len(IDS)], "ttl": 5}}]},
            {**HINTS, "actions": [{**ACTION, "payload": {"positions": [1], "ttl": 1e9}}]},
            {**HINTS, "actions": [{**ACTION, "payload": {"positions": [HUGE], "ttl": 5}}]},
            {**HINTS, "actions": [{**ACTION, "action_type": "hybrid.segments", "payload": {}}]},
        ],
    ),
    "pml": client("a prompt of a schema that is registered", [None], [5, {}]),
    "custom_labels": server({"a": "b"}, {}),
    "return_bytes": server(True, who=Who.NOBODY),
    "need_wait_for_mm_inputs": server(True, False),
    "num_items_assigned": server({"IMAGE": [1]}, {}),
    "encoder_urls": server(["http://a"], []),
}

EMBED: dict[str, Row] = COMMON | {
    "text": client("a text within the context, or several", ["a"], [5, {}], input_ids=None),
    "input_embeds": client("no server takes it without --disable-radix-cache", [None], ["a", 5]),
    "embed_override_token_id": client("a token", [None, 5], ["a", 0.5]),
    "embed_overrides": server([[[0.5] * WIDTH]], []),
    "sampling_params": client("an object; it does nothing", [{}], ["a", 5]),
    "is_cross_encoder_request": server(True),
    "dimensions": client("a size that the model was trained for", [None], [0, -1, 5, HUGE, "a"]),
    "return_pooled_hidden_states": flag(),
    "decision_layout": server([1], []),
}

SAMPLING: dict[str, Row] = {
    "max_new_tokens": client(
        "as far as the context", [0, CONTEXT - len(IDS)], [-1, CONTEXT, HUGE, 0.5, "a"]
    ),
    "stop": client("32 texts", ["a", ["a"] * 32], [5, ["a"] * 33, [5], {}]),
    "stop_token_ids": client(
        f"tokens below {VOCABULARY}", [[0, VOCABULARY - 1]], [[-1], [VOCABULARY], [HUGE], "a", 5]
    ),
    "stop_regex": client(
        "32 regular expressions of 256 bytes", ["a+"], ["(", "a" * 257, ["a"] * 33, 5]
    ),
    "temperature": number(0, 10**6),
    "top_p": client("above 0, at most 1", [1e-3, 1], [0, 1.1, -1, math.nan, "a"]),
    "top_k": client("-1, or from 1", [-1, 1, (1 << 31) - 1], [-2, 0, 1 << 31, HUGE, 0.5]),
    "min_p": number(0, 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(1e-3, 2),
    "min_new_tokens": client(
        "as far as max_new_tokens", [0, 1], [-1, 1 << 31, HUGE, 0.5, "a"], max_new_tokens=None
    ),
    "n": whole(1, MOST_SAMPLES),
    "beam_width": client("from 1; how many is the scheduler's", [1, 4], [0, -1, HUGE, "a"]),
    "json_schema": client(
        "a text, whose JSON is nested 64 deep", ["{}", "[" * 64], ["[" * 65, 5, {}]
    ),
    "regex": client("a text", ["a"], [5, {}]),
    "ebnf": client("a text", ["root ::= 'a'"], [5, {}]),
    "structural_tag": client(
        "a text, whose JSON is nested 64 deep", ["{}", "{" * 64], ["{" * 65, 5, {}]
    ),
    "ignore_eos": client("true or false", [True], ["maybe", 5]),
    "skip_special_tokens": client("true or false", [True], ["maybe", 5]),
    "spaces_between_special_tokens": client("true or false", [True], ["maybe", 5]),
    "no_stop_trim": client("true or false", [True], ["maybe", 5]),
    "stream_interval": client("from 1", [1, (1 << 31) - 1], [0, -1, 1 << 31, HUGE, 0.5]),
    "logit_bias": client(
        f"of tokens below {VOCABULARY}, from -1e9 to 1e9",
        [{"0": 1e9, str(VOCABULARY - 1): -1e9}],
        [{str(VOCABULARY): 1}, {"-1": 1}, {"a": 1}, {"1_0": 1}, {"5": math.nan}, {"5": 1e10}, []],
    ),
    "sampling_seed": whole(-INT64, INT64 - 1),
    "custom_params": client(
        "values of JSON, at most one list or object deep; no key begins with __",
        [{"a": [1]}, {"a": {"b": "c"}}],
        [{"a": [[1]]}, {"__a": 1}, {"__sglang_reasoning_in_grammar": True}, [], "a", {"a": HUGE}],
    ),
    "watermark": GENERATE["watermark"],
    "stop_strs": server(["a"], []),
    "stop_regex_strs": server(["a"], []),
    "stop_str_max_len": server(0, 5),
    "stop_regex_max_len": server(0, 5),
    "is_normalized": server(True, False),
    "ebnf_full_assistant": server(True, False),
}

SESSION: dict[str, Row] = {
    "id": client(f"a text of {LONGEST:,} characters", ["a", "a" * LONGEST], [TOO_LONG, 5, {}]),
    "rid": client(f"a text of {LONGEST:,} characters", ["a"], [TOO_LONG, 5, []]),
    "offset": client("from 0", [0, INT64 - 1], [-1, INT64, HUGE, "a", 0.5]),
    "replace": client("true or false", [True], ["maybe", 5]),
    "drop_previous_output": client("true or false", [True], ["maybe", 5]),
}

HEADERS: dict[str, Row] = {
    "X-Hybrid-Tenant": client(
        f"a text of {LONGEST:,} characters that looks like no key of the server's",
        ["a", "a" * LONGEST],
        [TOO_LONG, "modular/a"],
    ),
    "X-Hybrid-Session": client(
        "`end`, `return`, or `return; seconds=N` of at most a week",
        ["end", "return", "return; seconds=20"],
        ["a", "return; seconds=0", "return; seconds=1" + "0" * 4_000, "return; seconds=-1", "\0"],
    ),
    "X-Hybrid-Exact": client("`true`", ["true"], ["false", "1", "a" * 5_000]),
    "X-Hybrid-Kv-Hints": client(
        "actions of kv_hints, as JSON",
        ["[]"],
        ["a", "{}", "[5]", "[" * 5_000, '[{"action_id": 1e999}]', "\0"],
    ),
}

OVERRIDES: dict[str, Row] = {
    "x-override-rid": client("as `rid`", ["a", "a" * LONGEST], [TOO_LONG, "HEALTH_CHECK_1"]),
    "x-override-bootstrap-host": client("as the field", ["a"], [TOO_LONG]),
    "x-override-bootstrap-port": client("as the field", ["0", "65535"], ["-1", "65536", "a", ""]),
    "x-override-bootstrap-room": client("as the field", ["0"], ["-1", str(INT64), "9" * 5_000]),
    "x-override-conversation-id": client("as the field", ["a"], [TOO_LONG]),
    "x-override-routed-dp-rank": client("a rank that the server has", ["0"], ["-1", "1", "a"]),
    "x-override-disagg-prefill-dp-rank": client("as the field", ["0"], ["-1", "65536", "0.5"]),
    "x-override-priority": client("64 bits", ["0", str(INT64 - 1)], [str(INT64), "9" * 5_000]),
}
"""Headers that SGLang puts in the place of fields of a body."""

SENT_ONLY = frozenset(
    (
        "hybrid",
        "input_text",
        "mm_inputs",
        "token_type_ids",
        "time_stats",
        "pp_prefetch_ticketed",
        "lora_name",
    )
)
"""Fields of tokenized requests that no request has: the server makes them."""


def names(kind: type) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return {field.name for field in msgspec.structs.fields(kind)}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (GenerateReqInput, {*GENERATE}),
        (EmbeddingReqInput, {*EMBED}),
        (SamplingParams, {*SAMPLING}),
        (SessionParams, {*SESSION}),
        (TokenizedGenerateReqInput, names(TokenizedGenerateReqInput) & {*GENERATE, *SENT_ONLY}),
        (
            TokenizedEmbeddingReqInput,
            names(TokenizedEmbeddingReqInput) & {*GENERATE, *EMBED, *SENT_ONLY},
        ),
    ],
)
def test_each_field_has_a_row(kind: type, rows: set[str]) -> None:
    assert names(kind) == rows


def test_each_header_of_ours_has_a_row() -> None:
    from sglang_hybrid.serving import http_tenants
    from sglang_hybrid.serving.requests import kv_hints

    ours = [
        http_tenants.HEADER,
        kv_hints.SESSION_HEADER,
        kv_hints.EXACT_HEADER,
        kv_hints.HINTS_HEADER,
    ]
    assert {f"X-Hybrid-{name}" for name in ours} == {*HEADERS}


def test_each_header_in_the_place_of_a_field_has_a_row() -> None:
    assert {*request_headers._HEADER_OVERRIDES} == {*OVERRIDES}


@pytest.mark.parametrize("rows", [GENERATE, EMBED], ids=["generate", "embed"])
def test_a_message_over_grpc_has_no_field_of_the_server(rows: Mapping[str, Row]) -> None:
    """Its fields are in SGLang's library; they become those of a request, as those of a body do."""
    library = find_spec("sglang.srt.rust_extensions._grpc")
    assert library is not None and library.origin is not None
    code = Path(library.origin).read_bytes()
    assert b"external_trace_header" in code
    assert not [
        name for name, row in rows.items() if row.who is not Who.CLIENT and name.encode() in code
    ]


class Condition(nullcontext[None]):
    """SGLang waits for it until generation is not paused."""

    async def wait_for(self, predicate: Any) -> None:
        assert predicate()


class Sent(Exception):
    """Raised where SGLang would send a request to a scheduler. prompts: tokenized."""

    def __init__(self, prompts: list[Any]) -> None:
        super().__init__()
        self.prompts = prompts


class Manager(TokenizerManager):
    """SGLang's, without its processes: of a small model that reads text, on a server that was
    started with --disable-radix-cache. generates: it answers prompts; else it embeds them.
    """

    def __init__(self, generates: bool) -> None:
        self.is_generation = generates
        self.model_config: Any = SimpleNamespace(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            is_matryoshka=False,
            model_path="a",
            hf_config=SimpleNamespace(architectures=["A"]),
            joint_head_config=None,
            pointer_head=None,
        )
        self.context_len = CONTEXT
        self.num_reserved_tokens = 0
        self.validate_total_tokens = True
        self.allow_auto_truncate = self.enable_priority_scheduling = False
        self.enable_lora = True
        self.elastic_worker_count = 1
        self.tokenizer = self.request_logger = MagicMock()
        self.rid_to_state = MagicMock()
        self.mm_processor = self.preferred_sampling_params = None
        self.sampling_params_class = SamplingParams
        self.tokenized_generate_req_type = TokenizedGenerateReqInput
        self.is_pause, self.is_pause_cond = False, Condition()
        self.model_update_lock: Any = SimpleNamespace(reader_lock=nullcontext())

    def auto_create_handle_loop(self) -> None: ...

    def _init_req_state(self, *_: Any) -> None: ...

    def _release_req_states_on_failure(self, *_: Any) -> None: ...

    async def _resolve_lora_path(self, _: Any) -> None: ...

    async def _tokenize_texts(self, *_: Any) -> tuple[Any, None]:
        return IDS, None

    async def _send_one_request(self, prompt: Any) -> None:
        raise Sent([prompt])

    async def _send_batch_request(self, prompts: Any) -> None:
        raise Sent(list(prompts))


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of the server, where SGLang looks for them."""
    features = SimpleNamespace(
        enable_encoder_swa_bounded_replay=False,
        enable_custom_logit_processor=False,
        return_hidden_states_mode=None,
        enable_return_hidden_states=False,
        enable_watermark=False,
        watermark_key=None,
        watermark_context_window=4,
        watermark_default_enabled=False,
        watermark_enforce_all=False,
    )
    groups = {
        "get_exec": SimpleNamespace(features=features),
        "get_disagg": SimpleNamespace(
            disaggregation_transfer_backend="", language_only=False, language_model_only=False
        ),
        "get_memory": SimpleNamespace(disable_radix_cache=True),
        "get_parallel": SimpleNamespace(attn_dp_enabled=False),
        "get_serving": SimpleNamespace(
            enable_strict_thinking=False, enable_tokenizer_batch_encode=False
        ),
    }
    for module in (tokenizer_manager, forward_batch_info):
        for name, group in groups.items():
            monkeypatch.setattr(module, name, lambda group=group: group, raising=False)


def sent(kind: type, body: dict[str, Any], **headers: str) -> list[Any]:
    """The tokenized requests that a body for one of SGLang's own routes makes."""

    async def run() -> list[Any]:
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "headers": encoded, "query_string": b""}
        http = Request({**scope, "route": SimpleNamespace(path="/generate")})
        http._json = body
        request = checks.from_json(kind, body)
        request_headers.apply_header_overrides(request, http.headers)
        try:
            await anext(Manager(kind is GenerateReqInput).generate_request(request, http))
        except Sent as sent:
            return sent.prompts
        raise AssertionError("nothing was sent")

    return asyncio.run(run())


def body_of(place: str, name: str, value: Any, beside: Mapping[str, Any]) -> dict[str, Any]:
    """A right body but for one value. place: of `TABLES`."""
    base: dict[str, Any] = {"input_ids": IDS}
    if place in ("generate", "embed"):
        base |= {**beside, name: value}
        return {field: given for field, given in base.items() if given is not None}
    if place == "sampling":
        return {**base, "sampling_params": {**beside, name: value}}
    return {**base, "session_params": {"id": "a", **beside, name: value}}


TABLES = {"generate": GENERATE, "embed": EMBED, "sampling": SAMPLING, "session": SESSION}
ROWS = [(place, name) for place, rows in TABLES.items() for name in rows]


@pytest.mark.parametrize(("place", "name"), ROWS)
def test_what_a_client_sends(place: str, name: str) -> None:
    row = TABLES[place][name]
    kind = EmbeddingReqInput if place == "embed" else GenerateReqInput
    assert row.refused and bool(row.taken) == (row.who is Who.CLIENT)
    for value in row.taken:
        assert sent(kind, body_of(place, name, value, row.beside)), value
    for value in row.refused:
        with pytest.raises(ValueError) as error:
            sent(kind, body_of(place, name, value, row.beside))
            pytest.fail(f"{name} {value!r} was taken")
        assert len(str(error.value)) < 1_000


@pytest.mark.parametrize("name", HEADERS | OVERRIDES)
def test_what_a_header_says(name: str) -> None:
    row = (HEADERS | OVERRIDES)[name]
    for value in row.taken:
        assert sent(GenerateReqInput, {"input_ids": IDS}, **{name: value})
    for value in row.refused:
        with pytest.raises((ValueError, HTTPException)):
            sent(GenerateReqInput, {"input_ids": IDS}, **{name: value})
            pytest.fail(f"{name} {value!r} was taken")


def test_a_mask_is_of_tokens_that_are_sampled() -> None:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}}
    assert sent(GenerateReqInput, body)
    with pytest.raises(ValueError, match="return_sampling_mask is of tokens that are sampled"):
        sent(GenerateReqInput, {**body, "return_sampling_mask": True})


@pytest.mark.parametrize("name", sorted(SENT_ONLY))
def test_what_the_server_makes_is_not_sent_by_a_client(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        sent(GenerateReqInput, {"input_ids": IDS, name: None})


OF_THE_CACHE = ("rid", "extra_key", "cache_salt", "kv_hints", "session_id", "lora_path")
"""Fields that say whose a request is, and what it tells the cache."""


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (place, name)
        for place in ("generate", "embed")
        for name, row in TABLES[place].items()
        if row.who is Who.SERVER or name in OF_THE_CACHE
    ],
)
def test_without_the_guard_the_cache_and_its_tenants_are_as_safe(
    place: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GUARD, OFF)
    test_what_a_client_sends(place, name)


def test_without_the_guard_other_values_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"input_ids": [VOCABULARY]}
    with pytest.raises(ValueError, match="a token id of this model"):
        sent(GenerateReqInput, unknown)
    monkeypatch.setenv(GUARD, OFF)
    assert sent(GenerateReqInput, unknown)
