"""Requests that nobody would send: from the server's own schema, or right but for a field."""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

LIMIT = 300
"""Seconds within which every answer must come; 1,000 samples of 128 tokens take half of them."""

SAMPLING = {"max_new_tokens": 2, "temperature": 0}
CHAT = [{"role": "user", "content": "Who keeps the archive?"}]
LORA = {"lora_name": "a", "lora_path": "/nowhere"}
GROUP = {"master_address": "nowhere.invalid", "world_size": 2, "group_name": "g", "backend": "gloo"}

RIGHT: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": SAMPLING},
    "/encode": {"input_ids": [5, 6, 7]},
    "/classify": {"text": "Who?"},
    "/v1/completions": {"model": "default", "prompt": "Who?", "max_tokens": 2},
    "/v1/chat/completions": {"model": "default", "messages": CHAT, "max_tokens": 2},
    "/invocations": {"model": "default", "messages": CHAT, "max_tokens": 2},
    "/v1/messages": {"model": "default", "messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "default", "messages": CHAT},
    "/v1/responses": {"model": "default", "input": "Who?", "max_output_tokens": 2},
    "/v1/embeddings": {"model": "default", "input": "Who?"},
    "/v1/classify": {"model": "default", "input": "Who?"},
    "/v1/score": {"query": "Who?", "items": ["I", "you"], "label_token_ids": [1, 2]},
    "/v1/rerank": {"query": "Who?", "documents": ["I", "you"]},
    "/v1/tokenize": {"model": "default", "prompt": "Who?"},
    "/v1/detokenize": {"model": "default", "tokens": [5, 6, 7]},
    "/vertex_generate": {
        "instances": [{"input_ids": [5, 6, 7]}],
        "parameters": {"sampling_params": SAMPLING},
    },
    "/api/chat": {"model": "default", "messages": CHAT, "options": {"num_predict": 2}},
    "/api/generate": {"model": "default", "prompt": "Who?", "options": {"num_predict": 2}},
    "/hybrid_cache/explain": {"input_ids": [5, 6, 7]},
    "/open_session": {"capacity_of_str_len": 1000},
    "/close_session": {"session_id": "none"},
    "/load_lora_adapter": LORA,
    "/unload_lora_adapter": LORA,
    "/load_lora_adapter_from_tensors": {
        **LORA,
        "serialized_named_tensors": ["AAAA"],
        "config_dict": {},
    },
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAA"]},
    "/update_weights_from_distributed": {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
    "/update_weights_from_ipc": {"zmq_handles": {}},
    "/init_weights_update_group": {**GROUP, "master_port": 1, "rank_offset": 1},
    "/init_weights_send_group_for_remote_instance": {**GROUP, "ports": "1", "group_rank": 1},
    "/send_weights_to_remote_instance": {**GROUP, "ports": "1"},
    "/get_weights_by_name": {"name": "model.embed_tokens.weight"},
    "/update_weight_version": {"new_version": "default"},
    "/weights_checker": {"action": "checksum"},
    "/slow_down": {"forward_sleep_time": 0.01},
    "/set_internal_state": {"server_args": {"pp_max_micro_batch_size": 2}},
    "/abort_request": {"rid": "none"},
    "/start_profile": {"with_stack": False, "num_steps": 1},
}
"""A body that is done, or refused for the one reason that this server is not made for it."""

UNDONE: dict[str, tuple[str, dict[str, Any]]] = {
    "/pause_generation": ("/continue_generation", {}),
    "/slow_down": ("/slow_down", {"forward_sleep_time": None}),
    "/release_memory_occupation": ("/resume_memory_occupation", {}),
    "/start_profile": ("/stop_profile", {}),
    "/begin_weight_update": ("/end_weight_update", {}),
    "/configure_logging": ("/configure_logging", {"log_requests": False}),
    "/set_trace_level": ("/set_trace_level?level=0", {}),
}
"""What brings the server back to where it was, so that each case meets the same one."""

OFTEN = {
    "/generate": 12,
    "/v1/chat/completions": 6,
    "/v1/completions": 6,
    "/v1/responses": 4,
    "/v1/messages": 3,
    "/v1/score": 3,
    "/vertex_generate": 2,
    "/open_session": 2,
    "/hybrid_cache/explain": 2,
}

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 0.5, -0.0, 1e-300, 1e300, 2**31, 2**63 - 1, 2**63, -(2**63)),
    *("", "a", "\0", "🚀", "a" * 5000, "HEALTH_CHECK", "/", "../..", "(", "{", "a|*"),
    *([], [[]], {}, [None], [-1], [10**12], ["a"], ["a", 1], [[5], [6, 7]], [5, 6, 7], [[[]]]),
    *({"": None}, {"a": {"b": [1, {"c": []}]}}, {"type": "json_schema"}, [{}], [0.1, 0.2]),
]
"""Values that mistakes are made of."""


