"""SGLang's other way to keep states, without a second buffer, gives transformers' answers too.

`extra_buffer` is the default; test_against_transformers.py checks it for every architecture.
"""

from collections.abc import Callable
from pathlib import Path

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess
from tests.server.client import generate
from tests.server.expected import NEW_TOKENS, agree, conversations_agree, expect

NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")


def test_no_buffer_agrees_with_transformers(model_directory: Callable[[str], Path]) -> None:
    model = model_directory(DEFAULT_ARCHITECTURE)
    expected = expect(model)
    with ServerProcess(["--model-path", str(model), *NO_BUFFER]) as server:
        prompts = [right.prompt for right in expected]
        agree(generate(server.url, prompts, NEW_TOKENS, logprobs=True), expected)
        conversations_agree(server.url, expected)
