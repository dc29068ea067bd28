"""Messages begin where the template opens them: prompts cut at the starts that are found."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries, learn_message_boundaries
from sglang_hybrid.extensions.cpu.models.tokenizer import CHAT_TEMPLATE, write_tokenizer
from tests.checkpoints.chat_templates import (
    ALWAYS_PROMPTED,
    CHATML,
    FALCON_H1,
    GEMMA,
    GEMMA_MARKS,
    GRANITE,
    GRANITE_MARKS,
    JAMBA,
    JAMBA_MARKS,
    LLAMA_2,
    LLAMA_3,
    LLAMA_MARKS,
    MISTRAL,
    MISTRAL_MARKS,
    NEMOTRON_3,
    NEMOTRON_H,
    NEMOTRON_MARKS,
    PARTS_ONLY,
    PHI,
    PHI_MARKS,
    QWEN_3,
    QWEN_3_5,
    QWEN_MARKS,
    VICUNA,
    byte_level,
    with_template,
    word_pieces,
)

Message = dict[str, Any]


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def calls(*words: str) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"abcdefgh{number}",
                "type": "function",
                "function": {"name": "find", "arguments": {"q": word}},
            }
            for number, word in enumerate(words)
        ],
    }


def tool(content: str, number: int = 0) -> Message:
    return {
        "role": "tool",
        "content": content,
        "name": "find",
        "tool_call_id": f"abcdefgh{number}",
    }


@dataclass(frozen=True)
class Style:
    tokenizer: PreTrainedTokenizerFast
    roles: MessageBoundaries

    def render(self, *messages: Message, prompted: bool = True, **variables: Any) -> list[int]:
        """The ids of a prompt."""
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), return_dict=False, add_generation_prompt=prompted, **variables
        )
        return ids

    def cut(self, *messages: Message, prompted: bool = True, **variables: Any) -> list[str]:
        """The prompt's text, cut where messages start; first what comes before them all."""
        ids = self.render(*messages, prompted=prompted, **variables)
        starts = self.roles.message_starts(array("q", ids))
        return [
            self.tokenizer.decode(ids[start:end]) for start, end in pairwise([0, *starts, len(ids)])
        ]


def style(*args: Any, **kwargs: Any) -> Style:
    tokenizer = with_template(*args, **kwargs)
    return Style(tokenizer, MessageBoundaries.from_tokenizer(tokenizer))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Style:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, max_length=1024)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return Style(tokenizer, MessageBoundaries.from_tokenizer(tokenizer))


def test_our_tokenizer_opens_messages_with_the_turn_and_the_role(ours: Style) -> None:
    turn, end = "<|im_start|>", "<|im_end|>\n"
    assert ours.cut(system("Be brief."), user("Hello")) == [
        "",
        f"{turn}system\nBe brief.{end}",
        f"{turn}user\nHello{end}{turn}assistant\n",
    ]
    assert ours.cut(user("Hello"), prompted=False) == ["", f"{turn}user\nHello{end}"]
    assert ours.cut(user("a"), assistant("b"), user("\n\nc"), assistant("d"), user("e")) == [
        "",
        f"{turn}user\na{end}{turn}assistant\nb{end}",
        f"{turn}user\n\n\nc{end}{turn}assistant\nd{end}",
        f"{turn}user\ne{end}{turn}assistant\n",
    ]
    assert ours.cut(user("a"), assistant(""), tool("b"))[-1] == (
        f"{turn}tool\nb{end}{turn}assistant\n"
    )


def test_our_tools_are_a_message_and_calls_belong_to_the_assistants(ours: Style) -> None:
    function = {"type": "function", "function": {"name": "find", "parameters": {}}}
    chat = [user("a"), calls("x", "y"), tool("1"), tool("2", 1)]
    before, tools, *rest = ours.cut(*chat, tools=[function])
    assert before == "" and tools.startswith("<|im_start|>system\nTo call a function")
    call = "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    assert rest == [
        f"<|im_start|>user\na{END}"
        f"<|im_start|>assistant\n{call.format('x')}\n{call.format('y')}{END}",
        f"<|im_start|>tool\n1{END}",
        f"<|im_start|>tool\n2{END}<|im_start|>assistant\n",
    ]


