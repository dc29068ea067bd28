"""Every odd value in every field of every right body: no answer of the server's may be its own
mistake, and no later answer may change.

A route has several right bodies, each with other features on, since an odd value in a field of a
feature that is off reaches nothing.
"""

from __future__ import annotations

import copy
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice
from typing import Any
from urllib.parse import quote

import requests

LIMIT = 300
"""Seconds within which every answer must come."""

TOGETHER = 64
"""Cases between two looks at what a usual prompt is answered."""

THREADS = 4

TENANT = {"X-Hybrid-Tenant": "sweep"}
"""The cases leave nothing behind for other tenants."""

FEW = {"max_new_tokens": 2, "temperature": 0}
IDS = [400, 401, 402, 403]
CHAT = [{"role": "user", "content": "Who keeps the archive?"}]
TOOL = {"name": "rooms", "description": "Rooms.", "parameters": {"type": "object"}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
STORY = {"type": "text", "text": "Rule 1: the archive is closed on Sundays. " * 4}
SCHEMA = (
    '<schema name="sweep"><module name="a">Be brief.<parameter name="who" length="4"/></module>'
    '<union><module name="b">Ask.</module><module name="c">Tell.</module></union></schema>'
)
PROMPT = '<prompt schema="sweep"><a who="I"/><b/><user>Begin.</user></prompt>'
ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAHElEQVR4nO3BAQEAAACCIP+"
    "vbkhAAQAAAAAAfBkgIAABZTLlUQAAAABJRU5ErkJggg=="
)
LONG_ANSWERS = (
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
    "options",
)
"""Fields without which an answer may fill the context."""


@dataclass(frozen=True)
class Right:
    """A request that is done, or refused for the one reason that a server is not made for it.

    path: with {} for a name that a client chooses. undo: path and body of what brings the server
    back to where it was.
    """

    path: str
    body: Any = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    undo: tuple[str, Any] | None = None


