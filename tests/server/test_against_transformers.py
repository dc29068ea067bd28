"""The real server says what transformers' own torch implementation says, cache on and off."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_hybrid.extensions.cpu.models import ARCHITECTURES
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import Serve, cached
from tests.server.expected import Expected, agree, conversations_agree, expect

CACHED = "chunks of 128, with cache"
PLAIN = "whole, without cache"
FLAGS = {CACHED: ("--chunked-prefill-size", "128"), PLAIN: ("--disable-radix-cache",)}

Ask = Callable[[str], str]
"""The address of the server with a configuration of that name."""


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def served(
    request: pytest.FixtureRequest, model_directory: Callable[[str], Path], serve: Serve
) -> Iterator[tuple[Ask, list[Expected]]]:
    """Servers, each started when it is asked for first, and what they should answer. The first one
    starts while transformers works: a start is mostly imports on one core.
    """
    servers: dict[str, ServerProcess] = {}
    with ExitStack() as stack:

        def start(name: str) -> ServerProcess:
            if name not in servers:
                servers[name] = serve(*FLAGS[name], of=request.param)
                servers[name].start()
                stack.callback(servers[name].stop)
            return servers[name]

        def url(name: str) -> str:
            server = start(name)
            server.wait_until_healthy()
            return server.url

        start(CACHED)
        yield url, expect(model_directory(request.param))


def test_the_default_server_agrees(url: str, model_directory: Callable[[str], Path]) -> None:
    """It agrees without hits, with hits, and when a conversation goes on."""
    expected = expect(model_directory(DEFAULT_ARCHITECTURE))
    agree(url, expected, prompts=True)
    agree(url, expected)
    assert cached(agree(url, expected)[-1]) > 0
    conversations_agree(url, expected)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", FLAGS)
def test_a_second_visit_agrees_and_hits_only_with_the_cache(
    served: tuple[Ask, list[Expected]], configuration: str
) -> None:
    url, expected = served
    agree(url(configuration), expected, prompts=True)
    again = agree(url(configuration), expected)
    assert any(map(cached, again)) == (configuration == CACHED)
    assert cached(again[-1]) > 0 or configuration == PLAIN


@pytest.mark.slow
def test_a_conversation_goes_on_from_the_cache(served: tuple[Ask, list[Expected]]) -> None:
    url, expected = served
    conversations_agree(url(CACHED), expected)
