"""Both ways in which SGLang keeps states give transformers' tokens, from the cache too."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess
from tests.server.client import generate
from tests.server.expected import NEW_TOKENS, agree, expect

STRATEGIES = {
    "extra_buffer": ("--mamba-radix-cache-strategy", "extra_buffer"),
    "no_buffer": ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_conversation_goes_on_from_the_cache(
    strategy: str, model_directory: Callable[[str], Path]
) -> None:
    """The second prompt is the first one and half of its answer, so its answer is the rest."""
    model = model_directory(DEFAULT_ARCHITECTURE)
    expected = expect(model)
    half = NEW_TOKENS // 2
    with ServerProcess(["--model-path", str(model), *STRATEGIES[strategy]]) as server:
        first = generate(server.url, [right.prompt for right in expected], NEW_TOKENS)
        agree(first, expected)
        longer = [right.prompt + right.tokens[:half] for right in expected]
        second = generate(server.url, longer, half)
    assert [answer.tokens for answer in second] == [right.tokens[half:] for right in expected]
    assert second[-1].cached_tokens > 0
