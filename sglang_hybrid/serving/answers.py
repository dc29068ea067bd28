"""Answers of servers, which may be anything: read within a bound."""

from __future__ import annotations

from typing import Any, Final

import requests

from sglang_hybrid.core.named_files import decode_json

MOST_BYTES: Final = 1 << 27
"""The most bytes of an answer: the token ids of the longest prompt."""

PIECE: Final = 1 << 16


def read_answer(response: requests.Response) -> Any:
    """The JSON that a server answers to a request with `stream=True`; None for anything else, and
    for more than `MOST_BYTES`. Raises requests.RequestException if the connection breaks.
    """
    content = bytearray()
    with response:
        for piece in response.iter_content(PIECE):
            content += piece
            if len(content) > MOST_BYTES:
                return None
    try:
        return decode_json(content.decode())
    except ValueError:
        return None
