"""Texts that are encoded from pieces have the tokens of the whole text."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.extensions.cpu.models.tokenizer import build_tokenizer
from sglang_hybrid.serving.http_tenants import serve_for
from sglang_hybrid.serving.requests import encoded_pieces
from sglang_hybrid.serving.requests.encoded_pieces import (
    ENTRY_BYTES,
    KeptPieces,
    PieceEncoder,
    cut_tokens,
    encode_text,
    encode_texts,
)
from sglang_hybrid.serving.requests.long_requests import in_context
from tests.examples import examples

CORPUS = (
    "The cat's hat sat there, and it was fine.\n",
    "Ünïcode ﬁne ½ 12 345 x",
    "  a  b\tc ",
    "猫 cat",
)
TURN, END = "<|im_start|>", "<|im_end|>"
PLAIN = [AddedToken(text, special=True, normalized=False) for text in (TURN, END, "<s>", "</s>")]

_metaspace = pre_tokenizers.Metaspace
_bpe = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
_unigram = trainers.UnigramTrainer(
    vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
)
_wordpiece = trainers.WordPieceTrainer(
    vocab_size=200, special_tokens=["[UNK]"], show_progress=False
)
_word_level = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)


def _trained(model: Any, trainer: Any, pre: Any = None, normalizer: Any = None) -> Tokenizer:
    backend = Tokenizer(model)
    if pre is not None:
        backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator(CORPUS * 2, trainer)
    return backend


KINDS = {
    "byte-level BPE": lambda: _trained(models.BPE(), _bpe, pre_tokenizers.ByteLevel(False)),
    "byte-level BPE, blank before": lambda: _trained(
        models.BPE(), _bpe, pre_tokenizers.ByteLevel(True), normalizers.NFC()
    ),
    "split and byte-level": lambda: _trained(
        models.BPE(),
        _bpe,
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+|."), "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        ),
        normalizers.NFKC(),
    ),
    "blanks before, none cut": lambda: _trained(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"),
        _bpe,
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "stripped words": lambda: _trained(
        models.WordLevel(unk_token="<unk>"),
        _word_level,
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()]),
        normalizers.Sequence([normalizers.Strip(), normalizers.StripAccents()]),
    ),
    "WordPiece": lambda: _trained(
        models.WordPiece(unk_token="[UNK]"),
        _wordpiece,
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(lowercase=True),
    ),
    "words and Metaspace": lambda: _trained(
        models.Unigram(),
        _unigram,
        pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), _metaspace("▁", prepend_scheme="first")]
        ),
    ),
    **{
        f"{name}, Metaspace {scheme}": lambda model=model, trainer=trainer, scheme=scheme: _trained(
            model(), trainer, _metaspace("▁", prepend_scheme=scheme)
        )
        for (name, model, trainer), scheme in product(
            (("Unigram", models.Unigram, _unigram), ("BPE", models.BPE, _bpe)),
            ("first", "always", "never"),
        )
    },
}

FLAGS = [
    dict(zip(("lstrip", "rstrip", "normalized"), values, strict=True))
    for values in product((False, True), repeat=3)
]


def _with_added(kind: str, around: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with added tokens of all flags, some of which overlap."""
    backend = KINDS[kind]()
    backend.add_special_tokens(PLAIN)
    for number, flags in enumerate(FLAGS):
        backend.add_tokens([AddedToken(f"[T{number}]", special=False, **flags)])
    backend.add_tokens(
        [
            AddedToken("<|im", normalized=False),
            AddedToken("|>cat", normalized=False),
            AddedToken("x<s", normalized=False),
            AddedToken(" hat ", normalized=False),
            AddedToken("\n\n", normalized=False, rstrip=True),
            AddedToken("Cat", normalized=True),
        ]
    )
    if around:
        names = [("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))]
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=names
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@cache
def _encoder(kind: str, around: bool) -> PieceEncoder:
    """One that cuts wherever it may, and keeps what all texts of a test have."""
    tokenizer = _with_added(kind, around)
    return PieceEncoder(tokenizer, cut_tokens(tokenizer), KeptPieces(), piece=1)


ADDED = (TURN, END, "<s>", "</s>", *(f"[T{number}]" for number in range(len(FLAGS))))
WORDS = (
    "cat",
    "Cat",
    "The hat ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "x",
    "12",
    "½",
    "ﬁ",
    "猫",
    "e\u0301",
)
PARTS = ("<|im", "|>", "|>cat", "x<s", "<", "[T", "]", "s>", "<|im_start|", "\u00a0", "\x1f", "▁")
PIECES = st.sampled_from(ADDED) | st.sampled_from(WORDS + PARTS) | st.text(max_size=4)
TEXTS = st.lists(PIECES, max_size=16).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@examples(20)
@given(text=TEXTS, more=TEXTS, around=st.booleans(), special=st.sampled_from((None, False, True)))
def test_tokens_are_those_of_the_whole_text(
    kind: str, text: str, more: str, around: bool, special: bool | None
) -> None:
    encoder = _encoder(kind, around)
    tokenizer = encoder._tokenizer
    kwargs = {} if special is None else {"add_special_tokens": special}

    def encode(text: str, encode_kwargs: Mapping[str, Any]) -> list[int]:
        ids: list[int] = tokenizer.encode(text, **encode_kwargs)
        return ids

    for each in (text, text + more, more + text):
        assert encoder.encode(each, kwargs, encode, b"") == encode(each, kwargs)
    assert not encoder._checks.has_differed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_at(kind: str) -> None:
    """No place to cut at is a token in another one, or whose beginning another one may take, or
    that strips the blanks before it.
    """
    kept = {
        f"[T{n}]" for n, flags in enumerate(FLAGS) if not (flags["lstrip"] or flags["normalized"])
    }
    tokenizer = _with_added(kind, True)
    unknown = {"<unk>", "[UNK]"} & tokenizer.get_added_vocab().keys()
    assert cut_tokens(tokenizer).keys() == {TURN, END, "</s>", "x<s"} | kept | unknown


def _chat(*messages: str) -> str:
    return "".join(f"{TURN}user\n{text}{END}\n" for text in messages)


def _embedded() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=build_tokenizer())


class Counted:
    """Encodes with a tokenizer, and counts the characters."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.characters = 0

    def __call__(self, text: str, encode_kwargs: Mapping[str, Any]) -> list[int]:
        self.characters += len(text)
        ids: list[int] = self.tokenizer.encode(text, **encode_kwargs)
        return ids


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return _embedded()


@pytest.fixture
def encoder(tokenizer: Any) -> PieceEncoder:
    return PieceEncoder(tokenizer, cut_tokens(tokenizer), KeptPieces())


MESSAGES = [f"message {number}: " + "some words of it " * 80 for number in range(8)]


def test_only_what_is_new_is_encoded(encoder: PieceEncoder, tokenizer: Any) -> None:
    encode = Counted(tokenizer)
    encoder.encode(_chat(*MESSAGES[:6]), {}, encode, b"")
    encode.characters = 0
    grown = _chat(*MESSAGES)
    assert encoder.encode(grown, {}, encode, b"") == tokenizer.encode(grown)
    assert encode.characters < len(_chat(*MESSAGES[5:]))
    encode.characters = 0
    edited = _chat(*MESSAGES[:3], "another one", *MESSAGES[4:])
    assert encoder.encode(edited, {}, encode, b"") == tokenizer.encode(edited)
    assert encode.characters < len(_chat(*MESSAGES[2:5]))


def test_tenants_share_nothing(encoder: PieceEncoder, tokenizer: Any) -> None:
    encode = Counted(tokenizer)
    for owner in (b"one", b"another"):
        encoder.encode(_chat(*MESSAGES), {}, encode, owner)
    assert encode.characters == 2 * len(_chat(*MESSAGES))


def test_the_memory_is_bounded() -> None:
    size = ENTRY_BYTES + 40
    kept = KeptPieces(3 * size)
    for number in range(6):
        kept.put([(bytes([number]), array("i", range(10)))])
        kept.get([bytes([3])])  # it was used last
        assert kept.bytes <= 3 * size
    found = kept.get(bytes([number]) for number in range(6))
    assert [ids is not None for ids in found] == [False, False, False, True, True, True]
    kept.put([(b"large", array("i", range(1_000)))])
    assert (kept.bytes, kept.get([b"large"])) == (0, [None])


def test_several_threads(encoder: PieceEncoder, tokenizer: Any) -> None:
    texts = [_chat(*MESSAGES[first:]) for first in range(6)]
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        encode = Counted(tokenizer)
        found[number] = [encoder.encode(text, {}, encode, b"") for text in texts]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each == [tokenizer.encode(text) for text in texts] for each in found.values())


def test_a_difference_ends_it(
    encoder: PieceEncoder, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The kept pieces are wrong here, as no tokenizer makes them."""
    text, encode = _chat(*MESSAGES), Counted(tokenizer)
    encoder.encode(text, {}, encode, b"")
    for key, ids in encoder._kept._pieces.items():
        encoder._kept._pieces[key] = ids[::-1]
    encoder.encode(text, {}, encode, b"")
    assert encoder._checks.thread is not None
    encoder._checks.thread.join()
    assert [line.message.count("as a whole") for line in caplog.records] == [1]
    assert encoder.encode(text, {}, encode, b"") == tokenizer.encode(text)


def test_a_sample_is_compared(encoder: PieceEncoder, tokenizer: Any) -> None:
    text, encode = _chat(*MESSAGES), Counted(tokenizer)
    encoder.encode(text, {}, encode, b"")
    assert encoder._checks.thread is None  # nothing came from what is kept
    encoder.encode(text, {}, encode, b"")
    first = encoder._checks.thread
    assert first is not None
    encoder.encode(text, {}, encode, b"")
    assert encoder._checks.thread is first  # the next one only after a while
    first.join()


def test_other_arguments_are_passed_on(encoder: PieceEncoder, tokenizer: Any) -> None:
    kwargs = {"truncation": True, "max_length": 20}
    encode = Counted(tokenizer)
    for _ in range(2):
        assert len(encoder.encode(_chat(*MESSAGES), kwargs, encode, b"")) == 20
        assert encoder.encode(_chat(*MESSAGES), {}, encode, b"") == tokenizer.encode(
            _chat(*MESSAGES)
        )


def test_tokenizers_that_may_look_further(tokenizer: Any) -> None:
    assert cut_tokens(tokenizer)

    class Own(PreTrainedTokenizerFast):
        def encode(self, *args: Any, **kwargs: Any) -> Any:
            return super().encode(*args, **kwargs)

    words = _embedded()
    words.backend_tokenizer.add_tokens([AddedToken("w", single_word=True, normalized=False)])
    random = _embedded()
    random.backend_tokenizer.model.dropout = 0.1
    split = _embedded()
    split.split_special_tokens = True
    for other in (Own(tokenizer_object=build_tokenizer()), words, random, split, None, object()):
        assert not cut_tokens(other)


def _http(**body: Any) -> Request:
    request = Request({"type": "http", "path": "/", "query_string": b"", "headers": []})
    request._json = body
    return request


def test_whose_pieces(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant is known in the threads of its request; where it is not, nothing is kept."""
    kept = PieceEncoder(tokenizer, cut_tokens(tokenizer), KeptPieces())
    monkeypatch.setattr(encoded_pieces.PieceEncoder, "of", lambda _: kept)
    text = _chat(*MESSAGES)

    def characters() -> int:
        encode = Counted(tokenizer)
        assert encode_text(tokenizer, text, {}, encode) == tokenizer.encode(text)
        return encode.characters

    async def ask(**body: Any) -> int:
        serve_for(_http(**body))
        work = in_context(characters)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    for body in (
        {},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"lora_path": "a"},
        {"model": "base:a"},
    ):
        assert (asyncio.run(ask(**body)), asyncio.run(ask(**body))) == (len(text), 0)
    several = {"extra_key": ["a", "b"]}
    assert asyncio.run(ask(**several)) == asyncio.run(ask(**several)) == len(text)
    assert characters() == characters() == len(text)  # no HTTP request


def test_texts_of_generate(tokenizer: Any) -> None:
    text = _chat(*MESSAGES)

    async def ask() -> None:
        serve_for(_http())
        for texts in ([text], [text], [text + "x"], [text, text], ["short"]):
            assert encode_texts(tokenizer, texts)["input_ids"] == tokenizer(texts)["input_ids"]
        pair = encode_texts(tokenizer, [["a", "b"]], return_token_type_ids=True)
        assert len(pair["token_type_ids"]) == 1

    asyncio.run(ask())
