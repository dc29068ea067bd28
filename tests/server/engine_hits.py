"""An application with an `sglang.Engine`: python -m tests.server.engine_hits MODEL

Sends `REQUESTS` one after the other and prints the tokens that each one hit, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.serving.requests import kv_hints
from tests.server.client import random_prompt

DECLARED, BRANCH = 301, 423
_FIRST = random_prompt(500, seed=1)
_PROMPTS = [_FIRST] + [
    _FIRST[:shared] + random_prompt(50, seed=2 + number)
    for number, shared in enumerate((DECLARED, BRANCH, BRANCH))
]
REQUESTS: list[dict[str, Any]] = [
    {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    for prompt in _PROMPTS
]
REQUESTS[0]["kv_hints"] = kv_hints.write(PromptHints((DECLARED,)))
HITS = [0, DECLARED, DECLARED, BRANCH]
"""The second request goes on behind the declared position. The third one branches off further on,
where its own prefill leaves a state for the fourth.
"""


def hit(answer: dict[str, Any]) -> int:
    """Tokens that were not computed, as SGLang and our report say alike."""
    found: int = answer["meta_info"]["cached_tokens"]
    assert answer["meta_info"]["hybrid_cache"]["hit_tokens"] == found
    return found


def main(model: str) -> None:
    import sglang

    engine = sglang.Engine(model_path=model, radix_cache_backend="hybrid", device="cpu")
    try:
        print(json.dumps([hit(engine.generate(**request)) for request in REQUESTS]))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
