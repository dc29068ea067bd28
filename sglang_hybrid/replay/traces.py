"""Request traces: what arrived, when, and what was answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `tokens` [input_len + output_len] are its prompt and its answer; `arrival` is in
    seconds.
    """

    session: int
    turn: int
    arrival: float
    tokens: TokenArray
    input_len: int


def read_compact(path: Path, limit: int | None = None) -> list[Request]:
    """Read the compact format (JSON Lines, gzip or not).

    A line is {"session", "turn", "t", "base": [line, n] | null, "new", "out"}: the prompt is the
    first n tokens of (prompt + answer) of line `base`, followed by `new`; `out` is the answer.
    """
    requests: list[Request] = []
    for number, line in _lines(path, limit):
        try:
            base = line["base"]
            prompt = np.asarray(line["new"], dtype=np.int32)
            if base is not None:
                prompt = np.concatenate([requests[base[0]].tokens[: base[1]], prompt])
            tokens = np.concatenate([prompt, np.asarray(line["out"], dtype=np.int32)])
            request = Request(line["session"], line["turn"], float(line["t"]), tokens, len(prompt))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise ValueError(f"{path}:{number}: not a line of a compact trace ({error})") from error
        requests.append(request)
    return requests


def read_mooncake(path: Path, limit: int | None = None, max_input: int = 32_768) -> list[Request]:
    """Read Mooncake's format: `hash_ids` name blocks of 512 prompt tokens; answers get tokens of
    their own.

    Prompts longer than `max_input` are left out before `limit` counts.
    """
    requests: list[Request] = []
    fresh = -1
    for number, line in _lines(path, None):
        if limit is not None and len(requests) == limit:
            break
        try:
            length, answer = int(line["input_length"]), int(line["output_length"])
            blocks = np.asarray(line["hash_ids"], dtype=np.int64)
            arrival = line["timestamp"] / 1000
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}:{number}: not a line of a Mooncake trace ({error})"
            ) from error
        if length > max_input:
            continue
        prompt = (blocks[:, None] * 512 + np.arange(512)).ravel()[:length]
        tokens = np.concatenate([prompt, np.arange(fresh, fresh - answer, -1)]).astype(np.int32)
        fresh -= answer
        requests.append(Request(number, 0, arrival, tokens, len(prompt)))
    return requests


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 and parsed lines."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        for number, text in enumerate(file, start=1):
            if limit is not None and number > limit:
                return
            try:
                yield number, json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
