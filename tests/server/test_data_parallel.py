"""`--dp-size 2`: two caches, and each prompt goes to the one that has its prefix."""

from __future__ import annotations

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from sglang_hybrid.serving import warm_up
from tests.server.client import Serve, ask, cached, hybrid_caches, random_prompt


def hits_of_ranks(url: str) -> list[int]:
    """Prompt tokens that each rank has not computed."""
    return [block["hit_tokens"] for block in hybrid_caches(url)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prompts_go_to_the_rank_that_has_their_prefix(serve: Serve) -> None:
    """Nine prompts again, and siblings of each; both ranks have traffic.
    Sent in turn, every second time the other rank would get a prompt.
    """
    with serve("--dp-size", "2", "--warmups", warm_up.NAME, "--enable-metrics") as server:
        url = server.url
        warm = 3 * (warm_up.TOKENS - 1)
        assert hits_of_ranks(url) == [warm] * 2
        prompts = [random_prompt(400, seed=kind) for kind in range(9)]
        assert [cached(ask(url, prompt, 2)) for prompt in prompts] == [0] * 9
        again = [cached(ask(url, prompt, 2)) for prompt in prompts]
        assert again == [399] * 9
        for seed in (20, 21, 22):
            siblings = [[*prompt[:300], *random_prompt(100, seed)] for prompt in prompts]
            found = [cached(ask(url, sibling, 2)) for sibling in siblings]
            assert found == [0 if seed == 20 else 300] * 9
        ranks = hits_of_ranks(url)
        assert len(ranks) == 2 and min(ranks) > warm
        foreign = ask(url, prompts[0], 2, cache_salt="another tenant's")
        assert cached(foreign) == 0
        metrics_add_up(url)


def metrics_add_up(url: str) -> None:
    """Each rank has its own series, with SGLang's labels. Ranks are in /server_info in the order in
    which they answer.
    """
    text = requests.get(url + "/metrics", timeout=30).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (waiting,) = {frozenset(sample.labels) for sample in families["sglang:num_queue_reqs"].samples}
    names = ("requests", "hit_tokens", "missed_requests", "missed_tokens", "policy")
    shown = [
        tuple(
            sum(
                sample.value
                for sample in families["sglang_hybrid:" + name].samples
                if sample.labels["dp_rank"] == str(rank) and waiting <= sample.labels.keys()
            )
            for name in names
        )
        for rank in range(2)
    ]
    told = [
        (
            *(block["requests"], block["hit_tokens"], block["requests"]),
            *(block["prompt_tokens"] - block["hit_tokens"], 1),
        )
        for block in hybrid_caches(url)
    ]
    assert sorted(shown) == sorted(told)
