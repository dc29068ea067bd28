"""Requests that nobody would send, from the server's own schema: right ones, and wrong ones."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.server.sweep import LIMIT

UNDONE: dict[str, tuple[str, dict[str, Any]]] = {
    "/pause_generation": ("/continue_generation", {}),
    "/slow_down": ("/slow_down", {"forward_sleep_time": None}),
    "/release_memory_occupation": ("/resume_memory_occupation", {}),
    "/start_profile": ("/stop_profile", {}),
    "/begin_weight_update": ("/end_weight_update", {}),
    "/configure_logging": ("/configure_logging", {"log_requests": False}),
    "/set_trace_level": ("/set_trace_level?level=0", {}),
}
"""Requests that bring the server back to where it was, so that each case meets the same one."""

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


def cases(
    schema: dict[str, Any], most: int | None = None, seed: int = 0
) -> st.SearchStrategy[schemathesis.Case]:
    """Cases for every operation of an OpenAPI schema, more for those that do most. most: operations
    that are drawn by the seed; None: all. That of a chat takes 20 seconds before its first case.
    """
    closed = schemathesis.openapi.from_dict(_closed(schema))
    operations = [result.ok() for result in closed.get_all_operations()]
    if most is not None:
        operations = random.Random(seed).sample(operations, most)
    often = [one for one in operations for _ in range(OFTEN.get(one.path, 1))]

    def of(operation: Any) -> st.SearchStrategy[schemathesis.Case]:
        right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        wrong = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        return st.one_of(right, wrong)

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


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, closed to fields that it does not name: such requests are refused first."""
    schema = copy.deepcopy(schema)
    for component in schema["components"]["schemas"].values():
        if "properties" in component:
            component["additionalProperties"] = False
    return schema
