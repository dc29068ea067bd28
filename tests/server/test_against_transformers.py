"""The real server says what transformers' own torch implementation says, cache on and off."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_hybrid.models import ARCHITECTURES
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import generate
from tests.server.expected import NEW_TOKENS, Expected, agree, conversations_agree, expect

CONFIGURATIONS = {
    "whole, without cache": ("--disable-radix-cache",),
    "chunks of 128, with cache": ("--chunked-prefill-size", "128"),
}


IN_EVERY_RUN = ("nemotron-h",)
"""The others take a minute each."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow)
        for name in sorted(ARCHITECTURES)
    ],
)
def served(
    request: pytest.FixtureRequest, model_directory: Callable[[str], Path]
) -> Iterator[tuple[dict[str, ServerProcess], list[Expected]]]:
    """A server for each configuration, and what they should answer.

    They start side by side while transformers works: a start is mostly imports on one core.
    """
    model = model_directory(request.param)
    servers = {
        name: ServerProcess(["--model-path", str(model), *flags])
        for name, flags in CONFIGURATIONS.items()
    }
    with ExitStack() as stack:
        for server in servers.values():
            server.start()
            stack.callback(server.stop)
        expected = expect(model)
        for server in servers.values():
            server.wait_until_healthy()
        yield servers, expected


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_tokens_and_logprobs_agree(
    served: tuple[dict[str, ServerProcess], list[Expected]], configuration: str
) -> None:
    servers, expected = served
    url = servers[configuration].url
    prompts = [right.prompt for right in expected]
    agree(generate(url, prompts, NEW_TOKENS, logprobs=True), expected)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_second_visit_agrees_and_hits_only_with_the_cache(
    served: tuple[dict[str, ServerProcess], list[Expected]], configuration: str
) -> None:
    servers, expected = served
    url = servers[configuration].url
    prompts = [right.prompt for right in expected]
    agree(generate(url, prompts, NEW_TOKENS), expected)
    again = generate(url, prompts, NEW_TOKENS)
    agree(again, expected)
    if configuration == "whole, without cache":
        assert [answer.cached_tokens for answer in again] == [0] * len(prompts)
    else:
        assert again[-1].cached_tokens > 0


def test_a_conversation_goes_on_from_the_cache(
    served: tuple[dict[str, ServerProcess], list[Expected]],
) -> None:
    servers, expected = served
    conversations_agree(servers["chunks of 128, with cache"].url, expected)