def test_an_opener_is_never_longer_than_the_role(ours: Style) -> None:
    texts = {
        role: [ours.tokenizer.decode(opener) for opener in known]
        for role, known in ours.roles.openers.items()
    }
    assert texts == {
        "system": ["<|im_start|>system"],
        "user": ["<|im_start|>user"],
        "tool": ["<|im_start|>tool"],
    }


def test_role_words_in_a_text_open_nothing(ours: Style) -> None:
    text = "user\nsystem\nim_start user <|im_start user [INST] User: assistant\n\nuser"
    assert len(ours.cut(user(text))) == 2
    ids = ours.tokenizer.encode(text, add_special_tokens=False)
    assert ours.roles.message_starts(ids) == []
    assert ours.roles.message_starts([]) == []


def test_a_prompt_that_ends_inside_an_opener_does_not_count_it(ours: Style) -> None:
    turn = ours.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ours.roles.message_starts([turn]) == []
    assert ours.roles.message_starts([9, 9, turn]) == []


def test_lists_and_arrays_give_the_same(ours: Style) -> None:
    ids = ours.tokenizer.apply_chat_template([user("a"), assistant("b")] * 3, return_dict=False)
    starts = ours.roles.message_starts(ids)
    assert len(starts) == 3 and all(type(start) is int for start in starts)
    assert ours.roles.message_starts(np.array(ids, np.int32)) == starts
    assert ours.roles.message_starts(array("q", ids)) == starts


def head(role: str) -> str:
    """The header of a message of Llama 3."""
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def role(name: str) -> str:
    """The header of a message of Granite."""
    return f"<|start_of_role|>{name}<|end_of_role|>"


END = "<|im_end|>\n"
END_OF_TEXT = "<|end_of_text|>\n"
CALL = '{"name": "find", "arguments": {"q": "x"}}'
THOUGHT = "<think>\n\n</think>\n\n"
BUILDS = {"byte": (byte_level,), "word": (word_pieces,), "both": (byte_level, word_pieces)}

STYLES: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "llama 3": (LLAMA_3, LLAMA_MARKS, "<|eot_id|>", "byte"),
    "granite": (GRANITE, GRANITE_MARKS, "<|end_of_text|>", "byte"),
    "nemotron h": (NEMOTRON_H, NEMOTRON_MARKS, "<SPECIAL_12>", "byte"),
    "falcon h1": (FALCON_H1, CHATML, "<eos>", "byte"),
    "mistral": (MISTRAL, MISTRAL_MARKS, "<eos>", "both"),
    "mistral without added tokens": (MISTRAL, (), "<eos>", "word"),
    "jamba": (JAMBA, JAMBA_MARKS, "<eos>", "byte"),
    "qwen 3": (QWEN_3, QWEN_MARKS, "<|im_end|>", "both"),
    "qwen 3.5": (QWEN_3_5, QWEN_MARKS, "<|im_end|>", "both"),
    "nemotron 3": (NEMOTRON_3, QWEN_MARKS, "<|im_end|>", "both"),
    "qwen 3 with tools' marks as text": (QWEN_3, CHATML, "<eos>", "byte"),
    "llama 2": (LLAMA_2, (), "<eos>", "byte"),
    "phi": (PHI, PHI_MARKS, "<eos>", "byte"),
    "gemma": (GEMMA, GEMMA_MARKS, "<eos>", "byte"),
    "vicuna": (VICUNA, (), "<eos>", "both"),
}
"""Template, added tokens, end of text and how the rest is cut into tokens."""

TURNS = (user("a"), assistant("b"), user("c"))

