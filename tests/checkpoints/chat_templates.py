"""Chat templates as served models have them, shortened, and tokenizers with their tokens."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.extensions.cpu.models.tokenizer import CHAT_TEMPLATE, byte_alphabet

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

QWEN_3_5 = QWEN_3.replace(
    "{%- if enable_thinking is defined and not",
    "{{- '<think>\n' if enable_thinking is not defined -}}\n"
    "{%- if enable_thinking is defined and not",
)

NEMOTRON_3 = """\
{%- for m in messages -%}
{{- '<|im_start|>' ~ m.role ~ '\n' -}}
{{- '<think></think>' if m.role == 'assistant' -}}
{{- m.content ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n<think>' -}}
{{- '\n' if enable_thinking is not defined or enable_thinking else '</think>' -}}
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
    """A tokenizer like SentencePiece: a blank is part of the word, unknown characters are bytes."""
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