def _action(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": "1", "action_type": kind, "action_version": "1", "payload": payload}


def _hints(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "1", "message_id": "m", "actions": list(actions)}


def _generate(sampling: Mapping[str, Any] = FEW, **more: Any) -> Right:
    return Right("/generate", {"input_ids": IDS, "sampling_params": {**FEW, **sampling}, **more})


def _openai(path: str, **more: Any) -> Right:
    prompt = {"prompt": "Who?"} if path == "/v1/completions" else {"messages": CHAT}
    return Right(path, {"model": "default", "max_tokens": 2, "temperature": 0, **prompt, **more})


def _response(**more: Any) -> Right:
    body = {"model": "default", "input": "Who?", "max_output_tokens": 2, "temperature": 0}
    return Right("/v1/responses", {**body, **more})


def client_requests(width: int) -> list[Right]:
    """Requests of a client to a server whose model has embeddings of `width` values, and to which
    `prepare` was sent.
    """
    chat, messages = "/v1/chat/completions", "/v1/messages"
    embedding = [0.5] * width
    json_answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    pinned = {"positions": [1], "ttl": 5, "priority": "low"}
    return [
        _generate(),
        Right("/generate", {"text": "Who?", "sampling_params": FEW, "stream": True}),
        _generate(
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            token_ids_logprob=[1, 2],
            return_text_in_logprobs=True,
            return_entropy=True,
            return_prompt_token_ids=True,
        ),
        _generate(
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            return_flat_raw_top_logprobs=True,
            return_flat_raw_output_top_logprobs=True,
            return_flat_raw_top_logprobs_b64=True,
        ),
        _generate(
            {
                "n": 2,
                "temperature": 0.8,
                "top_p": 0.9,
                "top_k": 20,
                "min_p": 0.01,
                "frequency_penalty": 0.1,
                "presence_penalty": 0.1,
                "repetition_penalty": 1.1,
                "min_new_tokens": 1,
                "stop": ["ab"],
                "stop_token_ids": [7],
                "stop_regex": "a+b",
                "logit_bias": {"5": 1.0},
                "sampling_seed": 3,
                "stream_interval": 1,
                "custom_params": {"a": 1},
                "ignore_eos": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": True,
                "no_stop_trim": True,
            }
        ),
        _generate({"beam_width": 2, "n": 2}),
        _generate({"top_k": 5, "temperature": 1}, return_sampling_mask=True),
        Right(
            "/generate",
            {
                "input_ids": [IDS, IDS],
                "sampling_params": [FEW, FEW],
                "rid": ["sweep-1", "sweep-2"],
                "extra_key": ["sweep", "sweep"],
                "cache_salt": ["a", "b"],
                "return_logprob": [True, False],
                "top_logprobs_num": [1, 0],
                "logprob_start_len": [0, -1],
                "token_ids_logprob": [[1], [2]],
                "return_hidden_states": [False, False],
                "kv_hints": [None, _hints(_action("hybrid.exact"))],
            },
        ),
        _generate({"json_schema": json.dumps(ANSWER)}),
        _generate({"regex": "[^\n]+\n"}),
        _generate({"ebnf": 'root ::= "a" | "b"'}),
        _generate(
            {
                "structural_tag": json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {"type": "json_schema", "json_schema": ANSWER},
                    }
                )
            }
        ),
        _generate(session_params={"id": "sweep", "rid": None, "offset": 1, "replace": True}),
        _generate(
            kv_hints=_hints(
                _action("hybrid.pin", **pinned),
                _action("hybrid.checkpoint", positions=[2]),
                _action("hybrid.session", next="return", seconds=5),
                _action("hybrid.exact"),
            )
        ),
        Right(
            "/generate",
            {
                "text": "Go.",
                "sampling_params": FEW,
                "kv_hints": _hints(
                    _action(
                        "hybrid.import",
                        name="sweep",
                        imports=[{"name": "a", "parameters": {"who": "I"}, "imports": []}, "b"],
                        mode="exact",
                    )
                ),
            },
        ),
        _generate(kv_hints=_hints(_action("hybrid.prewarm", tokens_per_second=100))),
        Right("/generate", {"pml": PROMPT, "text": "Go.", "sampling_params": FEW}),
        Right(
            "/generate",
            {"input_ids": IDS, "sampling_params": FEW},
            headers={
                "X-Hybrid-Session": "return; seconds=5",
                "X-Hybrid-Exact": "true",
                "X-Hybrid-Kv-Hints": json.dumps([_action("hybrid.pin", **pinned)]),
                "X-Request-Id-Hybrid-Session": "return; seconds=5",
                "X-Data-Parallel-Rank": "0",
                "X-Smg-Routing-Key": "a",
                "Authorization": "Bearer a",
                "x-api-key": "a",
            },
        ),
        Right(
            "/generate",
            {"input_ids": IDS, "sampling_params": FEW},
            headers={
                "X-Override-Rid": "sweep-5",
                "X-Override-Bootstrap-Host": "a",
                "X-Override-Bootstrap-Port": "1",
                "X-Override-Bootstrap-Room": "1",
                "X-Override-Conversation-Id": "a",
                "X-Override-Routed-Dp-Rank": "0",
                "X-Override-Disagg-Prefill-Dp-Rank": "0",
                "X-Override-Priority": "1",
            },
        ),
        Right(
            chat,
            {"model": "default", "messages": CHAT, "max_tokens": 2},
            headers={
                "X-Override-Rid": "sweep-6",
                "X-Override-Priority": "1",
                "X-Data-Parallel-Rank": "0",
                "X-Smg-Routing-Key": "a",
                "X-Sglext-Return-Input-Ids": "1",
                "X-Sglext-Return-Output-Ids": "1",
                "X-Sglext-Ids-Framed": "1",
                "Traceparent": "a",
            },
        ),
        _generate(
            rid="sweep-3",
            session_id="sweep",
            priority=1,
            routed_dp_rank=0,
            bootstrap_host="a",
            bootstrap_port=1,
            bootstrap_room=1,
            bootstrap_pair_key="a",
            decode_tp_size=1,
            disagg_prefill_dp_rank=0,
            routing_key="a",
            conversation_id="a",
            extra_key="sweep",
            cache_salt="a",
            external_trace_header={"traceparent": "a"},
            watermark={"enabled": False, "context_window": 2},
            routed_experts_start_len=0,
            require_reasoning=True,
            log_metrics=False,
            no_logs=True,
        ),
        Right("/generate", {"input_embeds": [embedding, embedding], "sampling_params": FEW}),
        _generate(return_hidden_states=True),
        Right(
            "/generate",
            {
                "text": "<|vision_start|><|image_pad|><|vision_end|>What?",
                "image_data": [PICTURE],
                "mm_hashes": ["1f"],
                "mm_content_hashes": ["sha256:" + "0" * 64],
                "modalities": ["image"],
                "mm_processor_kwargs": {},
                "images_config": {},
                "max_dynamic_patch": 4,
                "sampling_params": FEW,
            },
        ),
        Right("/encode", {"input_ids": IDS, "dimensions": 8}),
        Right("/classify", {"text": "Who?"}),
        _openai("/v1/completions"),
        _openai(
            "/v1/completions",
            prompt=["Who?", "What?"],
            logprobs=2,
            echo=True,
            n=2,
            stop=["a"],
            logit_bias={"5": 1},
            seed=3,
            suffix="a",
            user="a",
        ),
        _openai(
            "/v1/completions",
            prompt=IDS,
            stream=True,
            stream_options={"include_usage": True},
            response_format=json_answer,
            kv_hints=_hints(_action("hybrid.pin", **pinned)),
        ),
        _openai(
            "/v1/completions",
            json_schema=json.dumps(ANSWER),
            return_hidden_states=False,
            session_params={"id": "sweep"},
            lora_path=None,
            custom_params={"a": 1},
        ),
        _openai(chat),
        _openai(
            chat,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            logprobs=True,
            top_logprobs=2,
            n=2,
            logit_bias={"5": 1},
            stop="a",
            seed=3,
        ),
        _openai(
            chat,
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [STORY | MARK, {"type": "text", "text": "Who?"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "rooms", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
            ],
            tools=[{"type": "function", "function": TOOL}],
            tool_choice={"type": "function", "function": {"name": "rooms"}},
            parallel_tool_calls=True,
            chat_template_kwargs={"enable_thinking": False},
            reasoning_effort="low",
        ),
        _openai(chat, tools=[{"type": "function", "function": TOOL}], tool_choice="required"),
        _openai(chat, response_format=json_answer),
        _openai(
            chat,
            response_format={
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": ANSWER},
            },
        ),
        _openai(chat, regex="[ab]+", continue_final_message=False, separate_reasoning=True),
        _openai(
            chat,
            prompt_schema={
                "name": "sweep",
                "imports": [{"name": "a", "parameters": {"who": "I"}}, "c"],
                "mode": "exact",
            },
        ),
        _openai(
            chat,
            kv_hints=_hints(_action("hybrid.checkpoint", positions=[2])),
            rid="sweep-4",
            extra_key="sweep",
            cache_salt="a",
            prompt_cache_key="a",
            prompt_cache_options={"mode": "explicit", "ttl": "30m"},
            return_input_ids_in_sglext=True,
            priority=1,
        ),
        _openai(
            chat,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What?"},
                        {
                            "type": "image_url",
                            "image_url": {"url": PICTURE, "detail": "low"},
                        },
                    ],
                }
            ],
        ),
        Right("/invocations", {"model": "default", "messages": CHAT, "max_tokens": 2}),
        _openai(messages),
        _openai(
            messages,
            stream=True,
            system=[STORY | MARK],
            messages=[
                {"role": "user", "content": [STORY | MARK, {"type": "text", "text": "Who?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "a", "signature": "b"},
                        {"type": "tool_use", "id": "t1", "name": "rooms", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "b"}],
                        }
                    ],
                },
            ],
            tools=[{"name": "rooms", "description": "a", "input_schema": ANSWER, **MARK}],
            tool_choice={"type": "tool", "name": "rooms"},
            stop_sequences=["a"],
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "a"},
            diagnostics={"previous_message_id": "msg_none"},
        ),
        _openai(
            messages,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": PICTURE.partition(",")[2],
                            },
                        }
                    ],
                }
            ],
        ),
        Right(
            "/v1/messages/count_tokens",
            {"model": "default", "messages": CHAT, "system": "Be brief.", "tools": []},
        ),
        _response(),
        _response(
            input=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "input_text",
                            "text": STORY["text"],
                            "prompt_cache_breakpoint": {"mode": "explicit"},
                        }
                    ],
                },
                {"type": "function_call", "call_id": "c", "name": "rooms", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
            ],
            instructions="Be brief.",
            stream=True,
            tools=[{"type": "function", **TOOL}],
            tool_choice="auto",
            reasoning={"effort": "low"},
            text={"format": {"type": "json_schema", "name": "a", "schema": ANSWER}},
            metadata={"a": "b"},
            prompt_cache_options={"comparison_response_id": "resp_none"},
            top_logprobs=1,
            truncation="disabled",
            user="a",
        ),
        _response(store=True, background=True, previous_response_id=None),
        Right("/v1/responses/{}", method="GET"),
        Right("/v1/responses/{}/cancel"),
        Right("/v1/embeddings", {"model": "default", "input": ["Who?"], "dimensions": 8}),
        Right(
            "/v1/embeddings",
            {
                "model": "default",
                "input": [IDS],
                "encoding_format": "base64",
                "embed_override_token_id": 400,
                "embed_overrides": [[embedding]],
            },
        ),
        Right("/v1/classify", {"model": "default", "input": "Who?"}),
        Right(
            "/v1/score",
            {
                "query": "Who?",
                "items": ["I", "you"],
                "label_token_ids": [1, 2],
                "apply_softmax": True,
                "temperature": 0.5,
                "return_token_logprobs": True,
            },
        ),
        Right(
            "/v1/score",
            {
                "query": [400, 31_999, 402],
                "items": [[403, 31_999], [404]],
                "label_token_ids": [[500], [501]],
                "embed_override_token_id": 31_999,
                "query_embed_overrides": [embedding],
                "item_embed_overrides": [[embedding], None],
            },
        ),
        Right("/v1/rerank", {"query": "Who?", "documents": ["I", "you"], "top_n": 1}),
        Right(
            "/v1/decisions",
            {
                "model": "default",
                "input": "Who?",
                "questions": [{"id": "q", "type": "yes_no", "question": "Is it?"}],
            },
        ),
        Right(
            "/v1/systemone",
            {"model": "default", "state": "a", "questions": {"q": {"question": "Is it?"}}},
        ),
        Right("/v1/tokenize", {"model": "default", "prompt": "Who?"}),
        Right("/v1/tokenize", {"model": "default", "messages": CHAT, "tools": []}),
        Right("/v1/detokenize", {"model": "default", "tokens": [5, 6, 7]}),
        Right(
            "/vertex_generate",
            {
                "instances": [{"input_ids": IDS}, {"input_ids": IDS}],
                "parameters": {"sampling_params": FEW, "return_logprob": True, "extra_key": "a"},
            },
        ),
        Right(
            "/api/chat",
            {
                "model": "default",
                "messages": CHAT,
                "stream": False,
                "options": {"num_predict": 2, "temperature": 0, "seed": 1, "stop": ["a"]},
            },
        ),
        Right(
            "/api/generate",
            {
                "model": "default",
                "prompt": "Who?",
                "system": "a",
                "options": {"num_predict": 2, "top_k": 5, "top_p": 0.5},
            },
        ),
        Right("/api/show", {"model": "default"}),
        Right("/v1/models/{}", method="GET"),
        Right("/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "qwen25"}),
        Right("/separate_reasoning", {"text": "a", "reasoning_parser": "qwen3"}),
        Right("/open_session", {"capacity_of_str_len": 1000, "session_id": "b", "timeout": 0.01}),
        Right("/close_session", {"session_id": "none"}),
        Right("/hybrid_cache/explain", {"input_ids": IDS, "extra_key": "a", "cache_salt": "b"}),
        Right("/hybrid_cache/explain", {"request_id": "sweep-3", "lora_path": None}),
        Right("/hybrid_cache/prompt/generate", {"text": "Who?", "sampling_params": FEW}),
        Right("/hybrid_cache/prompt/v1/chat/completions", {"model": "default", "messages": CHAT}),
        Right("/hybrid_cache/prompt/{}", {"text": "Who?"}),
        Right("/hybrid_cache/resumable?cursor={}", method="GET"),
        Right("/hybrid_cache/ask", {"text": "Who?", "tenant": "", "extra_key": "a"}),
        Right("/hybrid_cache/ask", {"messages": CHAT}),
        Right("/hybrid_cache/ask", {"input_ids": IDS}),
        Right("/hybrid_cache/ask", {"request_id": "sweep-3", "tenant": "a"}),
        Right("/hybrid_cache/differ", {"first": [5, 6, 7], "second": [5, 7]}),
        Right("/hybrid_cache/nodes/0/{}", method="GET"),
        Right("/hybrid_cache/static/{}", method="GET"),
        Right("/v1/prompt_schemas", {"pml": SCHEMA, "extra_key": "b", "cache_salt": "b"}),
        Right("/v1/prompt_schemas?extra_key={}", method="GET"),
        Right("/v1/prompt_schemas/{}", method="GET"),
        Right("/v1/prompt_schemas/{}", method="DELETE"),
        Right(
            "/v1/prompt_schemas/sweep/prewarm",
            {
                "budget_mb": 1,
                "tokens_per_second": 1e6,
                "ttl": 5,
                "priority": "low",
                "mode": "exact",
                "extra_key": "sweep",
            },
        ),
        Right("/v1/prompt_schemas/{}/prewarm", {}),
        Right("/v1/prompt_schemas/{}/lint"),
    ]