PROMPTS: list[tuple[str, tuple[Message, ...], dict[str, Any], list[str]]] = [
    (
        "llama 3",
        TURNS,
        {},
        [
            "<bos>",
            ANY,
            f"{head('user')}a<|eot_id|>{head('assistant')}b<|eot_id|>",
            f"{head('user')}c<|eot_id|>{head('assistant')}",
        ],
    ),
    (
        "llama 3",
        (system("S"), user("a"), calls("x"), tool("y")),
        {"prompted": False},
        [
            "<bos>",
            ANY,
            f"{head('user')}a<|eot_id|>{head('assistant')}{CALL}<|eot_id|>",
            f'{head("ipython")}"y"<|eot_id|>',
        ],
    ),
    (
        "granite",
        (system("S"), *TURNS),
        {},
        [
            "",
            f"{role('system')}S{END_OF_TEXT}",
            f"{role('user')}a{END_OF_TEXT}{role('assistant')}b{END_OF_TEXT}",
            f"{role('user')}c{END_OF_TEXT}{role('assistant')}",
        ],
    ),
    (
        "granite",
        (user("a"), calls("x", "y"), tool("1"), tool("2")),
        {},
        [
            "",
            ANY,
            ANY,
            f"{role('tool_response')}1{END_OF_TEXT}",
            f"{role('tool_response')}2{END_OF_TEXT}{role('assistant')}",
        ],
    ),
    (
        "nemotron h",
        (system("S"), user("a"), assistant("t</think>b"), user("c")),
        {},
        [
            "",
            "<SPECIAL_10>System\nS\n",
            "<SPECIAL_11>User\na\n<SPECIAL_11>Assistant\nb\n<SPECIAL_12>\n\n",
            "<SPECIAL_11>User\nc\n<SPECIAL_11>Assistant\n<think>\n",
        ],
    ),
    (
        "nemotron h",
        (user("a"),),
        {"prompted": False},
        ["", "<SPECIAL_10>System\n\n", "<SPECIAL_11>User\na"],
    ),
    (
        "falcon h1",
        (system("S"), user("a")),
        {},
        [
            "<bos>",
            f"<|im_start|>system\nS{END}",
            f"<|im_start|>user\na{END}<|im_start|>assistant\n",
        ],
    ),
    ("mistral", (user("a"),), {}, ["<bos>", "[INST] a[/INST]"]),
    (
        "mistral",
        (system("S"), *TURNS),
        {},
        ["<bos>", "[INST] a[/INST] b<eos>", "[INST] S\n\nc[/INST]"],
    ),
    (
        "mistral",
        (user("a"), calls("x", "y"), tool("[1]"), tool("[2]", 1), assistant("b")),
        {},
        [
            ANY,
            ANY,
            '[TOOL_RESULTS] {"content": [1], "call_id": "abcdefgh0"}[/TOOL_RESULTS]',
            '[TOOL_RESULTS] {"content": [2], "call_id": "abcdefgh1"}[/TOOL_RESULTS] b<eos>',
        ],
    ),
    ("mistral without added tokens", TURNS, {}, [ANY, ANY, "[INST] c[/INST]"]),
    (
        "jamba",
        (system("S"), user("a"), calls("x"), tool("1")),
        {},
        [
            "<bos>",
            "<|bom|><|system|> S<|eom|>",
            f"<|bom|><|user|> a<|eom|><|bom|><|assistant|> {CALL}<|eom|>",
            "<|bom|><|tool|> 1<|eom|><|bom|><|assistant|>",
        ],
    ),
    (  # results of tools are messages in a user's turn
        "qwen 3",
        (system("S"), user("a"), calls("x"), tool("1")),
        {"prompted": False},
        [
            "",
            f"<|im_start|>system\nS{END}",
            f"<|im_start|>user\na{END}<|im_start|>assistant\n{THOUGHT}"
            f"<tool_call>\n{CALL}\n</tool_call>{END}",
            f"<|im_start|>user\n<tool_response>\n1\n</tool_response>{END}",
        ],
    ),
    (
        "qwen 3",
        (user("a"), calls("x", "x"), tool("1"), tool("2")),
        {},
        [
            ANY,
            ANY,
            "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n",
            f"<tool_response>\n2\n</tool_response>{END}<|im_start|>assistant\n",
        ],
    ),
    (
        "qwen 3",
        TURNS,
        {"enable_thinking": False},
        [
            "",
            f"<|im_start|>user\na{END}<|im_start|>assistant\nb{END}",
            f"<|im_start|>user\nc{END}<|im_start|>assistant\n{THOUGHT}",
        ],
    ),
    (  # beside added tokens, text alone opens nothing
        "qwen 3 with tools' marks as text",
        (user("a"), calls("x", "x"), tool("1"), tool("2")),
        {"prompted": False},
        [
            ANY,
            ANY,
            "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
            f"<tool_response>\n2\n</tool_response>{END}",
        ],
    ),
    ("llama 2", TURNS, {}, ["", "<bos>[INST] a [/INST] b <eos>", "<bos>[INST] c [/INST]"]),
    (  # an end of text in the place of the generation prompt
        "phi",
        (system("S"), *TURNS),
        {},
        [
            "",
            "<|system|>\nS<|end|>\n",
            "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n",
            "<|user|>\nc<|end|>\n<|assistant|>\n",
        ],
    ),
    (
        "gemma",
        TURNS,
        {},
        [
            "<bos>",
            "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n",
            "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n",
        ],
    ),
    ("vicuna", (system("S"), *TURNS), {}, [ANY, "USER: c ASSISTANT:"]),
]
"""Style, messages, variables of the rendering, and the pieces of the prompt; ANY: any text."""


