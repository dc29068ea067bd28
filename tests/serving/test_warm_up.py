"""The warm-up of hits: what it asks of the server, and of whom it asks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from sglang_hybrid.serving import warm_up


class Manager:
    """SGLang's TokenizerManager, as far as the warm-up uses it. Each prompt hits seven tokens."""

    def __init__(self, *, ranks: int = 1, is_generation: bool = True, longest: int = 4096) -> None:
        self.server_args = SimpleNamespace(dp_size=ranks)
        self.model_config = SimpleNamespace(
            is_generation=is_generation, vocab_size=400, context_len=longest
        )
        self.asked: list[Any] = []

    async def generate_request(self, request: Any, _: None) -> AsyncIterator[list[dict[str, Any]]]:
        self.asked.append(request)
        if len(request.input_ids[0]) > self.model_config.context_len:
            raise ValueError("the prompt is too long")
        await asyncio.sleep(0)
        yield [{"meta_info": {"cached_tokens": 7}} for _ in request.input_ids]


def ask(manager: Manager, mode: str = "null") -> list[Any]:
    asyncio.run(warm_up.send_hits(mode, manager))
    return manager.asked


def test_prompts_go_on_from_one_that_was_computed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        first, one, two = (request.input_ids for request in ask(Manager()))
    assert [len(first), len(one), len(two)] == [1, 1, 2]
    for prompt in (*one, *two):
        assert prompt[: warm_up.TOKENS] == first[0] and len(prompt) > warm_up.TOKENS
    assert len({prompt[warm_up.TOKENS] for prompt in (*one, *two)}) == 3
    assert all(0 <= token < 400 for token in two[1])
    assert "hits of 21 tokens" in caplog.text


def test_each_rank_has_hits_of_its_own_tenant_at_the_same_time() -> None:
    requests = ask(Manager(ranks=2))
    assert [request.routed_dp_rank for request in requests] == [0, 1, 0, 1, 0, 1]
    tenants = [{*request.extra_key} for request in requests]
    assert tenants[0] == tenants[2] == tenants[4] != tenants[1] == tenants[3] == tenants[5]
    assert all(len(tenant) == 1 for tenant in tenants)
    assert not any(request.log_metrics for request in requests)


def test_nothing_is_asked_of_decode_servers_and_of_embeddings() -> None:
    assert ask(Manager(), "decode") == []
    assert ask(Manager(is_generation=False)) == []


def test_a_prefill_server_sends_it_nowhere() -> None:
    assert {request.bootstrap_host for request in ask(Manager())} == {None}
    for request in ask(Manager(), "prefill"):
        assert request.bootstrap_host == [FAKE_BOOTSTRAP_HOST] * len(request.input_ids)
        assert len(set(request.bootstrap_room)) == len(request.input_ids)


def test_prompts_fit_into_a_short_context_and_a_refusal_ends_no_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert [len(request.input_ids[0]) for request in ask(Manager(longest=100))] == [50, 70, 70]
    assert len(ask(Manager(longest=20))) == 2
    assert "no hit was warmed up: the prompt is too long" in caplog.text
