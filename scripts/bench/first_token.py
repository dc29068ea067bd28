"""Times to the first token of a chat of which the cache has all but the last messages."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import requests

from scripts.bench.report import BenchFailed, Table
from scripts.bench.servers import events
from sglang_hybrid.extensions.cpu.models import ensure_tiny_model, lexicon
from sglang_hybrid.serving.server_process import ServerProcess

NEW = 800
"""Tokens of a chat's last messages, about: a word is a token."""

ANSWERED = 4
"""Tokens of an answer."""


class Chat:
    """A chat of text over /v1/chat/completions, which ends with another message each time."""

    def __init__(self, url: str, seed: int, tokens: int) -> None:
        self._url = url
        self._connection = requests.Session()
        self._random = random.Random(seed)
        self._words = list(lexicon.common_words())
        self._messages = [self._message("system", NEW)]
        for number in range(tokens // NEW - 1):
            self._messages.append(self._message(("user", "assistant")[number % 2], NEW - 5))

    def ask(self) -> tuple[float, int, int]:
        """Seconds to the first token, tokens that were hit, and tokens of the prompt."""
        messages = [*self._messages, self._message("user", NEW - 10)]
        body = json.dumps(
            {
                **{"model": "default", "messages": messages, "max_tokens": ANSWERED},
                **{"temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
            }
        ).encode()
        url, headers = self._url + "/v1/chat/completions", {"Content-Type": "application/json"}
        first, usage = 0.0, dict[str, Any]()
        begin = time.perf_counter()
        with self._connection.post(url, data=body, headers=headers, stream=True) as answer:
            answer.raise_for_status()
            for event in events(answer.iter_lines()):
                if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                    first = time.perf_counter() - begin
                usage = event.get("usage") or usage
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return first, cached, usage["prompt_tokens"]

    def _message(self, role: str, words: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(self._random.choices(self._words, k=words))}


def first_tokens(models: Sequence[Path], lengths: Sequence[int], rounds: int) -> None:
    """Print a table: a row for each model and number of cached tokens."""
    table = Table(*("model", "cached tokens", "new tokens", "first token, ms", "against the first"))
    for model in models or (ensure_tiny_model("mamba2"),):
        room = max(lengths) + 2 * NEW
        flags = [
            *("--model-path", str(model), "--context-length", str(room), "--enable-cache-report"),
            *("--max-total-tokens", str(sum(lengths) + len(lengths) * (rounds + 4) * NEW)),
        ]
        longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        with ServerProcess(flags, environment=longer) as server:
            chats = [Chat(server.url, length, length) for length in lengths]
            for _ in range(3):  # the third one hits what the first two share
                for chat in chats:
                    chat.ask()
            asked = [[chat.ask() for chat in chats] for _ in range(rounds)]
        base = median(first for first, *_ in (each[0] for each in asked))
        for length, found in zip(lengths, zip(*asked, strict=True), strict=True):
            if any(prompt - cached > 2 * NEW for _, cached, prompt in found):
                raise BenchFailed(
                    f"a chat behind {length:,} tokens was not hit to its last message"
                )
            seconds = median(first for first, *_ in found)
            new = median(prompt - cached for _, cached, prompt in found)
            cached = median(cached for _, cached, _ in found)
            table.row(
                *(_kind(model), f"{cached:,.0f}", f"{new:,.0f}", f"{1e3 * seconds:.0f}"),
                f"{seconds / base:.2f}",
            )


def _kind(model: Path) -> str:
    """The model's type, by its config."""
    return str(json.loads((model / "config.json").read_text())["model_type"])