@pytest.mark.parametrize(("name", "messages", "variables", "pieces"), PROMPTS)
def test_prompts_are_cut_where_messages_start(
    name: str, messages: tuple[Message, ...], variables: dict[str, Any], pieces: list[str]
) -> None:
    template, marks, eos, cut = STYLES[name]
    for build in BUILDS[cut]:
        assert style(template, marks, build, eos=eos).cut(*messages, **variables) == pieces


REPLIES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen 3", {}, ""),
    ("qwen 3", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ("qwen 3.5", {}, "<|im_start|>assistant\n<think>\n"),
    ("qwen 3.5", {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ("nemotron h", {}, "<SPECIAL_11>Assistant\n<think>\n"),
    ("nemotron 3", {}, "<|im_start|>assistant\n<think>\n"),
    ("nemotron 3", {"enable_thinking": False}, "<|im_start|>assistant\n<think></think>"),
    *((name, {}, "") for name in ("llama 3", "granite", "falcon h1", "mistral", "jamba")),
    *((name, {}, "") for name in ("llama 2", "phi", "gemma", "vicuna")),
]
"""Style, variables of the rendering, and what of the prompt's end history may not have."""


@pytest.mark.parametrize(("name", "variables", "end"), REPLIES)
def test_where_a_reply_begins_whose_thoughts_are_left_out_of_history(
    name: str, variables: dict[str, Any], end: str
) -> None:
    template, marks, eos, cut = STYLES[name]
    for build in BUILDS[cut]:
        it = style(template, marks, build, eos=eos)
        prompt = it.render(*TURNS, **variables)
        start = it.roles.reply_start(array("q", prompt))
        assert (it.tokenizer.decode(prompt[start:]) if start else "") == end
        if end:
            later = it.render(*TURNS, assistant("\nd"), user("e"), **variables)
            assert prompt[:start] == later[:start]
            assert prompt != later[: len(prompt)] or end.endswith("<think></think>")


def test_a_reply_that_has_begun_long_ago_does_not_begin() -> None:
    template, marks, eos, _ = STYLES["qwen 3.5"]
    it = style(template, marks, eos=eos)
    opener = list(it.roles.reply_opener)
    for behind, start in ((0, 0), (1, 5), (16, 5), (17, 0)):
        assert it.roles.reply_start([9] * 5 + opener + [9] * behind) == start
    assert it.roles.reply_start([]) == it.roles.reply_start(opener[1:]) == 0


def test_what_llama_3_says_of_the_day_is_a_message_of_the_system() -> None:
    begin, today, *_ = style(LLAMA_3, LLAMA_MARKS, eos="<|eot_id|>").cut(*TURNS)
    assert begin == "<bos>"
    assert today.startswith(head("system") + "Today Date: ")


@pytest.mark.parametrize(
    ("name", "roles"), [("nemotron h", {"system", "user"}), ("gemma", {"user"})]
)
def test_a_template_that_refuses_roles(name: str, roles: set[str]) -> None:
    template, marks, eos, _ = STYLES[name]
    assert set(style(template, marks, eos=eos).roles.openers) == roles


@pytest.mark.parametrize(
    ("name", "text"), [("llama 2", "<bos>Once upon a time"), ("vicuna", "A USER is no US ER: ")]
)
def test_a_text_opens_nothing(name: str, text: str) -> None:
    """Neither does the begin of text alone, nor words like those of a role."""
    template, marks, eos, cut = STYLES[name]
    for build in BUILDS[cut]:
        it = style(template, marks, build, eos=eos)
        ids = it.tokenizer.encode(text, add_special_tokens=False)
        assert it.roles.message_starts(ids) == []


def test_a_date_in_the_template_is_no_part_of_an_opener() -> None:
    llama = style(LLAMA_3, LLAMA_MARKS, eos="<|eot_id|>")
    tomorrow = LLAMA_3.replace("strftime_now('%d %b')", "'32 Dec'")
    assert len(llama.cut(user("a"), chat_template=tomorrow)) == 3
    granite = style(GRANITE, GRANITE_MARKS, eos="<|end_of_text|>")
    tomorrow = GRANITE.replace("strftime_now('%A')", "'Someday'")
    assert len(granite.cut(user("a"), chat_template=tomorrow)) == 3


def test_the_id_of_a_call_is_no_part_of_an_opener() -> None:
    template = MISTRAL.replace("'[TOOL_RESULTS] {", "'[TOOL_RESULTS]' ~ m.tool_call_id ~ '[INST]{")
    mistral = style(template, MISTRAL_MARKS)
    (opener,) = mistral.roles.openers["tool"]
    assert mistral.tokenizer.decode(opener) == "[TOOL_RESULTS]"


def test_a_template_that_wants_the_user_last() -> None:
    check = "{%- if messages[-1].role == 'assistant' -%}{{ raise_exception('no') }}{%- endif -%}"
    for template in (MISTRAL, LLAMA_3.replace("<|eot_id|>", "<eos>")):
        strict = style(check + template, (*MISTRAL_MARKS, *LLAMA_MARKS))
        loose = style(template, (*MISTRAL_MARKS, *LLAMA_MARKS))
        assert strict.roles.openers == loose.roles.openers


def test_a_single_token_of_text_opens_nothing() -> None:
    assert not style(VICUNA.replace("USER: ", "user")).roles


@pytest.mark.parametrize("template", [ALWAYS_PROMPTED, PARTS_ONLY])
def test_with_the_same_prompt_always_or_never(template: str) -> None:
    chatml = style(template, CHATML)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    *_, first, second = chatml.cut(*messages)
    assert first.startswith("<|im_start|>user\na")
    assert second.startswith("<|im_start|>user\nc")


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.nothing.at.all }}",
        "{% for broken",
        "always the same",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_without_roles_finds_nothing(
    template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sglang_hybrid")
    tokenizer = with_template(template)
    roles = MessageBoundaries.from_tokenizer(tokenizer)
    assert not roles
    assert roles.message_starts(tokenizer.encode("user: a")) == []
    assert len(caplog.records) == 1


def worker(tokenizer: Any, processor: Any = None) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=tokenizer, processor=processor)


