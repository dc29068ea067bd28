"""`prompt_schema` in a chat: which tokens the chat has, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.chats.fields import PromptSchema
from sglang_hybrid.chats.rendering import encode_chat, render_chat
from sglang_hybrid.extensions.guard import texts
from sglang_hybrid.extensions.schemas.declared.registry import Registry
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer
from sglang_hybrid.extensions.schemas.endpoints import chat as chat_completions
from sglang_hybrid.extensions.schemas.endpoints.chat import Beginning, with_schemas
from tests.extensions.schemas import schemas

Chat = Callable[..., Any]
QUESTION = {"role": "user", "content": "Who?"}
GAME = "<unit.py/><map.py/>"


@pytest.fixture
def registry(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry(PromptTokenizer(tokenizer))
    for text in schemas.all_schemas().values():
        found.register(None, text)
    found.register(None, '<schema name="plain">text <module name="a">more</module></schema>')
    found.register(("a", None), '<schema name="theirs"><system>text</system></schema>')
    monkeypatch.setattr(chat_completions, "registry_of", lambda manager: found)
    return found


def encode(tokenizer: Any, text: str, kwargs: Any) -> list[int]:
    return list(tokenizer(text, **kwargs)["input_ids"])


@pytest.fixture
def chat(registry: Registry, tokenizer: PreTrainedTokenizerFast) -> Chat:
    """SGLang's method in short: a chat is rendered, then encoded."""

    def process(serving: Any, request: Any) -> Any:
        messages = [
            each if isinstance(each, dict) else {"role": each.role, "content": each.content}
            for each in request.messages
        ]
        text = request.before + tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return SimpleNamespace(prompt_ids=encode_chat(encode, tokenizer, text, {}))

    def processed(schema: Any, *messages: Any, before: str = "", **fields: Any) -> Any:
        request = SimpleNamespace(
            prompt_schema=PromptSchema(**schema) if isinstance(schema, dict) else schema,
            messages=list(messages) or [QUESTION],
            before=before,
            **{"extra_key": None, "cache_salt": None, "input_ids": None, **fields},
        )
        return with_schemas(process)(SimpleNamespace(tokenizer_manager=None), request)

    return processed


def pml(imports: str, name: str = "code-generation-game") -> str:
    return f'<prompt schema="{name}">{imports}</prompt>'


def test_modules_are_the_tokens_that_generate_has(chat: Chat, registry: Registry) -> None:
    found = chat(pml(GAME))
    beginning: Beginning = found.beginning
    markup = f'<prompt schema="code-generation-game">{GAME}<user>Who?</user></prompt>'
    generated = registry.expand(None, markup).tokenized
    assert [end.position for end in beginning.tokenized.ends] == [
        end.position for end in generated.ends
    ]
    assert found.prompt_ids == beginning.tokenized.ids
    assert found.prompt_ids[: beginning.start] == generated.ids[: beginning.start]
    assert found.prompt_ids == generated.ids


def test_a_chat_that_cannot_fit_is_not_tokenized(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_rendered(text: str) -> None:
        if len(text) > 100_000:
            raise ValueError("the text cannot fit")

    monkeypatch.setattr(texts, "check_rendered", check_rendered)
    assert chat(pml(GAME)).prompt_ids
    with pytest.raises(ValueError, match="the text cannot fit"):
        chat(pml(GAME), {"role": "user", "content": "a" * 100_000})


def test_an_object_says_the_same_as_markup(chat: Chat) -> None:
    plan = {
        "name": "travel-plan",
        "parameters": {"duration": "3 days"},
        "imports": [{"name": "overseas", "imports": ["forum"]}],
    }
    travel = {"name": "travel", "imports": [plan]}
    markup = '<travel-plan duration="3 days"><overseas><forum/></overseas></travel-plan>'
    assert chat(travel).prompt_ids == chat(pml(markup, "travel")).prompt_ids


def test_the_text_is_that_of_the_whole_chat(chat: Chat, tokenizer: PreTrainedTokenizerFast) -> None:
    answer = {"role": "assistant", "content": "The keeper."}
    found = chat(pml("<unit.py/>"), QUESTION, answer, {"role": "user", "content": "When?"})
    text = tokenizer.decode(found.prompt_ids)
    assert text.count("<|im_start|>") == 6
    assert text.endswith("<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n")
    assert "\ue000" not in text


def test_what_the_template_writes_besides_is_kept(chat: Chat, registry: Registry) -> None:
    """Tools before the system prompt, say: such a chat is no plain conversation."""
    apart = {"name": "code-generation-game", "imports": ["unit.py"], "mode": "modular"}
    assert chat(apart).beginning.plain
    found = chat(apart, before="<|im_start|>tools\nread, write<|im_end|>\n")
    assert registry.tokenizer._tokenizer.decode(found.prompt_ids).startswith("<|im_start|>tools\n")
    assert not found.beginning.plain


def test_without_imports_the_chat_is_the_templates(
    chat: Chat, registry: Registry, tokenizer: PreTrainedTokenizerFast
) -> None:
    registry.register(
        None, '<schema name="none"><system><module name="a">x</module></system></schema>'
    )
    text = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    assert chat({"name": "none"}).prompt_ids == encode(tokenizer, text, {})


def test_marks_are_looked_for_behind_the_schema(chat: Chat) -> None:
    found = render_chat(lambda: chat(pml(GAME)))
    assert found is not None
    assert found.text == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert found.encode_kwargs == {"add_special_tokens": False}


@pytest.mark.parametrize(
    ("schema", "fields", "sentence"),
    [
        (pml("", "none"), {}, "there is no schema 'none'"),
        ("<prompt", {}, "line 1, column "),
        (pml("<map.py/><map.py/>"), {}, "'map.py' is imported twice"),
        ({"name": "travel", "imports": ["overseas"]}, {}, "has no module 'overseas' here"),
        ({"name": "travel", "imports": ["travel-plan"]}, {}, "'duration' of module 'travel-plan'"),
        (pml("<a/>", "plain"), {}, "schema 'plain' has text outside of messages"),
        (pml("", "theirs"), {}, "there is no schema 'theirs'"),
        (pml(""), {"extra_key": ["a", "b"]}, "extra_key is a list"),
        (pml(""), {"input_ids": [1]}, "the request has prompt_schema and input_ids"),
    ],
)
def test_what_cannot_begin_a_chat_is_named(
    chat: Chat, schema: Any, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as error:
        chat(schema, **fields)
    assert sentence in str(error.value)


def test_a_chat_that_no_template_writes_is_refused(registry: Registry) -> None:
    request = SimpleNamespace(
        prompt_schema=pml(GAME), messages=[], extra_key=None, cache_salt=None, input_ids=None
    )
    written = with_schemas(lambda serving, request: SimpleNamespace(prompt_ids=[1]))
    with pytest.raises(ValueError, match="for chats that a Jinja template writes"):
        written(SimpleNamespace(tokenizer_manager=None), request)


def test_each_message_stands_once_and_in_order(
    chat: Chat, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda messages, **kwargs: 2 * write(messages, **kwargs)
    )
    with pytest.raises(ValueError, match="does not write each message once"):
        chat(pml(GAME))
