"""Messages begin where the template opens them: prompts cut at the starts that are found."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.checkpoints.message_boundaries import MessageBoundaries, learn_message_boundaries
from sglang_hybrid.models.tokenizer import CHAT_TEMPLATE, byte_alphabet, write_tokenizer

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


LLAMA_3 = """\
{{- bos_token -}}
{%- set given = messages[0].role == 'system' -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' ~ strftime_now('%d %b') -}}
{{- '\n\n' ~ (messages[0].content if given else '') ~ '<|eot_id|>' -}}
{%- for m in (messages[1:] if given else messages) -%}
{%- set name = 'ipython' if m.role == 'tool' else m.role -%}
{{- '<|start_header_id|>' ~ name ~ '<|end_header_id|>\n\n' -}}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}
{{- m.tool_calls[0].function | tojson -}}
{%- elif m.role == 'tool' -%}{{- m.content | tojson -}}
{%- else -%}{{- m.content | trim -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}"""

GRANITE = """\
{%- if messages[0].role != 'system' -%}
{{- '<|start_of_role|>system<|end_of_role|>Today is ' ~ strftime_now('%A') -}}
{{- '. You help.<|end_of_text|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{{- '<|start_of_role|>' ~ ('tool_response' if m.role == 'tool' else m.role) -}}
{{- '<|end_of_role|>' ~ m.content -}}
{%- for call in m.tool_calls -%}{{- '<|tool_call|>' ~ call.function | tojson -}}{%- endfor -%}
{{- '<|end_of_text|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}"""

NEMOTRON_H = """\
{{- '<SPECIAL_10>System\n' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('system comes first') }}{%- endif -%}
{{- m.content.strip() -}}
{%- elif m.role == 'user' -%}{{- '\n<SPECIAL_11>User\n' ~ m.content.strip() -}}
{%- elif m.role == 'assistant' -%}
{{- '\n<SPECIAL_11>Assistant\n' ~ m.content.split('</think>')[-1].strip() -}}
{%- for call in m.tool_calls -%}{{- '<TOOLCALL>' ~ call.function | tojson -}}{%- endfor -%}
{{- '\n<SPECIAL_12>\n' -}}
{%- else -%}{{ raise_exception('unknown role') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\n<SPECIAL_11>Assistant\n<think>\n' -}}{%- endif -%}"""

FALCON_H1 = "{{- bos_token -}}" + CHAT_TEMPLATE

MISTRAL = """\
{{- bos_token -}}
{%- set ns = namespace(user=true, system='', last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set ns.system = m.content ~ '\n\n' -%}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS] {\"content\": ' ~ m.content ~ ', \"call_id\": \"' ~ m.tool_call_id ~ '\"}' -}}
{{- '[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{%- if call.id | length != 9 -%}{{ raise_exception('nine characters') }}{%- endif -%}
{{- call.function | tojson -}}
{%- endfor -%}
{{- ']' ~ eos_token -}}
{%- else -%}
{%- if (m.role == 'user') != ns.user -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- set ns.user = not ns.user -%}
{%- if m.role == 'user' -%}
{{- '[INST] ' ~ (ns.system if loop.index0 == ns.last else '') ~ m.content ~ '[/INST]' -}}
{%- else -%}{{- ' ' ~ m.content ~ eos_token -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}"""

JAMBA = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|bom|><|' ~ m.role ~ '|> ' ~ m.content -}}
{%- for call in m.tool_calls -%}{{- call.function | tojson -}}{%- endfor -%}
{{- '<|eom|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|bom|><|assistant|>' -}}{%- endif -%}"""

QWEN_3 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if ns.last < 0 -%}{{ raise_exception('No user query') }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' ~ m.role ~ '\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls -%}
{{- '<tool_call>\n' ~ call.function | tojson ~ '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}"""

PHI = """\
{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' -}}{%- endfor -%}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token -}}"""

GEMMA = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}
{%- for m in messages -%}
{{- '<start_of_turn>' ~ {'user': 'user', 'assistant': 'model'}[m.role] ~ '\n' -}}
{{- m.content ~ '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""

VICUNA = """\
{%- for m in messages -%}
{{- {'system': '', 'user': 'USER: ', 'assistant': 'ASSISTANT: '}[m.role] ~ m.content -}}
{{- eos_token if m.role == 'assistant' else ' ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""

ALWAYS_PROMPTED = CHAT_TEMPLATE.replace("{%- if add_generation_prompt %}", "{%- if true %}")

PARTS_ONLY = """\
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\n' -}}
{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}"""

LLAMA_2 = """\
{%- for m in messages -%}
{{- bos_token ~ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' -}}
{{- ' ' ~ m.content ~ ' ' ~ eos_token if m.role == 'assistant' -}}
{%- endfor -%}"""

CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GRANITE_MARKS = ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
NEMOTRON_MARKS = ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
MISTRAL_MARKS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
JAMBA_MARKS = ("<|bom|>", "<|eom|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
QWEN_MARKS = (*CHATML, "<tool_response>", "</tool_response>", "<think>", "</think>")
PHI_MARKS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
GEMMA_MARKS = ("<start_of_turn>", "<end_of_turn>")


def byte_level() -> Tokenizer:
    """Bytes, and a few words that a merge makes one token."""
    vocabulary = {symbol: index for index, symbol in enumerate(byte_alphabet())}
    merges = []
    for word in ("user", "User", "system", "System", "tool", "ĊĊ", ".Ċ", "ĠUSER", "Ġthe"):
        piece = word[0]
        for letter in word[1:]:
            if (piece, letter) not in merges:
                merges.append((piece, letter))
            piece += letter
            vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_pieces() -> Tokenizer:
    """As SentencePiece does it: a blank is part of the word, and unknown characters are bytes."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("▁", *letters, "▁U", "▁US", "er", "us", "user", "▁[", "▁{"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "U"), ("▁U", "S"), ("e", "r"), ("u", "s"), ("us", "er"), ("▁", "["), ("▁", "{")]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def with_template(
    template: str | None,
    marks: tuple[str, ...] = (),
    build: Callable[[], Tokenizer] = byte_level,
    eos: str = "<eos>",
) -> PreTrainedTokenizerFast:
    backend = build()
    names = dict.fromkeys(("<bos>", eos, *marks))
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, chat_template=template
    )


@dataclass(frozen=True)
class Style:
    tokenizer: PreTrainedTokenizerFast
    roles: MessageBoundaries

    def cut(self, *messages: Message, prompted: bool = True, **variables: Any) -> list[str]:
        """The prompt's text, cut where messages start; first what comes before them all."""
        ids = self.tokenizer.apply_chat_template(
            list(messages), return_dict=False, add_generation_prompt=prompted, **variables
        )
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


def test_a_hundred_thousand_tokens_take_about_a_millisecond(ours: Style) -> None:
    turn = ours.tokenizer.apply_chat_template([user("word " * 500)], return_dict=False)
    ids = array("q", turn * (100_000 // len(turn)))
    seconds = []
    for _ in range(10):
        begun = time.perf_counter()
        starts = ours.roles.message_starts(ids)
        seconds.append(time.perf_counter() - begun)
    assert starts == list(range(0, len(ids), len(turn)))
    assert min(seconds) < 2e-3


def test_llama_3() -> None:
    llama = style(LLAMA_3, LLAMA_MARKS, eos="<|eot_id|>")

    def head(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    today = llama.cut(user("a"))[1]
    assert today.startswith(head("system") + "Today Date: ")
    assert llama.cut(user("a"), assistant("b"), user("c")) == [
        "<bos>",
        today,
        f"{head('user')}a<|eot_id|>{head('assistant')}b<|eot_id|>",
        f"{head('user')}c<|eot_id|>{head('assistant')}",
    ]
    assert llama.cut(system("S"), user("a"), calls("x"), tool("y"), prompted=False)[-2:] == [
        f"{head('user')}a<|eot_id|>{head('assistant')}"
        '{"name": "find", "arguments": {"q": "x"}}<|eot_id|>',
        f'{head("ipython")}"y"<|eot_id|>',
    ]


def test_a_date_in_the_template_is_no_part_of_an_opener() -> None:
    llama = style(LLAMA_3, LLAMA_MARKS, eos="<|eot_id|>")
    tomorrow = LLAMA_3.replace("strftime_now('%d %b')", "'32 Dec'")
    assert len(llama.cut(user("a"), chat_template=tomorrow)) == 3
    granite = style(GRANITE, GRANITE_MARKS, eos="<|end_of_text|>")
    tomorrow = GRANITE.replace("strftime_now('%A')", "'Someday'")
    assert len(granite.cut(user("a"), chat_template=tomorrow)) == 3


def test_granite() -> None:
    granite = style(GRANITE, GRANITE_MARKS, eos="<|end_of_text|>")

    def head(role: str) -> str:
        return f"<|start_of_role|>{role}<|end_of_role|>"

    end = "<|end_of_text|>\n"
    assert granite.cut(system("S"), user("a"), assistant("b"), user("c")) == [
        "",
        f"{head('system')}S{end}",
        f"{head('user')}a{end}{head('assistant')}b{end}",
        f"{head('user')}c{end}{head('assistant')}",
    ]
    assert granite.cut(user("a"), calls("x", "y"), tool("1"), tool("2"))[-2:] == [
        f"{head('tool_response')}1{end}",
        f"{head('tool_response')}2{end}{head('assistant')}",
    ]


def test_nemotron_h() -> None:
    nemotron = style(NEMOTRON_H, NEMOTRON_MARKS, eos="<SPECIAL_12>")
    assert nemotron.cut(system("S"), user("a"), assistant("t</think>b"), user("c")) == [
        "",
        "<SPECIAL_10>System\nS\n",
        "<SPECIAL_11>User\na\n<SPECIAL_11>Assistant\nb\n<SPECIAL_12>\n\n",
        "<SPECIAL_11>User\nc\n<SPECIAL_11>Assistant\n<think>\n",
    ]
    assert nemotron.cut(user("a"), prompted=False) == [
        "",
        "<SPECIAL_10>System\n\n",
        "<SPECIAL_11>User\na",
    ]
    assert "tool" not in nemotron.roles.openers


def test_falcon_h1() -> None:
    falcon = style(FALCON_H1, CHATML)
    assert falcon.cut(system("S"), user("a")) == [
        "<bos>",
        "<|im_start|>system\nS<|im_end|>\n",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize("build", [byte_level, word_pieces])
def test_mistral(build: Callable[[], Tokenizer]) -> None:
    mistral = style(MISTRAL, MISTRAL_MARKS, build)
    assert mistral.cut(user("a")) == ["<bos>", "[INST] a[/INST]"]
    assert mistral.cut(system("S"), user("a"), assistant("b"), user("c")) == [
        "<bos>",
        "[INST] a[/INST] b<eos>",
        "[INST] S\n\nc[/INST]",
    ]
    called = mistral.cut(user("a"), calls("x", "y"), tool("[1]"), tool("[2]", 1), assistant("b"))
    assert called[2:] == [
        '[TOOL_RESULTS] {"content": [1], "call_id": "abcdefgh0"}[/TOOL_RESULTS]',
        '[TOOL_RESULTS] {"content": [2], "call_id": "abcdefgh1"}[/TOOL_RESULTS] b<eos>',
    ]


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


def test_without_added_tokens_the_brackets_of_mistral_are_text() -> None:
    mistral = style(MISTRAL, (), word_pieces)
    assert mistral.cut(user("a"), assistant("b"), user("c"))[-1] == "[INST] c[/INST]"


def test_jamba() -> None:
    jamba = style(JAMBA, JAMBA_MARKS)
    assert jamba.cut(system("S"), user("a"), calls("x"), tool("1")) == [
        "<bos>",
        "<|bom|><|system|> S<|eom|>",
        '<|bom|><|user|> a<|eom|><|bom|><|assistant|> {"name": "find", "arguments": {"q": "x"}}'
        "<|eom|>",
        "<|bom|><|tool|> 1<|eom|><|bom|><|assistant|>",
    ]


@pytest.mark.parametrize("build", [byte_level, word_pieces])
def test_qwen_3_results_of_tools_are_messages_in_a_user_turn(
    build: Callable[[], Tokenizer],
) -> None:
    qwen = style(QWEN_3, QWEN_MARKS, build, eos="<|im_end|>")
    end = "<|im_end|>\n"
    call = '<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>'
    assert qwen.cut(system("S"), user("a"), calls("x"), tool("1"), prompted=False) == [
        "",
        f"<|im_start|>system\nS{end}",
        f"<|im_start|>user\na{end}<|im_start|>assistant\n<think>\n\n</think>\n\n{call}{end}",
        f"<|im_start|>user\n<tool_response>\n1\n</tool_response>{end}",
    ]
    assert qwen.cut(user("a"), calls("x", "x"), tool("1"), tool("2"))[2:] == [
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n",
        f"<tool_response>\n2\n</tool_response>{end}<|im_start|>assistant\n",
    ]
    assert qwen.cut(user("a"), assistant("b"), user("c"), enable_thinking=False) == [
        "",
        f"<|im_start|>user\na{end}<|im_start|>assistant\nb{end}",
        f"<|im_start|>user\nc{end}<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ]


def test_beside_added_tokens_text_alone_opens_nothing() -> None:
    qwen = style(QWEN_3, CHATML)
    assert qwen.cut(user("a"), calls("x", "x"), tool("1"), tool("2"), prompted=False)[2:] == [
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
    ]


def test_the_begin_of_text_alone_opens_nothing() -> None:
    llama = style(LLAMA_2)
    assert llama.cut(user("a"), assistant("b"), user("c")) == [
        "",
        "<bos>[INST] a [/INST] b <eos>",
        "<bos>[INST] c [/INST]",
    ]
    assert llama.roles.message_starts(llama.tokenizer.encode("<bos>Once upon a time")) == []


def test_a_single_token_of_text_opens_nothing() -> None:
    assert not style(VICUNA.replace("USER: ", "user")).roles


def test_an_end_of_text_in_the_place_of_the_generation_prompt() -> None:
    phi = style(PHI, PHI_MARKS)
    assert phi.cut(system("S"), user("a"), assistant("b"), user("c")) == [
        "",
        "<|system|>\nS<|end|>\n",
        "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n",
        "<|user|>\nc<|end|>\n<|assistant|>\n",
    ]


def test_a_template_that_refuses_roles() -> None:
    gemma = style(GEMMA, GEMMA_MARKS)
    assert set(gemma.roles.openers) == {"user"}
    assert gemma.cut(user("a"), assistant("b"), user("c")) == [
        "<bos>",
        "<start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n",
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n",
    ]


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


@pytest.mark.parametrize("build", [byte_level, word_pieces])
def test_roles_that_are_all_text(build: Callable[[], Tokenizer]) -> None:
    vicuna = style(VICUNA, (), build)
    assert vicuna.cut(system("S"), user("a"), assistant("b"), user("c"))[-1] == (
        "USER: c ASSISTANT:"
    )
    text = vicuna.tokenizer.encode("A USER is no US ER: ", add_special_tokens=False)
    assert vicuna.roles.message_starts(text) == []


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
    """What a scheduler started with these flags learns."""
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