def learn(tp_worker: SimpleNamespace, **flags: Any) -> MessageBoundaries:
    """The boundaries that a scheduler started with these flags learns."""
    set_global_server_args_for_scheduler(ServerArgs(**{"model_path": "dummy"} | flags))
    return learn_message_boundaries(tp_worker)


def test_the_worker_has_the_tokenizer() -> None:
    tokenizer = with_template(CHAT_TEMPLATE, CHATML)
    expected = MessageBoundaries.from_tokenizer(tokenizer).openers
    assert expected and learn(worker(tokenizer)).openers == expected


def test_a_jinja_file_counts_before_the_tokenizers_template(tmp_path: Path) -> None:
    tokenizer = with_template(CHAT_TEMPLATE, (*CHATML, *JAMBA_MARKS))
    file = tmp_path / "template.jinja"
    file.write_text(JAMBA)
    (opener,) = learn(worker(tokenizer), chat_template=str(file)).openers["user"]
    assert tokenizer.decode(opener) == "<|bom|><|user|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_a_built_in_conversation_leaves_the_tokenizers_template() -> None:
    tokenizer = with_template(JAMBA, JAMBA_MARKS)
    (opener,) = learn(worker(tokenizer), chat_template="chatml").openers["user"]
    assert tokenizer.decode(opener) == "<|bom|><|user|>"


