"""The tokenizer of the tiny models: a byte-level BPE that is computed, not trained or downloaded.

Any text survives encoding and decoding, because every byte is a token. The other tokens are words,
word parts, numbers and punctuation, so that whatever a model emits reads as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from sglang_hybrid.extensions.cpu.models import lexicon

VOCAB_SIZE = 32768

PAD = "<|pad|>"
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, TURN_START, TURN_END)
"""Special tokens; their ids are their places in this tuple."""

VISION_TOKENS = {
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
"""Qwen's tokens around and in the place of images, for a model that sees."""
VISION_IDS = {name: VOCAB_SIZE - len(VISION_TOKENS) + i for i, name in enumerate(VISION_TOKENS)}
"""The last ids of that model's vocabulary, which has so many words less."""

FIRST_BYTE_ID = len(SPECIAL_TOKENS)
FIRST_TEXT_ID = FIRST_BYTE_ID + 256
"""Ids from here on decode to valid UTF-8 by themselves."""

TOOL_CALL_PARSER = "glm"
"""SGLang's parser (`--tool-call-parser`) of the calls that `CHAT_TEMPLATE` writes."""

_CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\nTo call a function, write\\n<tool_call>name\\n' }}"
    "{{- '<arg_key>parameter</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>\\n' }}"
    "{{- 'These are the functions:\\n<tools>\\n' }}"
    "{%- for tool in tools %}"
    "{{- (tool['function'] or tool) | tojson + '\\n' }}"
    "{%- endfor %}"
    "{{- '</tools><|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}"
    "{{- message['content'] }}"
    "{%- elif message['content'] %}"
    "{%- for part in message['content'] %}"
    "{{- part['text'] if part['type'] == 'text' else SEEN }}"
    "{%- endfor %}"
    "{%- endif %}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '\\n' if message['content'] or not loop.first else '' }}"
    "{{- '<tool_call>' + call['function']['name'] + '\\n' }}"
    "{%- for name, value in call['function']['arguments'].items() %}"
    "{{- '<arg_key>' + name + '</arg_key>\\n' }}"
    "{{- '<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\\n' }}"
    "{%- endfor %}"
    "{{- '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- endif %}"
)
"""Messages as in ChatML. Tools come before them, in a system message of their own, and calls are
written as GLM-4.5 writes them: a call of f(a="x", b=[1]) is `<tool_call>f`, then
`<arg_key>a</arg_key>`, `<arg_value>x</arg_value>`, the same for b and `[1]`, and `</tool_call>`, a
line each. A result is a message whose role is tool. Other messages are as without tools.
"""
CHAT_TEMPLATE = _CHAT_TEMPLATE.replace("SEEN", "''")
VISION_CHAT_TEMPLATE = _CHAT_TEMPLATE.replace(
    "SEEN", "'<|vision_start|><|' + part['type'] + '_pad|><|vision_end|>'"
)
"""The same, for parts that are images or videos."""

# Contractions, words with their leading space, numbers of up to three digits, punctuation, blanks.
_SPLIT = (
    r"'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each of the 256 byte values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in alphabet):
        alphabet[byte] = chr(256 + offset)
    return [alphabet[byte] for byte in range(256)]


class _MergeTable:
    """A vocabulary and its merges, grown one target text at a time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._alphabet = byte_alphabet()
        self._ranks: dict[tuple[str, str], int] = {}
        self.vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
        for symbol in self._alphabet:
            self.vocab[symbol] = len(self.vocab)

    @property
    def full(self) -> bool:
        return len(self.vocab) >= self._size

    @property
    def merges(self) -> list[tuple[str, str]]:
        return list(self._ranks)

    def add(self, text: str, max_new: int = 3) -> None:
        """Make ``text`` one token, unless that takes more than ``max_new`` new tokens."""
        symbols = [self._alphabet[byte] for byte in text.encode()]
        if "".join(symbols) in self.vocab:
            return
        pieces = self._merge(symbols)
        if len(pieces) - 1 > max_new:
            return
        while len(pieces) > 1 and not self.full:
            self._ranks[pieces[0], pieces[1]] = len(self._ranks)
            self.vocab.setdefault(pieces[0] + pieces[1], len(self.vocab))
            pieces = self._merge(pieces)

    def _merge(self, pieces: list[str]) -> list[str]:
        """``pieces`` after all known merges, the oldest merge first."""
        ranks = self._ranks
        while len(pieces) > 1:
            pairs = [pair for pair in pairwise(pieces) if pair in ranks]
            if not pairs:
                break
            left, right = min(pairs, key=ranks.__getitem__)
            merged: list[str] = []
            for piece in pieces:
                if merged and merged[-1] == left and piece == right:
                    merged[-1] = left + right
                else:
                    merged.append(piece)
            pieces = merged
        return pieces


def _targets() -> Iterator[str]:
    """Texts that deserve a token, the most useful first."""
    yield from (" " * 2**power for power in range(1, 6))
    yield from ("\n" * count for count in range(1, 5))
    yield from lexicon.CONTRACTIONS
    for letter in lexicon.LETTERS:
        yield letter
        yield " " + letter
        yield letter.upper()
        yield " " + letter.upper()
    for word in lexicon.common_words():
        yield " " + word
    yield from (str(number) for number in range(10, 1000))
    yield from (f"{number:02d}" for number in range(10))
    for text in lexicon.CODE:
        yield text
        yield " " + text
    for word in lexicon.common_words():
        yield word
        yield " " + word.capitalize()
        yield word.capitalize()
    for syllable in lexicon.syllables():
        yield syllable
    for word in lexicon.derived_words():
        yield " " + word
    for syllable in lexicon.syllables():
        yield " " + syllable


def build_tokenizer(vision: bool = False) -> Tokenizer:
    """A tokenizer with exactly ``VOCAB_SIZE`` tokens, the same in every process."""
    last = tuple(VISION_TOKENS.values()) if vision else ()
    table = _MergeTable(VOCAB_SIZE - len(last))
    for target in _targets():
        if table.full:
            break
        # Syllables and derived words are only worth a token, not a chain of odd fragments.
        table.add(target, max_new=12 if len(table.vocab) < VOCAB_SIZE // 2 else 2)
    if not table.full:
        raise RuntimeError(
            f"The lexicon gives {len(table.vocab)} tokens, but the vocabulary needs {VOCAB_SIZE}."
        )
    for token in last:
        table.vocab[token] = len(table.vocab)
    tokenizer = Tokenizer(models.BPE(vocab=table.vocab, merges=table.merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS + last]
    )
    return tokenizer


def write_tokenizer(directory: Path, max_length: int, vision: bool = False) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template)."""
    build_tokenizer(vision).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": EOS,  # no text has it; transformers' class for Qwen3.5 would add one
        "additional_special_tokens": [
            *(TURN_START, TURN_END),
            *(VISION_TOKENS.values() if vision else ()),
        ],
        "clean_up_tokenization_spaces": False,
        "chat_template": VISION_CHAT_TEMPLATE if vision else CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
