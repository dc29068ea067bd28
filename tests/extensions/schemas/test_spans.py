"""Spans of a prompt that a client wants computed apart: what it may say, and what follows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_hybrid.core.returns.hints import MOST_POSITIONS
from sglang_hybrid.extensions.schemas.declared.modular import ModularPrompt, Segment
from sglang_hybrid.extensions.schemas.endpoints import apart, spans
from sglang_hybrid.serving.requests.cache_fields import Imported, server_part
from sglang_hybrid.serving.stored_keys import composed_key, segment_key

IDS = list(range(100, 160))
NEMOTRON_H = SimpleNamespace(model_type="nemotron_h")
LLAMA = SimpleNamespace(model_type="llama")


def said(*pairs: tuple[Any, Any], **more: Any) -> dict[str, Any]:
    return {"segments": [{"start": start, "end": end} for start, end in pairs], **more}


def hints(payload: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": "hybrid.segments", "action_version": "1"}
    return {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [{**action, "payload": payload}],
    }


def manager(model: Any = NEMOTRON_H) -> Any:
    config = SimpleNamespace(
        hf_text_config=model, hf_config=SimpleNamespace(to_dict=lambda: vars(model))
    )
    args = SimpleNamespace(
        radix_cache_backend="hybrid",
        page_size=1,
        speculative_algorithm=None,
        tokenizer_worker_num=1,
    )
    return SimpleNamespace(
        model_config=config,
        server_args=args,
        context_len=1_000,
        tokenizer=lambda text: {"input_ids": IDS[: len(text)]},
        allow_auto_truncate=True,
    )


@pytest.fixture(autouse=True)
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that has nothing to say; each test has managers of its own."""
    for module in (spans, apart):
        monkeypatch.setattr(module, "registry_of", lambda _: SimpleNamespace(whole=""))
    monkeypatch.setattr(apart, "why_whole", lambda _: "")


def ask(payload: Any, model: Any = NEMOTRON_H, **more: Any) -> Any:
    fields = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}, **more}
    request: Any = GenerateReqInput(kv_hints=hints(payload), **fields)
    assert asyncio.run(spans.ask_spans(manager(model), request))
    return request


