"""The tokenizer keeps any text, reads well and knows its role tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from sglang_hybrid.extensions.cpu.models.tokenizer import (
    CHAT_TEMPLATE,
    EOS,
    FIRST_BYTE_ID,
    FIRST_TEXT_ID,
    PAD,
    SPECIAL_TOKENS,
    TOOL_CALL_PARSER,
    VISION_IDS,
    VOCAB_SIZE,
    build_tokenizer,
)

SENTENCE = (
    "When a request arrives, the server looks for the longest prefix that it has seen before, "
    "and only the rest of the prompt has to be computed again."
)

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "warm": {"type": "boolean"},
                "more": {"type": "object"},
            },
        },
    },
}
ARGUMENTS = [
    {"city": 'Pa "ris"\n&amp; </b> é \\', "days": 3, "warm": True, "more": {"a": [1, None, "x"]}},
    {"city": "Rome"},
    {},
]


def calling(*arguments: dict[str, Any], content: Any = "") -> dict[str, Any]:
    """A message of the assistant that calls `TOOL` once with each of these arguments."""
    functions = [{"name": "weather", "arguments": each} for each in arguments]
    calls = [{"id": "1", "type": "function", "function": each} for each in functions]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


SEES = "qwen3.5-vl"
"""Its tokenizer has tokens for images, and transformers splits texts for it as Qwen does."""
ALIKE = [name for name in ARCHITECTURES if name not in (SEES, "qwen4-exp")]  # its class, too
OF_SGLANG = "jet-nemotron"
"""transformers has no class for its config and refuses the types of its layers; SGLang has one."""
IN_EVERY_RUN = ("nemotron-h", "transformer")
"""All others have the same tokenizer, which a test says."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in ALIKE
        if name != OF_SGLANG
    ],
)
def loaded(request: pytest.FixtureRequest, model_dirs: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(model_dirs[request.param])


def test_the_vocabulary_is_full_and_starts_with_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.id_to_token(index) for index in range(FIRST_BYTE_ID)] == list(SPECIAL_TOKENS)


def test_all_architectures_have_the_same_tokenizer(model_dirs: dict[str, Path]) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(model_dirs[name] / file).read_bytes() for name in ALIKE}) == 1


def test_a_model_that_sees_has_tokens_for_images(model_dirs: dict[str, Path]) -> None:
    loaded: Any = AutoTokenizer.from_pretrained(model_dirs[SEES])
    assert len(loaded) == VOCAB_SIZE
    parts = [{"type": "image"}, {"type": "text", "text": SENTENCE}, {"type": "video"}]
    chat = [{"role": "user", "content": parts}]
    text = loaded.apply_chat_template(chat, tokenize=False)
    start, end = "<|vision_start|>", "<|vision_end|>"
    seen = f"{start}<|image_pad|>{end}{SENTENCE}{start}<|video_pad|>{end}"
    assert text == f"<|im_start|>user\n{seen}<|im_end|>\n"
    ids = loaded.encode(text)
    assert [token for token in ids if token in VISION_IDS.values()] == [
        VISION_IDS[name]
        for name in ("vision_start", "image", "vision_end", "vision_start", "video", "vision_end")
    ]
    assert loaded.decode(ids) == text


def test_two_builds_are_the_same(tokenizer: Tokenizer) -> None:
    assert build_tokenizer().to_str() == tokenizer.to_str()


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_id_but_the_bytes_decodes_to_valid_text(tokenizer: Tokenizer) -> None:
    texts = tokenizer.decode_batch([[index] for index in range(FIRST_TEXT_ID, VOCAB_SIZE)])
    assert all(text and "\N{REPLACEMENT CHARACTER}" not in text for text in texts)
    assert len(set(texts)) == len(texts)


def test_english_takes_about_one_token_a_word(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(SENTENCE).ids) <= 1.5 * len(SENTENCE.split())


def test_transformers_loads_the_same_tokenizer(loaded: Any, tokenizer: Tokenizer) -> None:
    text = f"{SENTENCE}\n\n  x = {{'naïve': 1987}}  # 日本語 🙂\n"
    assert loaded.encode(text) == tokenizer.encode(text).ids
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token, loaded.eos_token) == (PAD, EOS)


def test_the_chat_template_marks_every_turn(loaded: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    start, end = (SPECIAL_TOKENS.index(token) for token in ("<|im_start|>", "<|im_end|>"))
    ids = loaded.encode(text)
    assert (ids.count(start), ids.count(end)) == (3, 2)


def test_the_chat_template_extends_a_conversation(loaded: Any) -> None:
    """The next turn's prompt starts with this turn's prompt and answer: prefixes are reusable."""
    turns = [{"role": "user", "content": "Hi"}]
    prompt = loaded.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turns += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]
    longer = loaded.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert longer.startswith(prompt + "Hello<|im_end|>\n")


def test_the_chat_template_shows_tools_calls_and_results(loaded: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        calling({"city": "Rome", "more": {"a": [1]}}, {"days": 2}, content="Look."),
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    text = loaded.apply_chat_template(messages, [TOOL], tokenize=False, add_generation_prompt=True)
    tools, _, chat = text.partition("</tools><|im_end|>\n")
    assert tools.startswith("<|im_start|>system\nTo call a function, write\n<tool_call>name\n")
    assert tools.endswith(f"<tools>\n{json.dumps(TOOL['function'])}\n")
    assert chat == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>assistant\nLook.\n"
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        '<arg_key>more</arg_key>\n<arg_value>{"a": [1]}</arg_value>\n</tool_call>\n'
        "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
        "<|im_end|>\n<|im_start|>tool\nwarm<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("content", ["", None, "Look.", [{"type": "text", "text": "Look."}]])
def test_sglang_reads_the_calls_that_the_chat_template_writes(loaded: Any, content: Any) -> None:
    text = loaded.apply_chat_template([calling(*ARGUMENTS, content=content)], tokenize=False)
    answer = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    tools = [Tool.model_validate(TOOL)]
    said, calls = FunctionCallParser(tools, TOOL_CALL_PARSER).parse_non_stream(answer)
    assert said.strip() == ("Look." if content else "")
    assert [(call.name, json.loads(call.parameters)) for call in calls] == [
        ("weather", arguments) for arguments in ARGUMENTS
    ]
    streamed = FunctionCallParser(tools, TOOL_CALL_PARSER)
    written = [""] * len(ARGUMENTS)
    for index in loaded.encode(answer):
        for call in streamed.parse_stream_chunk(loaded.decode([index]))[1]:
            written[call.tool_index] += call.parameters
    assert [json.loads(each) for each in written] == ARGUMENTS


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text())))
@settings(max_examples=100, deadline=None)
def test_a_chat_without_tools_is_only_its_turns(chat: list[tuple[str, str]]) -> None:
    """Benchmarks were run on these prompts."""
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        CHAT_TEMPLATE
    )
    messages = [{"role": role, "content": text} for role, text in chat]
    assert template.render(messages=messages) == "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in chat
    )