@dataclass
class Findings:
    """What became of the cases. errors: what was said with a status of 500, and its first case."""

    statuses: Counter[int] = field(default_factory=Counter)
    endpoints: Counter[str] = field(default_factory=Counter)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")

    def note(self, case: schemathesis.Case, status: int, seconds: float, said: str) -> None:
        name = f"{case.method} {case.operation.path}"
        self.statuses[status] += 1
        self.endpoints[name] += 1
        self.slowest = max(self.slowest, (seconds, name))
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.errors.setdefault((name, said[:80]), str(case.body)[:300])

    def summary(self) -> str:
        """For docs/robustness.md."""
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(self.statuses.items()))
        lines = [
            f"{sum(self.statuses.values())} cases, {len(self.endpoints)} operations; {statuses}",
            f"slowest: {self.slowest[0]:.1f} s, {self.slowest[1]}",
            *(f"500 {name}: {said} <- {body}" for (name, said), body in self.errors.items()),
        ]
        return "\n".join(lines)


def cases(schema: dict[str, Any]) -> st.SearchStrategy[schemathesis.Case]:
    """Cases for every operation of an OpenAPI schema, more for those that do most."""
    closed = schemathesis.openapi.from_dict(_closed(schema))
    operations = [result.ok() for result in closed.get_all_operations()]
    often = [one for one in operations for _ in range(OFTEN.get(one.path, 1))]
    names = {
        (method, path): _fields_of(schema, operation)
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }

    def of(operation: Any) -> st.SearchStrategy[schemathesis.Case]:
        right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        fields = names[operation.method, operation.path]
        if not fields or operation.path not in RIGHT:
            return st.one_of(right, wrong)
        odd = _with_odd_fields(right, RIGHT[operation.path], fields)
        return st.one_of(odd, odd, odd, right, wrong)

    once = {id(operation): of(operation) for operation in often}
    return st.sampled_from(often).flatmap(lambda operation: once[id(operation)])


def send(url: str, case: schemathesis.Case) -> tuple[int, float, str]:
    """Status, seconds and the beginning of the answer. Raises requests' errors: there is none."""
    begin = time.monotonic()
    response = case.call(base_url=url, timeout=LIMIT)
    seconds = time.monotonic() - begin
    if case.operation.path in UNDONE:
        path, body = UNDONE[case.operation.path]
        requests.post(url + path, json=body, timeout=LIMIT)
    return response.status_code, seconds, response.text[:500]


@st.composite
def _with_odd_fields(
    draw: st.DrawFn,
    right: st.SearchStrategy[schemathesis.Case],
    base: dict[str, Any],
    fields: list[str],
) -> schemathesis.Case:
    """A right body in which one or two fields are what the schema allows, or odd."""
    case = draw(right)
    body = copy.deepcopy(base)
    allowed = case.body if isinstance(case.body, dict) else {}
    names = st.sampled_from([*fields, *sorted(set(allowed) & set(fields)) * 3])
    for name in draw(st.lists(names, min_size=1, max_size=2)):
        if name in allowed and draw(st.integers(0, 3)):
            body[name] = allowed[name]
        else:
            body[name] = draw(st.sampled_from(ODD))
    inner = body.get("sampling_params")
    if isinstance(inner, dict) and draw(st.booleans()):
        name = draw(st.sampled_from(SAMPLING_FIELDS))
        body["sampling_params"] = {**inner, name: draw(st.sampled_from(ODD))}
    case.body = body
    return case


SAMPLING_FIELDS = [
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k"),
    *("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
    *("n", "beam_width", "json_schema", "regex", "ebnf", "structural_tag", "ignore_eos"),
    *("skip_special_tokens", "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed"),
    *("custom_params", "watermark", "spaces_between_special_tokens"),
]


def _fields_of(schema: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    """The fields of an operation's JSON body."""
    content = operation.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("schema", {})
    while "$ref" in body or "anyOf" in body:
        if "anyOf" in body:
            body = next(one for one in body["anyOf"] if one.get("type") != "null")
        else:
            body = schema["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    return sorted(body.get("properties", ()))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Without fields that the schema does not name: such requests are refused before all else."""
    schema = copy.deepcopy(schema)
    for component in schema["components"]["schemas"].values():
        if "properties" in component:
            component["additionalProperties"] = False
    return schema