def admin_requests() -> list[Right]:
    """Requests of an operator, but for those that wait for other machines or take seconds. They are
    sent one after another, since they act on the whole server.
    """
    adapter = {"lora_name": "a", "lora_path": "/nowhere"}
    group = {"master_address": "nowhere.invalid", "ports": "1", "group_name": "g"}
    tensors = {"serialized_named_tensors": ["AAAA"]}
    weights = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none"}
    awake = ("/continue_generation", {})
    return [
        Right("/load_lora_adapter", {**adapter, "pinned": False}),
        Right("/unload_lora_adapter", adapter),
        Right("/load_lora_adapter_from_tensors", {**adapter, **tensors, "config_dict": {"r": 1}}),
        Right("/update_weights_from_disk", {"model_path": "/nowhere", "load_format": "auto"}),
        Right("/update_weights_from_tensor", {**tensors, "load_format": None}),
        Right("/update_weights_from_distributed", weights),
        Right("/update_weights_from_ipc", {"zmq_handles": {"a": "b"}}),
        Right("/send_weights_to_remote_instance", group),
        Right("/destroy_weights_update_group", {"group_name": "none"}),
        Right("/begin_weight_update", {}, undo=("/end_weight_update", {})),
        Right("/get_weights_by_name", {"name": "model.embed_tokens.weight", "truncate_size": 2}),
        Right("/update_weight_version", {"new_version": "default", "abort_all_requests": False}),
        Right("/weights_checker", {"action": "checksum"}),
        Right(
            "/slow_down",
            {"forward_sleep_time": 0.001},
            undo=("/slow_down", {"forward_sleep_time": None}),
        ),
        Right("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 2}}),
        Right("/abort_request", {"rid": "none", "abort_all": False}),
        Right("/pause_generation", {"mode": "in_place"}, undo=awake),
        Right("/pause_generation", {"mode": "abort"}, undo=awake),
        Right("/continue_generation", {}),
        Right(
            "/release_memory_occupation",
            {"tags": ["kv_cache"]},
            undo=("/resume_memory_occupation", {}),
        ),
        Right("/resume_memory_occupation", {"tags": ["kv_cache"]}),
        Right(
            "/configure_logging",
            {"log_requests": False, "log_requests_level": 0},
            undo=("/configure_logging", {"log_requests": False}),
        ),
        Right("/set_trace_level?level={}", undo=("/set_trace_level?level=0", {})),
        Right("/flush_cache?timeout={}"),
        Right("/hicache/storage-backend", {"hicache_storage_backend": "file"}, "PUT"),
        Right("/add_external_corpus", {"corpus_id": "a", "documents": ["b"]}),
        Right("/remove_external_corpus", {"corpus_id": "a"}),
        Right("/scale_elastic_ep", {"new_ep_size": 2}),
        Right("/pd_role_switch", {"role": "prefill"}),
        Right("/get_weights_by_name?name={}", method="GET"),
    ]


def prepare(url: str) -> None:
    """Things that the requests of clients name: a schema and a session of theirs."""
    requests.post(url + "/v1/prompt_schemas", json={"pml": SCHEMA}, headers=TENANT, timeout=60)
    session = {"capacity_of_str_len": 10_000, "session_id": "sweep"}
    requests.post(url + "/open_session", json=session, headers=TENANT, timeout=60)


def _deep(around: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(50):
        value = around(value)
    return value


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *(2**31, 2**63 - 1, 2**63, -(2**63), 10**4_208),
    *("", "a", "\0", "\ud800", "🚀", "a" * 5000, "\x1b[2J\r\n", "HEALTH_CHECK", "/", "../.."),
    *("(", "{", "a|*", "9" * 4_209, "[" * 3_000, "data:image/png;base64,AAAA", "\u0661"),
    *([], [[]], {}, [None], [-1], [10**12], ["a"], ["a", 1], [[5], [6, 7]], [5, 6, 7], [[[]]]),
    *([[0.1] * 7], [[0.1] * 3, [0.2] * 4], [[math.nan]], [0.1, 0.2], ["a"] * 100, [{}]),
    *({"": None}, {"a": {"b": [1, {"c": []}]}}, {"type": "json_schema"}, {"type": "text"}),
    *({"format": "processor_output"}, {"url": 5}, {"a" * 5000: "b"}),
    *(_deep(lambda value: [value]), _deep(lambda value: {"a": value})),
]
"""Values that mistakes are made of."""

ODD_MARKUP = [
    SCHEMA.replace('length="4"', f'length="{length}"')
    for length in ("0", "-1", "00000000014" + "9" * 4_200, "1" * 4_209, "9" * 5_000, "\u0661", "")
] + [
    SCHEMA.replace('name="sweep"', f'name="{"a" * 5_000}"'),
    SCHEMA.replace('"a"', f'"{"a" * 5_000}"').replace('name="sweep"', 'name="long"'),
    SCHEMA.replace("Be brief.", "&#0;"),
    "<schema name='a'>" + "<module name='a'>" * 100 + "</module>" * 100 + "</schema>",
]

ODD_HEADERS = [
    *("", "a", "true", "-1", "a" * 5_000, "9" * 4_209, "[", "{}", "[{}]", "[" * 3_000, "null"),
    *("\x01", "\xe9", "1e999", "return; seconds=" + "9" * 400, "return; seconds=0", "end"),
    json.dumps([_action("hybrid.pin", positions=[10**4_208], ttl=10**4_208)]),
    json.dumps([_action("hybrid.session", next="return", seconds=10**4_208)]),
    json.dumps([_action("hybrid.prewarm", tokens_per_second=10**4_208)]),
]

ODD_NAMES = [
    *("a", "sweep", "a" * 5_000, "\0", "..", "../..", "%", "🚀", "9" * 4_209, "-1", " ", "{}"),
    *("\ud800".encode(errors="surrogatepass"), "\r\n"),
]


@dataclass(frozen=True)
class Case:
    """A right request with one odd value. place: of the value in the body, () for the body itself;
    None where a header or a name in the path is odd. odd: what is, in words.
    """

    right: Right
    url: str
    headers: Mapping[str, str]
    odd: str
    place: tuple[Any, ...] | None = None
    value: Any = None

    @property
    def body(self) -> Any:
        """A place that the right body has not, is added."""
        if not self.place:
            return self.right.body if self.place is None else self.value
        changed = copy.deepcopy(self.right.body)
        part = changed
        for key in self.place[:-1]:
            part = part[key]
        part[self.place[-1]] = self.value
        return changed

    def __str__(self) -> str:
        is_value = "" if self.place is None else f" is {_shown(self.value)}"
        return f"{self.right.method} {self.right.path}: {self.odd}{is_value}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of values, also of values that contain others; of a list only the first one."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = [(0, value[0])] if value else ()
    for key, part in inner:
        yield (*path, key)
        yield from _places(part, (*path, key))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:60]}... ({len(text)} characters)"


