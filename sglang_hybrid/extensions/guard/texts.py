"""The most bytes of a text that can fit into a context: longer ones are not tokenized.

No token stands for more bytes than the longest of the vocabulary. That holds where a tokenizer
keeps every byte of its text, as byte-level BPE does. Where it may drop or join characters without a
bound (a normalizer that strips, a word that is unknown as a whole), each token counts for
`UNKNOWN_BYTES`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

UNKNOWN_BYTES = 1_024
"""Bytes of a token, where a tokenizer's own maximum is not known. A generous guess: a token of
a text has four bytes on average.
"""

RENDERED = 1 << 14
"""Characters from which a rendered chat is checked: shorter ones are tokenized in a moment."""

NORMALIZED = 4
"""Bytes that a Unicode normalization or a lower case may make one of: a letter of mathematics has
four, and becomes a plain letter.
"""

SHRINKING = ("NFC", "NFKC", "NFD", "NFKD", "Lowercase")
"""Normalizers that make characters smaller, by `NORMALIZED` at most."""


def check_text(manager: Any, text: Any) -> None:
    """Raises ValueError for a text, or one of a list of texts, that cannot fit into the context.

    manager: SGLang's TokenizerManager.
    """
    if manager.allow_auto_truncate:
        return
    if isinstance(text, list | tuple):
        for one in text:
            check_text(manager, one)
    elif isinstance(text, str):
        most = most_text_bytes(manager.tokenizer, manager.context_len)
        if 4 * len(text) > most and (size := len(text.encode(errors="surrogatepass"))) > most:
            raise ValueError(
                f"the text has {size:,} bytes, which are more than {manager.context_len:,} tokens, "
                f"the model's context length; no text of more than {most:,} bytes fits."
            )


def check_rendered(text: str) -> None:
    """Call `check_text` for a chat that was rendered, if this process is an HTTP server."""
    if len(text) >= RENDERED:
        from sglang.srt.entrypoints.http_server import get_global_state

        if (state := get_global_state()) is not None:
            check_text(state.tokenizer_manager, text)


@lru_cache(maxsize=4)
def most_text_bytes(tokenizer: Any, context: int) -> int:
    """Bytes (UTF-8) of the longest text whose tokens may fit into `context`.

    tokenizer: of transformers, or None.
    """
    return context * token_bytes(tokenizer)


def token_bytes(tokenizer: Any) -> int:
    """The most bytes of a text that one token may stand for."""
    backend: Any = getattr(tokenizer, "_tokenizer", None)
    own_code = not type(tokenizer).__module__.startswith("transformers.")
    if own_code or not getattr(tokenizer, "is_fast", False) or not hasattr(backend, "to_str"):
        return UNKNOWN_BYTES
    parts = json.loads(backend.to_str())
    factor = _shrinks(parts["normalizer"])
    if factor is None or not _keeps_all(parts):
        return UNKNOWN_BYTES
    longest = max(map(len, parts["model"]["vocab"]))  # a character of it stands for a byte
    added = max((len(token["content"].encode()) for token in parts["added_tokens"]), default=0)
    return factor * max(longest, added)


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """The factor by which a normalizer can make a text smaller; None where nothing is known."""
    if normalizer is None:
        return 1
    if normalizer["type"] == "Sequence":
        factor = 1
        for one in normalizer["normalizers"]:
            own = _shrinks(one)
            if own is None:
                return None
            factor *= own
        return factor
    return NORMALIZED if normalizer["type"] in SHRINKING else None


def _keeps_all(parts: dict[str, Any]) -> bool:
    """True if each byte of a text becomes a part of some token: byte-level BPE."""
    if parts["model"]["type"] != "BPE" or parts["truncation"] is not None:
        return False
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return False  # they take blanks around them
    splits = parts["pre_tokenizer"] or {}
    steps = splits.get("pretokenizers", [splits])
    keeps = all(
        step.get("type") in ("ByteLevel", "Digits")
        or (step.get("type") == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    alphabet = set(ByteLevel.alphabet()) if steps[-1].get("type") == "ByteLevel" else {""}
    return keeps and alphabet <= parts["model"]["vocab"].keys()
