"""--enable-hierarchical-cache on the CPU platform: what does not fit on the device is copied to the
host, loaded again, and answered as cold; by SGLang's own cache and by ours.
"""

from __future__ import annotations

import pytest

from sglang_hybrid.serving.server_process import ServerFailed, ServerProcess
from tests.server.client import (
    STRICT,
    Serve,
    ask,
    cached,
    cold,
    hybrid_cache,
    random_prompt,
    same,
)
from tests.server.one_memory import TWO_POOLS

FLAGS = (
    *("--max-total-tokens", "2000", "--max-mamba-cache-size", "10", "--enable-cache-report"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "3"),
)
DIRECT = "page_first_direct"
LAYOUTS = ("page_first", DIRECT)
PROMPTS = [random_prompt(700, seed=seed) for seed in range(5)]
"""More than the device holds, and less than the host does."""


def loaded_answers_are_cold_ones(url: str) -> None:
    first = [ask(url, prompt, 4) for prompt in PROMPTS]
    assert not any(map(cached, first))
    for prompt, right in zip(PROMPTS, first, strict=True):
        answer = ask(url, prompt, 4)
        assert answer["meta_info"]["cached_tokens_details"]["host"] > 0
        assert same(answer, right)


SGLANGS = "sglang.launch_server"
"""Its own launcher, and so its own cache."""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "architecture", ["nemotron-h", "falcon-h1", "granite-hybrid", "qwen3-next", "kimi-linear"]
)
def test_sglangs_cache_loads_what_it_backed_up(
    serve: Serve, architecture: str, layout: str
) -> None:
    flags = (*FLAGS, "--hicache-mem-layout", layout)
    with serve(*flags, of=architecture, module=SGLANGS) as server:
        loaded_answers_are_cold_ones(server.url)


@pytest.mark.slow
def test_a_simulated_bandwidth_is_said_and_kept(serve: Serve) -> None:
    """Loading 640 tokens and a state moves some 3 MB."""
    link = "host=3MB/s+1ms"
    variables = {"SGLANG_HYBRID_SIMULATE_BANDWIDTH": link}
    with serve(*FLAGS, module=SGLANGS, environment=variables) as server:
        loaded_answers_are_cold_ones(server.url)
        assert f"simulated bandwidth ({link})" in server.log.read_text()


def every_mixture_is_answered_as_cold(server: ServerProcess) -> None:
    """Prompts that continue, repeat and branch off earlier ones, whose KV and states are on the
    device, on the host, on both, or of which only one is left.
    """
    shared = random_prompt(400, seed=100)
    asked = [prompt + random_prompt(30, seed=50 + i) for i, prompt in enumerate(PROMPTS)]
    asked += [shared + random_prompt(200, seed=60 + i) for i in range(4)]
    asked += [asked[i][: 300 + 97 * i] for i in range(4)] + [shared, *PROMPTS, *asked[:3]]
    warm = [ask(server.url, prompt, 4) for prompt in asked]
    tiers = hybrid_cache(server.url)["tiers"]
    assert tiers["loads"] > 0 and tiers["hit_tokens"]["host"] > 0
    for prompt, answer in zip(asked, warm, strict=True):
        assert same(answer, cold(server.url, prompt, 4))


IN_PAGES = ("--hicache-mem-layout", DIRECT)
MIXTURES = [
    ("nemotron-h", ()),
    ("nemotron-h", ("--hicache-write-policy", "write_back")),
    ("nemotron-h", ("--hicache-write-policy", "write_through_selective")),
    ("nemotron-h", (*TWO_POOLS, *IN_PAGES)),
    ("nemotron-h", ("--chunked-prefill-size", "128")),
    ("nemotron-h", ("--tp-size", "2")),
    ("nemotron-h", ("--pp-size", "2")),
    ("falcon-h1", ("--page-size", "16")),
    ("granite-hybrid", ()),
    ("qwen3-next", ("--page-size", "16", *IN_PAGES)),
    ("lfm2", ()),
    ("zaya", ()),
    ("jet-nemotron", ()),
    ("qwen4-exp", ()),
    ("ling-2.5", ()),
    ("glm-5-next", ()),
    ("kimi-linear", ()),
    ("kimi-linear", (*TWO_POOLS, "--page-size", "16", *IN_PAGES)),
    ("kimi-linear", ("--tp-size", "2")),
    ("nemotron-h", (*TWO_POOLS, "--hicache-write-policy", "write_back")),
    ("nemotron-h", (*TWO_POOLS, "--chunked-prefill-size", "128")),
    ("falcon-h1", (*TWO_POOLS, "--page-size", "16")),
    ("qwen3-next", TWO_POOLS),
    ("kimi-linear", TWO_POOLS),
    ("kimi-linear", (*TWO_POOLS, "--tp-size", "2")),
    ("qwen3-next", ()),
]


@pytest.mark.slow
def test_a_model_without_kv_is_refused_in_one_sentence(serve: Serve) -> None:
    server = serve(*FLAGS, of="falcon-mamba")
    with pytest.raises(ServerFailed, match=r"cannot start: .* this model has no KV"), server:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flags"),
    MIXTURES,
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "default",
)
def test_our_cache_loads_what_is_worth_it(
    serve: Serve, architecture: str, flags: tuple[str, ...]
) -> None:
    with serve(*FLAGS, *flags, of=architecture, environment=STRICT) as server:
        every_mixture_is_answered_as_cold(server)