def cases(rights: Sequence[Right], fields: Mapping[str, Sequence[str]]) -> Iterator[Case]:
    """Each right request as it is, and with each odd value in each of its places. A field that no
    right body of a route has is added to the first one.

    fields: of the JSON bodies of routes.
    """
    known: dict[str, set[str]] = {}
    for right in rights:
        if isinstance(right.body, dict):
            known.setdefault(right.path, set()).update(right.body)
    added = set()
    for right in rights:
        headers = {**TENANT, **right.headers}
        names: Sequence[Any] = ODD_NAMES if "{}" in right.path else [""]
        for name in names:
            url = right.path.replace("{}", quote(name, safe=""))
            yield Case(right, url, headers, f"named {_shown(str(name))}" if name else "right")
        if right.body is None:
            continue
        url = right.path.replace("{}", "sweep")
        for header in right.headers:
            for text in ODD_HEADERS:
                odd = f"{header} is {_shown(text)}"
                yield Case(right, url, {**headers, header: text}, odd)
        places = [(), *_places(right.body)]
        if right.path not in added:
            added.add(right.path)
            more = set(fields.get(right.path, ())) - known.get(right.path, set())
            places += [(name,) for name in sorted(more)]
        for place in places:
            where = ".".join(map(str, place)) or "the body"
            for value in [*ODD, *ODD_MARKUP] if "pml" in place else ODD:
                yield Case(right, url, headers, where, place, value)


