"""Two tensor-parallel ranks on the CPU say what one says, and that is what transformers says."""

from collections.abc import Callable
from pathlib import Path

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess
from tests.server.client import generate
from tests.server.expected import NEW_TOKENS, agree, expect


def test_two_ranks_agree_with_transformers(model_directory: Callable[[str], Path]) -> None:
    model = model_directory(DEFAULT_ARCHITECTURE)
    expected = expect(model)
    prompts = [right.prompt for right in expected]
    with ServerProcess(["--model-path", str(model), "--tp-size", "2"]) as server:
        agree(generate(server.url, prompts, NEW_TOKENS, logprobs=True), expected)
        agree(generate(server.url, prompts, NEW_TOKENS), expected)
        again = generate(server.url, prompts, NEW_TOKENS)
    agree(again, expected)
    assert again[-1].cached_tokens > 0
