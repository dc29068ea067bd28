"""Clients that nobody here wrote, as their users write them, on a cold cache and once more.

Each that passes has its row in the table of docs/clients.md written anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from tests.clients.conftest import ROOT, RunClient
from tests.server.client import TOLERANCE, hybrid_cache
from tests.tables import table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE = ROOT / "docs" / "clients.md"


@dataclass(frozen=True)
class Client:
    """A client, and what is expected of it.

    Attributes:
        name: as users know it.
        program: its file in `programs/`, without the ending of those in Python.
        did: what the program does.
        told: what the client must be told, beside the address.
        turns: requests at the start that are one conversation: each has the one before it, and its
            answer, as a prefix.
        share: of all prompt tokens on a cold cache, the part that comes from it at least.
        own: whether it is in the environment of the tests.
        starts: of the requests that are reported, how many ask for log probabilities that begin
            inside the prompt.
        all_seen: whether it reports each request that it sends.
    """

    name: str
    program: str
    did: str
    told: str = "nothing"
    turns: int = 0
    share: float = 0.0
    own: bool = False
    starts: int = 0
    all_seen: bool = True


_AGENT = "an agent with tools over six turns, a streamed answer with usage, a parsed one"
CLIENTS = [
    Client(
        "lm-eval",
        "lm_eval_few_shot",
        "multiple choice and short answers with eight shots, by `sglang-generate`, whose tokens "
        "these are, and by `local-completions`",
        "for hits of multiple choice: `logprob_start_len` where the choice begins, in a subclass "
        "of `sglang-generate`; `local-completions` asks for log probabilities of the whole prompt, "
        "which so is computed",
        share=0.5,
        starts=16,
        all_seen=False,
    ),
    Client("openai", "openai_agent", _AGENT, turns=6),
    Client(
        "anthropic",
        "anthropic_blocks",
        "six turns with tools, rules and last messages as marked blocks, a streamed answer",
        "`temperature` in `extra_body`: its own methods have lost it",
        turns=6,
    ),
    Client("litellm", "litellm_library", "an agent with tools over six turns, a stream", turns=6),
    Client(
        "litellm, proxy",
        "litellm_proxy",
        "through it, what openai did",
        "`master_key`, without which it does not start",
        turns=6,
    ),
    Client(
        "langchain",
        "langchain_agent",
        "an agent of six calls, a streamed answer, a structured one",
        '`stream_usage=True`; `method="json_schema"` for structured answers',
        turns=6,
    ),
    Client(
        "pydantic-ai",
        "pydantic_ai_agent",
        "six questions with history to an agent with a tool and a typed result",
        "to leave out `metadata` of answers, which SGLang 0.5.23 fills with what OpenAI's type "
        "forbids: `_validate_completion`, overridden in three lines",
        turns=6,
    ),
    Client(
        "instructor",
        "instructor_records",
        "records of six questions about one text, by a tool and by a schema",
        share=0.75,
    ),
    Client(
        "dspy",
        "dspy_program",
        "a program with demonstrations, six questions, typed answers",
        "that the model takes schemas: `register_provider`, `ModelSupport(response_schema=True)`",
        share=0.75,
    ),
    Client(
        "guidellm",
        "guidellm_load",
        "24 prompts of two shared prefixes, four at a time",
        "the tokenizer's folder; `extras.body.temperature=0` for equal answers",
        share=0.6,
        all_seen=False,
    ),
    Client(
        "sglang.bench_serving",
        "bench_serving_load",
        "24 prompts of three shared prefixes, four at a time",
        "`--cache-report`; `--warmup-requests 0` for an exact count",
        share=0.6,
        own=True,
    ),
    Client(
        "sglang-router",
        "sglang_router_agent",
        "in front, what openai did; two tenants",
        "a tenant in the header `X-Request-Id-Hybrid-Tenant`, since fields are dropped",
        turns=6,
        all_seen=False,
    ),
    Client(
        "Vercel AI SDK",
        "vercel_ai_agent.mjs",
        "an agent with tools over six turns and a streamed answer, by `@ai-sdk/openai-compatible` "
        "and by `@ai-sdk/anthropic`",
        "`includeUsage` of the first, for streams",
        turns=6,
    ),
]


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, list[str]]]:
    """The table's rows by client, which are written at the end; those of the page at first."""
    columns = ("client", "version", "what it did", "tokens from the cache, cold", "again", "told")
    with table(PAGE, "clients", columns, [client.name for client in CLIENTS]) as found:
        yield found


def _of(run: dict[str, Any]) -> str:
    return f"{sum(run['cached']):,} of {sum(run['prompts']):,}"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.program)
def test_what_it_asks_again_is_hit_and_answered_alike(
    client: Client, default_server: str, run_client: RunClient, rows: dict[str, list[str]]
) -> None:
    before = hybrid_cache(default_server)["hit_tokens"]
    said = run_client(client.program, default_server, own=client.own)
    hit = hybrid_cache(default_server)["hit_tokens"] - before
    cold, warm = said["runs"]

    assert cold["answers"] and warm["answers"] == cold["answers"]
    assert warm.get("logprobs", []) == pytest.approx(cold.get("logprobs", []), abs=TOLERANCE)

    prompts, cached = cold["prompts"], cold["cached"]
    assert 0 in cached
    for (earlier, _), (_, found) in pairwise(
        zip(prompts[: client.turns], cached[: client.turns], strict=True)
    ):
        assert found == earlier - 1
    assert sum(cached) >= client.share * sum(prompts)

    # All of a prompt that was seen before is hit but its last token, which is always computed;
    # where log probabilities begin inside it, what lies before them.
    missed = [p - c for p, c in zip(warm["prompts"], warm["cached"], strict=True)]
    assert missed[client.starts :] == [1] * len(missed[client.starts :])
    assert all(each <= 8 for each in missed[: client.starts])

    told = sum(cached) + sum(warm["cached"])
    assert told == hit if client.all_seen else told <= hit
    row = [client.name, said["version"], client.did, _of(cold), _of(warm), client.told]
    rows[client.name] = row