def fields_of(schema: dict[str, Any]) -> dict[str, list[str]]:
    """The fields of the JSON body of each route, from a server's OpenAPI schema."""
    found: dict[str, list[str]] = {}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            body = content.get("application/json", {}).get("schema", {})
            while "$ref" in body or "anyOf" in body:
                if "anyOf" in body:
                    body = next(one for one in body["anyOf"] if one.get("type") != "null")
                else:
                    name = body["$ref"].rsplit("/", 1)[1]
                    body = schema["components"]["schemas"][name]
            found.setdefault(path, []).extend(sorted(body.get("properties", ())))
    return found


@dataclass
class Swept:
    """The results of the cases. mistakes: statuses of the server's own mistakes, and the first case
    of each that was said.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    mistakes: dict[tuple[str, int, str], str] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, path: str, case: object, status: int, seconds: float, said: str) -> None:
        with self._lock:
            self.statuses[status] += 1
            self.slowest = max(self.slowest, (seconds, str(case)[:200]))
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
                self.mistakes.setdefault((path, status, said[:100]), str(case)[:300])

    def summary(self) -> str:
        """The summary for docs/robustness.md."""
        statuses = ", ".join(f"{status}: {n:,}" for status, n in sorted(self.statuses.items()))
        lines = [
            f"{sum(self.statuses.values()):,} cases; {statuses}",
            f"slowest: {self.slowest[0]:.1f} s, {self.slowest[1]}",
            *(f"{status} {said} <- {case}" for (_, status, said), case in self.mistakes.items()),
        ]
        return "\n".join(lines)


_session = threading.local()


def send(url: str, case: Case) -> tuple[int, float, str]:
    """Status, seconds and the beginning of the answer. Raises requests' errors: there is none."""
    if not hasattr(_session, "its"):
        _session.its = requests.Session()
    headers = {name: value.encode("utf-8", "replace") for name, value in case.headers.items()}
    data = None
    if case.right.body is not None:
        headers["Content-Type"] = b"application/json"
        data = json.dumps(case.body)
    begin = time.monotonic()
    asked: Any = (case.right.method, url + case.url)
    try:
        response = _session.its.request(*asked, data=data, headers=headers, timeout=LIMIT)
    except requests.ConnectionError:  # the server has closed a connection that was idle
        _session.its.close()
        response = _session.its.request(*asked, data=data, headers=headers, timeout=LIMIT)
    seconds = time.monotonic() - begin
    if case.right.undo is not None:
        path, body = case.right.undo
        _session.its.post(url + path, json=body, timeout=LIMIT)
    return response.status_code, seconds, response.text[:500]


def sweep(
    url: str, all_cases: Iterable[Case], check: Callable[[], None], threads: int = THREADS
) -> Swept:
    """Send all cases, several at a time, and call `check` between groups of them. What it raises
    has the group as a note.
    """
    found = Swept()

    def one(case: Case) -> None:
        try:
            found.note(case.right.path, case, *send(url, case))
        except requests.RequestException as error:
            error.add_note(f"no answer to {case}")
            raise

    left = iter(all_cases)
    with ThreadPoolExecutor(threads) as pool:
        while group := list(islice(left, TOGETHER)):
            try:
                for done in [pool.submit(one, case) for case in group]:
                    done.result()
                check()
            except BaseException as error:
                error.add_note("one of: " + "\n".join(map(str, group)))
                raise
    return found


def sample(all_cases: Iterable[Case], count: int, seed: int) -> list[Case]:
    """A sample of `count` cases, but for those whose answers may be long."""
    short = [case for case in all_cases if not {*LONG_ANSWERS} & {*(case.place or ())}]
    return random.Random(seed).sample(short, count)