def test_the_processors_template_and_named_templates() -> None:
    tokenizer = with_template(None, (*CHATML, *JAMBA_MARKS))
    tokenizer.chat_template = {"plain": PARTS_ONLY, "tools": JAMBA}
    (opener,) = learn(worker(tokenizer)).openers["user"]
    assert tokenizer.decode(opener) == "<|im_start|>user"
    (opener,) = learn(worker(tokenizer), hf_chat_template_name="tools").openers["user"]
    assert tokenizer.decode(opener) == "<|bom|><|user|>"
    processor = SimpleNamespace(chat_template=JAMBA)
    assert learn(worker(tokenizer, processor)).openers["user"] == (opener,)


def test_default_template_variables_count() -> None:
    tokenizer = with_template(JAMBA.replace("'<|bom|><|'", "mark ~ '<|'"), JAMBA_MARKS)
    variables = {"mark": "<|eom|>"}
    (opener,) = learn(worker(tokenizer), default_chat_template_kwargs=variables).openers["user"]
    assert tokenizer.decode(opener) == "<|eom|><|user|>"


def test_without_the_workers_tokenizer_it_is_loaded(ours: Style, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, max_length=1024)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    loaded = learn(worker(None), tokenizer_path=str(tmp_path), skip_tokenizer_init=True)
    assert loaded.openers == ours.roles.openers


@pytest.mark.parametrize(
    "flags",
    [
        {"tokenizer_path": "/nowhere"},
        {"chat_template": "/nowhere.jinja"},
        {"hf_chat_template_name": "unknown"},
    ],
)
def test_what_is_missing_is_one_line_in_the_log(
    flags: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = with_template(None)
    tokenizer.chat_template = {"plain": PARTS_ONLY}
    caplog.set_level("INFO", "sglang_hybrid")
    assert not learn(worker(None if "tokenizer_path" in flags else tokenizer), **flags)
    assert len(caplog.records) == 1


def test_the_chat_endpoint_sends_what_the_template_renders(ours: Style) -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"], model_type="llama"),
        get_default_sampling_params=dict,
    )
    manager: Any = SimpleNamespace(
        tokenizer=ours.tokenizer,
        processor=None,
        server_args=None,
        model_config=model_config,
        config_value=lambda name: None,
    )
    templates = TemplateManager()
    templates.load_chat_template(manager, None, "dummy")
    chat = OpenAIServingChat(manager, templates)
    messages = [
        system("A long document. " * 1000),
        user("What does it say?\n\n"),
        assistant("Nothing."),
        tool("5"),
        {"role": "user", "content": [{"type": "text", "text": "\nAre you sure?"}]},
    ]
    for last in (2, 4, 5):
        asked = ChatCompletionRequest(model="dummy", messages=messages[:last])
        sent = chat._process_messages(asked, is_multimodal=False).prompt_ids
        assert sent == ours.tokenizer.apply_chat_template(
            messages[:last], return_dict=False, add_generation_prompt=True
        )
        assert len(ours.roles.message_starts(sent)) == last - (last > 2)
