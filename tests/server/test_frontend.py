"""Programs of SGLang's frontend language whose prompts begin with modules of a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import sglang as sgl

from sglang_hybrid.prompts import frontend as prompts
from tests.server.client import flush


@prompts.schema(role="system")
def archive(add: Callable[[str], None], brief: bool) -> None:
    add("You keep an archive of many rooms, and each room has a keeper of its own. ")
    if brief:
        add("Answer in one sentence, and name the keeper of each room that you speak of.")


@sgl.function
def ask(s, question):  # type: ignore[no-untyped-def]
    prompts.use(s, archive(brief=True))
    s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=4))


@sgl.function
def compare(s, question):  # type: ignore[no-untyped-def]
    prompts.use(s, archive(brief=True))
    s += sgl.user(question)
    branches = s.fork(2)
    for branch, word in zip(branches, ("First, ", "Second, "), strict=True):
        branch += sgl.assistant(word + sgl.gen("answer", max_tokens=4))
    s["answers"] = [branch.get_meta_info("answer") for branch in branches]


@sgl.function
def choose(s, question):  # type: ignore[no-untyped-def]
    prompts.use(s, archive(brief=True))
    s += sgl.user(question) + sgl.assistant(sgl.select("choice", ["a keeper", "a lantern"]))


@sgl.function
def too_late(s):  # type: ignore[no-untyped-def]
    s += "text"
    prompts.use(s, archive(brief=True))


@sgl.function
def twice(s):  # type: ignore[no-untyped-def]
    prompts.use(s, archive(brief=True))
    prompts.use(s, archive(brief=True))


@pytest.fixture
def backend(url: str) -> Iterator[sgl.RuntimeEndpoint]:
    found = sgl.RuntimeEndpoint(url, chat_template_name="chatml")
    assert prompts.register(archive, found)["name"] == "archive"
    yield found
    requests.delete(f"{url}/v1/prompt_schemas/archive", timeout=60).raise_for_status()


def test_a_program_hits_at_the_end_of_its_modules(backend: Any, url: str) -> None:
    first = ask.run(question="Who?", backend=backend, temperature=0)
    (end,) = first.get_meta_info("answer")["prompt"]["declared"][-1:]
    second = ask.run(question="When, and why?", backend=backend, temperature=0)
    assert second.get_meta_info("answer")["cached_tokens"] == end > 20
    assert second.text().startswith("<|im_start|>user\nWhen, and why?")
    flush(url)
    pml = archive(brief=True).pml()
    text = second.text().partition("<|im_start|>assistant\n")
    sampling = {"max_new_tokens": 4, "temperature": 0}
    body = {"pml": pml, "text": text[0] + text[1], "sampling_params": sampling}
    cold = requests.post(url + "/generate", json=body, timeout=60).json()
    assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["text"] == second["answer"]


def test_a_stream_and_forks_begin_with_them_too(backend: Any) -> None:
    stream = ask.run(question="Who?", backend=backend, temperature=0, stream=True)
    "".join(stream.text_iter())
    assert stream.get_meta_info("answer")["prompt"]["schema"] == "archive"
    answers = compare.run(question="Who counts?", backend=backend, temperature=0)["answers"]
    assert [answer["prompt"]["schema"] for answer in answers] == ["archive", "archive"]
    assert all(answer["cached_tokens"] > 20 for answer in answers)


def test_a_choice_is_made_behind_them(backend: Any) -> None:
    state = choose.run(question="Who?", backend=backend)
    assert state["choice"] in ("a keeper", "a lantern")


@pytest.mark.parametrize(
    ("program", "sentence"), [(too_late, "use() comes first"), (twice, "uses a schema already")]
)
def test_a_prompt_begins_with_one_schema(backend: Any, program: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        program.run(backend=backend)
    assert sentence in str(error.value)


def test_another_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"schemas want an sgl\.RuntimeEndpoint"):
        prompts.register(archive, object())
