"""Modules computed apart and put together, on a server: the model under the modules' mask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_hybrid.extensions.schemas.declared.modular import Layout, ModularPrompt, modular
from sglang_hybrid.extensions.schemas.declared.resolve import read_prompt, resolve
from sglang_hybrid.extensions.schemas.declared.schema import read_schema
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer
from sglang_hybrid.extensions.schemas.endpoints.spans import has_positions, prompt_of_spans
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import TOLERANCE, flush, logprobs

pytestmark = pytest.mark.slow

SCHEMA = """<schema name="game"><system>You write Python.</system><user>
<module name="unit">class Unit: one of many units of the game, with a name and place. </module>
<union><module name="map">class Map: the land where the units live. </module>
<module name="sea">class Sea: waters, deep and wide, with
<parameter name="count" length="6"/> ships. </module></union>
<module name="player">class Player: who moves the units over the land and wins or loses. </module>
</user></schema>"""


@pytest.fixture(scope="module")
def model(model_directory: Callable[[str], Path]) -> Path:
    return model_directory("transformer")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    flags = ["--model-path", str(model), "--radix-cache-backend", "hybrid"]
    with ServerProcess([*flags, "--enable-cache-report"]) as running:
        answer = requests.post(running.url + "/v1/prompt_schemas", json={"pml": SCHEMA}, timeout=60)
        answer.raise_for_status()
        yield running.url


@pytest.fixture(autouse=True)
def _empty(url: str) -> None:
    """No segments; those that a test before this one asked for may still be computed."""
    flush(url)


def pml(imports: str, question: str = "What is a unit?", mode: str = "modular") -> str:
    return f'<prompt schema="game" mode="{mode}">{imports}<user>{question}</user></prompt>'


def send(url: str, prompt: str | None, **more: Any) -> dict[str, Any]:
    body = {
        "pml": prompt,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0},
        "return_logprob": True,
        **more,
    }
    answer = requests.post(url + "/generate", json=body, timeout=120)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def prepare(url: str) -> dict[str, int]:
    answer = requests.post(
        url + "/v1/prompt_schemas/game/prewarm", json={"mode": "modular"}, timeout=120
    )
    answer.raise_for_status()
    found: dict[str, int] = answer.json()
    return found


def composed(answer: dict[str, Any]) -> int:
    tokens: int = answer["meta_info"]["hybrid_cache"]["composed_tokens"]
    return tokens


def composed_in_the_end(url: str, prompt: str | None, **more: Any) -> dict[str, Any]:
    """An answer whose prompt was put together; the first ones may find segments missing."""
    for _ in range(100):
        answer = send(url, prompt, **more)
        if composed(answer):
            return answer
        time.sleep(0.1)
    raise AssertionError("the segments are never there")


def expanded(model: Path, prompt: str) -> ModularPrompt:
    """The segments and the new tokens of a prompt, by the model's tokenizer."""
    tokenizer = PromptTokenizer(AutoTokenizer.from_pretrained(model))
    schema = read_schema(SCHEMA)
    return modular(Layout(schema, tokenizer), resolve(schema, read_prompt(prompt)))


def masked_logprobs(model: Path, prompt: ModularPrompt, output: list[int]) -> list[float]:
    """Log probabilities of the output, if each segment's tokens attend to its own tokens only."""
    ids = [*prompt.ids, *output]
    positions = [one.start + at for one in prompt.segments for at in range(len(one.ids))]
    taken = len(positions)
    positions += range(prompt.position, prompt.position + len(ids) - taken)
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    at = 0
    for one in prompt.segments:
        allowed[at : at + len(one.ids), :at] = False
        at += len(one.ids)
    mask = torch.zeros(len(ids), len(ids)).masked_fill(~allowed, torch.finfo(torch.float32).min)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(
            input_ids=torch.tensor([ids]),
            attention_mask=mask[None, None],
            position_ids=torch.tensor([positions]),
        ).logits[0]
    of = logits.log_softmax(-1)[len(prompt.ids) - 1 : -1]
    assert of.argmax(-1).tolist() == output
    return [float(row[token]) for row, token in zip(of, output, strict=True)]


@pytest.mark.parametrize("imports", ["<unit/><map/>", '<sea count="three"/><player/>', "<player/>"])
def test_it_is_the_model_under_the_modules_mask(url: str, model: Path, imports: str) -> None:
    follows_the_mask(url, model, imports, masked_logprobs)


Reference = Callable[[Path, ModularPrompt, list[int]], list[float]]
"""Log probabilities of an output [n] behind a prompt whose modules were read alone."""


def follows_the_mask(url: str, model: Path, imports: str, reference: Reference) -> None:
    """A prompt is put together of these modules, and the answer is that of the reference."""
    prompt = pml(imports)
    answer = composed_in_the_end(url, prompt)
    assert answer["meta_info"]["prompt"]["exact"] is False
    expected = expanded(model, prompt)
    assert composed(answer) == len(expected.ids) - len(expected.new)
    assert answer["meta_info"]["cached_tokens"] >= composed(answer)
    wanted = reference(model, expected, answer["output_ids"])
    assert logprobs(answer) == pytest.approx(wanted, abs=TOLERANCE)


def test_a_selection_that_nobody_sent_before_is_put_together(url: str) -> None:
    selections_are_put_together(url)


def selections_are_put_together(url: str) -> None:
    """Send selections of modules that were computed for other prompts, and see them composed."""
    prepared = prepare(url)
    assert prepared["segments"] == 4 and prepared["tokens"] > 40  # no sea: it holds a value
    send(url, pml("<unit/><map/>"))  # what the chat template writes is computed now
    assert composed_in_the_end(url, pml("<map/><player/>"))
    assert composed(send(url, pml("<unit/><player/>"))) > 30