def test_what_stands_between_spans_is_a_segment_too() -> None:
    ids = tuple(IDS)
    parts = [(0, 2), (2, 20), (20, 21), (21, 50)]
    for model, places in ((LLAMA, [0, 2, 20, 21]), (NEMOTRON_H, [0, 0, 0, 0])):
        found = spans.prompt_of_spans(ids, [(2, 20), (21, 50)], model)
        segments = tuple(
            Segment(ids[start:end], place)
            for (start, end), place in zip(parts, places, strict=True)
        )
        assert found == ModularPrompt(segments, ids[50:], 50)
        assert found.ids == IDS


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ({"model_type": "nemotron_h"}, False),
        ({"model_type": "kimi_linear"}, False),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "nope"}, False),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "rope"}, True),
        ({"model_type": "qwen3_next"}, True),
        ({"model_type": "falcon_h1"}, True),
        ({"model_type": "llama"}, True),
    ],
)
def test_models_whose_attention_has_positions(model: dict[str, str], *, places: bool) -> None:
    assert spans.has_positions(SimpleNamespace(**model)) is places


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (said(), "segments of hybrid.segments is []"),
        ({}, "segments of hybrid.segments is None"),
        ({"segments": "ab"}, "segments of hybrid.segments is 'ab'"),
        (
            {"segments": [[0, 20]]},
            "segments[0] of hybrid.segments is [0, 20]; it must be an object",
        ),
        ({"segments": [{"start": 0}]}, "it must be an object with start and end"),
        ({"segments": [{"start": 0, "end": 20, "at": 3}]}, "it must be an object with start"),
        (said((0, 20), position=5), "has the field 'position'"),
        (said((0, 20), extra_key="b"), "has the field 'extra_key'"),
        (said((0, 15)), "segments[0] of hybrid.segments is from 0 to 15; in a prompt of 60 tokens"),
        (said((-1, 20)), "is from -1 to 20"),
        (said((0, 60)), "ends before the last token, at 59 or before"),
        (said((0, 2**63)), "is from 0 to 9223372036854775808"),
        (said((0, 10**4_208)), "is from 0 to a number of 13,979 bits"),
        (said((20, 0)), "is from 20 to 0"),
        (said((False, 20)), "is from False to 20"),
        (said((0, 20.0)), "is from 0 to 20.0"),
        (said(("0", 20)), "is from '0' to 20"),
        (said((0, 20), (19, 40)), "segments[1] of hybrid.segments is from 19 to 40"),
        (said((20, 40), (0, 20)), "it begins at 40 or behind that"),
        ({"segments": [{"start": 0, "end": 16}] * (MOST_POSITIONS + 1)}, "must be a list of 1 to"),
    ],
)
def test_what_a_client_may_not_say_is_named(payload: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        ask(payload)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"pml": "<prompt schema='s'/>"}, "hybrid.segments and pml"),
        ({"session_params": {"id": "s"}}, "hybrid.segments and session_params"),
        ({"input_ids": None, "input_embeds": [[0.5]]}, "hybrid.segments and input_embeds"),
        ({"image_data": ["a"]}, "is for prompts of text alone"),
        ({"extra_key": ["a"]}, "extra_key is a list"),
        ({"extra_key": "modular/0/-"}, "names that begin with modular/"),
        ({"extra_key": "module/0/+victim"}, "names that begin with modular/, module/"),
        ({"input_ids": [IDS, IDS]}, "is for a request of one prompt"),
        ({"sampling_params": [{"max_new_tokens": 9}]}, "sampling_params is a list"),
        ({"sampling_params": {"max_new_tokens": 999}}, "end at position 1,058"),
    ],
)
def test_requests_that_cannot_have_spans(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        pml = more.pop("pml", None)
        fields = {"input_ids": IDS, **more}
        request: Any = GenerateReqInput(kv_hints=hints(said((0, 20))), **fields)
        request.pml = pml
        asyncio.run(spans.ask_spans(manager(), request))
    assert sentence in str(error.value)


@pytest.mark.parametrize("wrong", ["9", [9], {}, None])
def test_an_answer_of_no_known_length_is_looked_at_by_the_checks_of_all(wrong: Any) -> None:
    assert ask(said((0, 20)), sampling_params={"max_new_tokens": wrong}).input_ids == IDS


def test_the_server_says_where_segments_are_stored() -> None:
    """Only tokens, spans and keys come from the client; equal segments have the same names."""
    request = ask(said((0, 20), (20, 40)), extra_key="a", cache_salt="s")
    places = ((0, 20), (0, 20))
    assert server_part(request).imported == Imported(places, 40, "a")
    prompt = spans.prompt_of_spans(IDS, [(0, 20), (20, 40)], NEMOTRON_H)
    assert request.extra_key == composed_key("a", prompt.digest)
    assert (request.cache_salt, request.input_ids, request.kv_hints) == ("s", IDS, None)
    other = ask(said((0, 20), (20, 40)), LLAMA, extra_key="a")
    assert server_part(other).imported == Imported(((0, 20), (20, 20)), 40, "a")
    assert other.extra_key != request.extra_key


def test_a_text_is_tokenized_before_its_spans_are_read() -> None:
    request = ask(said((0, 20)), input_ids=None, text="x" * 30)
    assert request.input_ids == IDS[:30] and request.text is None
    with pytest.raises(ValueError, match="in a prompt of 20 tokens"):
        ask(said((0, 20)), input_ids=None, text="x" * 20)


def test_where_nothing_is_composed_the_prompt_is_exact_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apart, "why_whole", lambda _: "Not here.")
    request = ask(said((0, 20)), extra_key="a")
    assert request.extra_key == "a" and server_part(request).imported is None
    told = request.expanded.on_answer({"hybrid_cache": {}, "finish_reason": {}})
    assert told == {"mode": "modular", "exact": True, "warnings": ["Not here."]}


def test_missing_segments_are_computed_for_the_same_tenant_and_adapter() -> None:
    sent: list[Any] = []

    async def compute(request: Any, http: Any) -> Any:
        sent.append(request)
        yield {}

    async def answered() -> None:
        serving = manager(LLAMA)
        serving.generate_request = compute
        fields = {"extra_key": "a", "cache_salt": "s", "lora_path": "adapter"}
        request: Any = GenerateReqInput(
            input_ids=IDS, kv_hints=hints(said((0, 20), (20, 40))), sampling_params={}, **fields
        )
        await spans.ask_spans(serving, request)
        told = {"composed_tokens": 0, "missing_segments": [1]}
        request.expanded.on_answer({"hybrid_cache": told, "finish_reason": None})
        assert not apart._computing
        request.expanded.on_answer({"hybrid_cache": told, "finish_reason": {}})
        again: Any = GenerateReqInput(
            input_ids=IDS, kv_hints=hints(said((0, 20), (20, 40))), sampling_params={}, **fields
        )
        await spans.ask_spans(serving, again)
        again.expanded.on_answer({"hybrid_cache": told, "finish_reason": {}})  # it is under way
        await asyncio.gather(*apart._computing)
        for _ in range(3):  # samples of the same prompt
            request.expanded.on_answer({"hybrid_cache": told, "finish_reason": {}})
        await asyncio.gather(*apart._computing)
        assert not apart._under_way

    asyncio.run(answered())
    (one,) = sent
    assert one.input_ids == IDS[20:40] and one.sampling_params["max_new_tokens"] == 0
    assert (one.extra_key, one.cache_salt, one.lora_path) == (segment_key("a", 20), "s", "adapter")
    assert server_part(one).imported == Imported((), 20, "a")


def test_a_request_without_the_action_stays_as_it_is() -> None:
    request: Any = GenerateReqInput(text="a")
    assert not asyncio.run(spans.ask_spans(manager(), request))
    assert not hasattr(request, "expanded") and "server_part" not in request.__dict__
