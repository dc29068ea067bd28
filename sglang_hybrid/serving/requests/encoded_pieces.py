"""Long texts are encoded from pieces that were encoded before.

A fast tokenizer first looks for its added tokens (`<|im_start|>`), and encodes what lies between
two of them without looking at the rest of the text. So a text that is cut where added tokens begin
has the tokens of its pieces, one after another. The pieces of a chat are its messages: with each
turn all but the last ones come again, and only new ones are encoded. A text without added tokens,
as of /generate, is one piece, which saves nothing.

Pieces are kept by a hash of their text, apart for each tenant, within `MOST_BYTES` in each process
that tokenizes. `PieceEncoder.of` says for which tokenizers that is done. A sample of the texts is
encoded as a whole, too, in a thread of its own: should the tokens ever differ, one line of the log
says so, and this process encodes all texts as a whole from then on.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby, pairwise
from typing import Any, Final, TypeAlias

from sglang_hybrid.serving.http_tenants import http_owner

logger = logging.getLogger(__name__)

LONG: Final = 4_096
"""Characters of a text from which its pieces are kept. A shorter one is encoded within 2 ms."""

PIECE: Final = 1_024
"""Characters of a piece, at least: a text that is full of added tokens has few pieces, too."""

MOST_BYTES: Final = 128 << 20
"""Memory of the pieces of one process: about 250 chats of 100,000 tokens."""

ENTRY_BYTES: Final = 256
"""Memory of a piece beside its token ids, which have four bytes each."""

CHECKED_SHARE: Final = 0.01
"""Share of its time that a process at most encodes texts as a whole to compare them."""

KINDS: Final = {
    "model": {"BPE", "Unigram", "WordLevel", "WordPiece"},
    "normalizer": {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents"),
    },
    "pre_tokenizer": {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
        *("Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace"),
        "WhitespaceSplit",
    },
    "post_processor": {
        *("BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"),
    },
}
"""The parts of a tokenizer that see of a text no more than lies between two added tokens, and
whether it begins there (Metaspace); read in the source of tokenizers 0.23.2.
"""

Encode: TypeAlias = Callable[[str, Mapping[str, Any]], list[int]]
"""A function from a text and the arguments for a tokenizer to token ids."""


def encode_text(
    tokenizer: Any, text: str, encode_kwargs: Mapping[str, Any], encode: Encode
) -> list[int]:
    """The token ids that `encode(text, encode_kwargs)` has.

    tokenizer: of transformers, with which `encode` encodes; it is called for what is not known.
    """
    if len(text) >= LONG and (owner := http_owner()) is not None:
        encoder = PieceEncoder.of(tokenizer)
        if encoder is not None:
            return encoder.encode(text, encode_kwargs, encode, owner)
    return encode(text, encode_kwargs)


def encode_texts(tokenizer: Any, texts: Sequence[Any], **kwargs: Any) -> Mapping[str, Any]:
    """The result of `tokenizer(texts, **kwargs)`; for one text alone, its `input_ids`."""
    if len(texts) != 1 or not isinstance(texts[0], str) or kwargs:
        found: Mapping[str, Any] = tokenizer(texts, **kwargs)
        return found

    def encode(text: str, encode_kwargs: Mapping[str, Any]) -> list[int]:
        ids: list[int] = tokenizer([text], **encode_kwargs)["input_ids"][0]
        return ids

    return {"input_ids": [encode_text(tokenizer, texts[0], {}, encode)]}


def cut_places(
    tokenizer: Any, text: str, encode_kwargs: Mapping[str, Any], ids: Sequence[int]
) -> list[tuple[int, int]]:
    """Characters and tokens before each added token at which `text` may be cut, ascending; none
    where that is not known.

    ids [n]: the tokens of `text`, encoded with `encode_kwargs`.
    """
    encoder = PieceEncoder.of(tokenizer) if len(text) >= LONG else None
    return [] if encoder is None else encoder.cut_places(text, encode_kwargs, ids)


class KeptPieces:
    """Token ids by key, those used last, within a bound of bytes. Threads may share it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._pieces: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def get(self, keys: Iterable[bytes]) -> list[array[int] | None]:
        """The token ids of each key, None where they are not known."""
        with self._lock:
            found = []
            for key in keys:
                ids = self._pieces.get(key)
                if ids is not None:
                    self._pieces.move_to_end(key)
                found.append(ids)
            return found

    def put(self, pieces: Iterable[tuple[bytes, array[int]]]) -> None:
        """Keep pieces. What was used longest ago makes room for them."""
        with self._lock:
            for key, ids in pieces:
                if key not in self._pieces:
                    self._pieces[key] = ids
                    self.bytes += _size(ids)
            while self.bytes > self._most_bytes:
                self.bytes -= _size(self._pieces.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._pieces.clear()
            self.bytes = 0


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + len(ids) * ids.itemsize


class PieceEncoder:
    """Encodes texts with one tokenizer, from pieces that it keeps.

    tokenizer: as `PieceEncoder.of` accepts it. cuts: the ids of the added tokens at which texts are
    cut. piece: see `PIECE`.
    """

    def __init__(
        self, tokenizer: Any, cuts: Mapping[str, int], kept: KeptPieces, piece: int = PIECE
    ) -> None:
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._cut_ids = frozenset(cuts.values())
        self._pattern = re.compile(_any_of(sorted(cuts)))
        self._kept = kept
        self._piece = piece
        self._around = _around(tokenizer, cuts)
        self._checks = Checks()

    @staticmethod
    @lru_cache(maxsize=4)
    def of(tokenizer: Any) -> PieceEncoder | None:
        """The encoder of a tokenizer of transformers; None where it is not known that its pieces
        have the tokens of the whole text.
        """
        cuts = cut_tokens(tokenizer)
        return PieceEncoder(tokenizer, cuts, KeptPieces()) if cuts else None

    def encode(
        self, text: str, encode_kwargs: Mapping[str, Any], encode: Encode, owner: bytes
    ) -> list[int]:
        """See `encode_text`. owner: whose text it is; 64 bytes at most."""
        around = self._around_of(encode_kwargs)
        cuts = [match.span() for match in self._pattern.finditer(text)]
        places = self._places(cuts)
        if self._checks.has_differed or around is None or not places:
            return encode(text, encode_kwargs)
        starts = [0, *(cuts[place][0] for place in places), len(text)]
        keys = [_key(text[start:end], owner) for start, end in pairwise(starts)]
        kept = self._kept.get(keys)
        ids = array("i", around[0])
        for is_known, group in groupby(range(len(keys)), lambda at: kept[at] is not None):
            at = list(group)
            if is_known:
                for one in at:
                    ids.extend(kept[one] or ())
                continue
            first, last = at[0], at[-1]
            new = array(
                "i", encode(text[starts[first] : starts[last + 1]], {"add_special_tokens": False})
            )
            ids.extend(new)
            # Of the added tokens, those from the first piece's beginning to the last one's end.
            begin = places[first - 1] if first else 0
            end = places[last] if last < len(places) else len(cuts)
            inner = [place - begin for place in places[first:last]]
            expected = [self._cuts[text[slice(*cut)]] for cut in cuts[begin:end]]
            self._keep(keys[first : last + 1], new, expected, inner)
        ids.extend(around[1])
        if any(known is not None for known in kept):
            self._checks.offer(lambda: self._tokenizer.encode(text, **encode_kwargs), ids)
        return ids.tolist()

    def cut_places(
        self, text: str, encode_kwargs: Mapping[str, Any], ids: Sequence[int]
    ) -> list[tuple[int, int]]:
        """See the function of this name."""
        around = self._around_of(encode_kwargs)
        if around is None:
            return []
        cuts = [match.span() for match in self._pattern.finditer(text)]
        begin, end = len(around[0]), len(ids) - len(around[1])
        places = self._cut_ids_in(ids[begin:end], [self._cuts[text[slice(*cut)]] for cut in cuts])
        return [(cut[0], begin + at) for cut, at in zip(cuts, places, strict=False)]

    def _cut_ids_in(self, ids: Sequence[int], expected: Sequence[int]) -> list[int]:
        """The places in `ids` of tokens at which a text may be cut; none if those are not
        `expected`: other text has such a token, too, as a normalizer may make it.
        """
        found = [at for at, token in enumerate(ids) if token in self._cut_ids]
        return found if [ids[at] for at in found] == list(expected) else []

    def _around_of(
        self, encode_kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[int], Sequence[int]] | None:
        """The tokens before and behind a text; None if it is to be encoded as a whole."""
        if encode_kwargs.keys() - {"add_special_tokens"}:
            return None
        return self._around if encode_kwargs.get("add_special_tokens", True) else ((), ())

    def _places(self, cuts: Sequence[tuple[int, int]]) -> list[int]:
        """Indices of those added tokens of a text at which a piece begins, but for the first."""
        places, start = [], 0
        for place, (begin, _) in enumerate(cuts):
            if begin - start >= self._piece:
                places.append(place)
                start = begin
        return places

    def _keep(
        self, keys: Sequence[bytes], ids: array[int], expected: Sequence[int], inner: Sequence[int]
    ) -> None:
        """Keep pieces that were encoded together as `ids`.

        expected: the tokens in `ids` at which a text could be cut; inner: of these, those at which
        the second piece and those behind it begin.
        """
        found = self._cut_ids_in(ids, expected)
        if found or not expected:
            starts = [0, *(found[place] for place in inner), len(ids)]
            pieces = [ids[start:end] for start, end in pairwise(starts)]
            self._kept.put(zip(keys, pieces, strict=True))


class Checks:
    """Compares token ids with those of the whole text, one text at a time. has_differed: whether
    they have differed.
    """

    def __init__(self) -> None:
        self._next = 0.0
        self.has_differed = False
        self.thread: threading.Thread | None = None

    def offer(self, encode: Callable[[], Sequence[int]], ids: array[int]) -> None:
        """Compare `ids` with what `encode` returns, in a thread of its own, if it is time to."""
        if time.monotonic() >= self._next:
            self._next = math.inf
            self.thread = threading.Thread(
                target=self._compare, args=(encode, ids[:]), name="compare-tokens"
            )
            self.thread.start()

    def _compare(self, encode: Callable[[], Sequence[int]], ids: array[int]) -> None:
        begin = time.monotonic()
        try:
            self.has_differed = array("i", encode()) != ids
        finally:
            end = time.monotonic()
            self._next = end + (end - begin) / CHECKED_SHARE
        if self.has_differed:
            logger.error(
                "sglang_hybrid: this tokenizer encodes the pieces of a text otherwise than the "
                "whole; from now on texts are encoded as a whole."
            )


def cut_tokens(tokenizer: Any) -> dict[str, int]:
    """The added tokens at which any text of a tokenizer of transformers may be cut, and their ids;
    none of a tokenizer that is not known to encode each piece alone.
    """
    backend = _backend(tokenizer)
    if backend is None:
        return {}
    parts = json.loads(backend.to_str())
    for part, known in KINDS.items():
        if not _kinds(parts[part]) <= known:
            return {}
    added = parts["added_tokens"]
    # A token that is a word only sees the characters around it.
    if parts["model"].get("dropout") or any(token["single_word"] for token in added):
        return {}
    raw = [token["content"] for token in added if token["content"] and not token["normalized"]]
    alike = "\0".join(raw)
    ends = {content[start:] for content in raw for start in range(1, len(content))}
    return {
        token["content"]: token["id"]
        for token in added
        if token["content"] in raw
        and not token["lstrip"]  # the blanks before it are of the piece before
        and not token["normalized"]
        and not any(map(str.isspace, token["content"]))  # which another token may strip
        and "\0" not in token["content"]
        and _stands_alone(token["content"], alike, ends)
    }


def _stands_alone(content: str, alike: str, ends: set[str]) -> bool:
    """True if an added token is found wherever its text is: no other one overlaps with it.

    alike: all added tokens that are looked for together; ends: what they end with.
    """
    starts = (content[:end] for end in range(1, len(content) + 1))
    return alike.count(content) == 1 and ends.isdisjoint(starts)


def _backend(tokenizer: Any) -> Any:
    """The Rust tokenizer behind one of transformers whose methods only call it, else None."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    inherited = [
        (kind.encode, PreTrainedTokenizerBase.encode),
        (kind.__call__, PreTrainedTokenizerBase.__call__),
        (kind._encode_plus, PreTrainedTokenizerFast._encode_plus),
    ]
    if any(own is not stock for own, stock in inherited):
        return None
    if {"encode", "_encode_plus"} & vars(tokenizer).keys() or tokenizer.split_special_tokens:
        return None
    backend = tokenizer.backend_tokenizer
    return backend if isinstance(backend, Tokenizer) else None


def _kinds(part: Mapping[str, Any] | None) -> set[str]:
    """The types of a part of a tokenizer, and of those in it."""
    if part is None:
        return set()
    inner = [part.get(name, ()) for name in ("normalizers", "pretokenizers", "processors")]
    return {part["type"]}.union(*(_kinds(one) for several in inner for one in several))


def _around(tokenizer: Any, cuts: Mapping[str, int]) -> tuple[Sequence[int], Sequence[int]] | None:
    """The tokens that a tokenizer puts before and behind a text; None where that is not known."""
    for content, token in cuts.items():
        ids: list[int] = tokenizer.encode(content)
        if tokenizer.encode(content, add_special_tokens=False) != [token]:
            return None
        if ids.count(token) == 1:
            at = ids.index(token)
            return ids[:at], ids[at + 1 :]
    return None


def _any_of(words: Sequence[str]) -> str:
    """A regular expression for words that are sorted and of which none begins with another.

    What several begin with stands there once, so that no character is compared with each of them.
    """
    by_first = [(first, list(group)) for first, group in groupby(words, lambda word: word[0])]
    branches = [
        re.escape(group[0] if len(group) == 1 else first)
        + (_any_of([word[1:] for word in group]) if len(group) > 1 else "")
        for first, group in by_first
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _key(piece: str, owner: bytes) -> bytes:
    encoded = piece.encode("utf-8", "surrogatepass")
    return blake2b(encoded, digest_size=16, key=owner).digest()
