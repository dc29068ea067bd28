"""OpenTelemetry spans of a server (`--enable-trace`): what the cache did is in them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import requests
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from sglang_hybrid.serving.telemetry.spans import QUEUE, span_attributes
from tests.server.client import Serve, greedy, random_prompt, until

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(collector.TraceServiceServicer):  # type: ignore[misc]
    """Keeps the spans that a server exports: trace id and attributes."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, Any]]] = []

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {each.key: _value(each.value) for each in span.attributes}
                    self.spans.append((span.trace_id.hex(), attributes))
        return ExportTraceServiceResponse()

    def of_cache(self) -> list[tuple[str, dict[str, Any]]]:
        """Spans that tell of the cache."""
        return [each for each in self.spans if "hybrid_cache.hit_tokens" in each[1]]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector, and its endpoint."""
    server = grpc.server(ThreadPoolExecutor(1))
    one = Collector()
    collector.add_TraceServiceServicer_to_server(one, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield one, f"127.0.0.1:{port}"
    server.stop(None)


def test_a_report_becomes_attributes() -> None:
    report = {
        "hit_tokens": 3,
        "missed": "no_state",
        "checkpoints": [{"position": 7, "kind": "tail"}, {"position": 9, "kind": "branch"}],
        "declared": {"kept": [], "written_tokens": 0},
        "tiers": {"way": "load", "state": None},
    }
    assert span_attributes(report) == {
        "hybrid_cache.hit_tokens": 3,
        "hybrid_cache.missed": "no_state",
        "hybrid_cache.checkpoints.position": [7, 9],
        "hybrid_cache.checkpoints.kind": ["tail", "branch"],
        "hybrid_cache.declared.kept": [],
        "hybrid_cache.declared.written_tokens": 0,
        "hybrid_cache.tiers.way": "load",
    }


@pytest.mark.slow
def test_a_span_says_what_was_hit_and_why_not_more(serve: Serve) -> None:
    prompt = random_prompt(300, 1)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with collecting() as (found, endpoint):
        variables = {"SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100"}
        flags = ("--enable-trace", "--otlp-traces-endpoint", endpoint)
        with serve(*flags, environment=variables) as server:
            until(lambda: found.spans)  # those of the warm-up
            found.spans.clear()
            for tokens in (prompt, [*prompt[:200], *random_prompt(50, 2)], [*prompt, 5]):
                body = greedy(tokens, 4)
                answer = requests.post(
                    f"{server.url}/generate", json=body, headers=headers, timeout=60
                ).json()
                until(found.of_cache)
                ((trace, attributes),) = found.of_cache()
                found.spans.clear()
                assert trace == TRACE
                report = answer["meta_info"]["hybrid_cache"]
                expected = span_attributes(report)
                assert {name: attributes[name] for name in expected} == expected
                assert attributes["gen_ai.usage.prompt_tokens"] == len(tokens)
                assert attributes[QUEUE] >= 0
        assert report["hit_tokens"] >= 299