def test_where_segments_are_missing_the_prompt_is_computed_as_a_whole(url: str) -> None:
    exact = send(url, pml("<unit/><map/>", mode="exact"))
    first = send(url, pml("<unit/><map/>"))
    assert composed(first) == 0 and first["meta_info"]["cached_tokens"] == 0
    assert first["meta_info"]["prompt"]["exact"] is True
    assert logprobs(first) == pytest.approx(logprobs(exact), abs=TOLERANCE)


def test_exact_prompts_and_those_put_together_never_meet(url: str) -> None:
    cold = send(url, pml("<unit/><map/>", mode="exact"))
    apart = composed_in_the_end(url, pml("<unit/><map/>"))
    assert logprobs(apart) != pytest.approx(logprobs(cold), abs=TOLERANCE)
    again = send(url, pml("<unit/><map/>", mode="exact"))
    assert again["meta_info"]["cached_tokens"] > 0
    assert logprobs(again) == pytest.approx(logprobs(cold), abs=TOLERANCE)


def test_a_tenant_has_segments_of_its_own(url: str) -> None:
    schema: dict[str, Any] = {"pml": SCHEMA, "cache_salt": "b"}
    requests.post(url + "/v1/prompt_schemas", json=schema, timeout=60).raise_for_status()
    composed_in_the_end(url, pml("<unit/><map/>"))
    assert composed(send(url, pml("<unit/><map/>"), cache_salt="b")) == 0


UNIT, LAND = (
    "class Unit: one of many units of the game, with a name, a place, and a speed. ",
    "class Map: the land where the units live, with hills, rivers, and three towns. ",
)


def spans(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    """The `kv_hints` that name these spans of a prompt."""
    action = {
        "action_id": "spans",
        "action_type": "hybrid.segments",
        "action_version": "1",
        "payload": {"segments": [{"start": start, "end": end} for start, end in pairs]},
    }
    return {"protocol_version": "1", "message_id": "m", "actions": [action]}


def test_spans_of_a_prompt_are_put_together(url: str, model: Path) -> None:
    spans_are_put_together(url, model, masked_logprobs)


def spans_are_put_together(url: str, model: Path, reference: Reference) -> None:
    """Spans that a client names, with tokens in front of them and between them, in two orders; an
    exact prompt of the same tokens, another tenant's, and what is refused."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = SimpleNamespace(**json.loads((model / "config.json").read_text()))
    head, unit, land, gap, new = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("You write Python.", UNIT, LAND, "Also: ", "What is a unit?")
    )
    cold = send(url, None, input_ids=[*head, *unit, *gap, *land, *new])
    for first, second in ((unit, land), (land, unit)):
        ids = [*head, *first, *gap, *second, *new]
        start = len(head) + len(first) + len(gap)
        named = [(len(head), len(head) + len(first)), (start, start + len(second))]
        asked = {"input_ids": ids, "kv_hints": spans(*named)}
        told = send(url, None, **asked)["meta_info"]["hybrid_cache"]
        anywhere = first is land and not has_positions(config)
        assert bool(told["composed_tokens"]) is anywhere
        answer = composed_in_the_end(url, None, **asked)
        assert composed(answer) == named[-1][1]
        assert answer["meta_info"]["prompt"] == {"mode": "modular", "exact": False, "warnings": []}
        prompt = prompt_of_spans(ids, named, config)
        wanted = reference(model, prompt, answer["output_ids"])
        assert logprobs(answer) == pytest.approx(wanted, abs=TOLERANCE)
        another = "a" if first is unit else "b"
        assert composed(send(url, None, **asked, extra_key=another)) == 0
    again = send(url, None, input_ids=[*head, *unit, *gap, *land, *new])
    assert logprobs(again) == pytest.approx(logprobs(cold), abs=TOLERANCE)
    for payload in ({"segments": [], "position": 9}, {"segments": [[0, 20]]}, {"position": 2**63}):
        wrong = spans()
        wrong["actions"][0]["payload"] = payload
        for body in ({"input_ids": ids}, {"pml": pml("<unit/>", mode="exact")}):
            refused = requests.post(url + "/generate", json={**body, "kv_hints": wrong}, timeout=60)
            assert refused.status_code == 400, refused.text


def test_several_samples_of_one_prompt_are_put_together(url: str) -> None:
    composed_in_the_end(url, pml("<unit/><map/>"))
    sampling = {"max_new_tokens": 4, "n": 2}
    body = {"pml": pml("<unit/><map/>"), "sampling_params": sampling}
    answer = requests.post(url + "/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert [each["meta_info"]["prompt"]["exact"] for each in answer.json()] == [False, False]


def test_a_chat_begins_with_modules_that_were_computed_apart(url: str) -> None:
    """The chat's answer is that of /generate."""
    generated = composed_in_the_end(url, pml("<unit/><map/>"))
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "What is a unit?"}],
        "prompt_schema": {"name": "game", "imports": ["unit", "map"], "mode": "modular"},
        "max_tokens": 6,
        "temperature": 0,
        "return_meta_info": True,
    }

    def chat(**more: Any) -> Any:
        answer = requests.post(url + "/v1/chat/completions", json={**body, **more}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    found = chat()
    assert found["sglext"]["prompt"]["exact"] is False
    (choice,) = found["choices"]
    assert composed(choice) == composed(generated)
    assert choice["message"]["content"] == generated["text"]


def test_places_beyond_the_models_context_are_refused(url: str) -> None:
    body: dict[str, Any] = {"pml": pml("<unit/>"), "sampling_params": {"max_new_tokens": 10**6}}
    answer = requests.post(url + "/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "end at position" in answer.json()["error"]["message"]
