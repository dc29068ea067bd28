"""`--pp-size 2`: SGLang tracks the states on its grid, and that is said."""

from __future__ import annotations

import pytest
import requests

from tests.server.client import Serve, ask, cached, hybrid_cache, random_prompt


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hit_that_ends_at_the_grid_says_so(serve: Serve) -> None:
    with serve("--pp-size", "2") as server:
        prompt = random_prompt(700, seed=1)
        reports = [ask(server.url, prompt, 4)["meta_info"]["hybrid_cache"] for _ in range(2)]
        assert [report["hit_tokens"] for report in reports] == [0, 640]
        assert [report["missed"] for report in reports] == ["not_stored", "grid"]
        asked = {"input_ids": prompt}
        told = requests.post(server.url + "/hybrid_cache/explain", json=asked, timeout=60).json()
        assert (told["hit"], told["unstored"]["why"]) == (640, "grid")
        assert told["cache"]["unplanned"] == "pipeline parallelism"
        (line,) = [
            line for line in hybrid_cache(server.url)["advice"] if "pipeline parallelism" in line
        ]
        assert "on a grid of 64 tokens" in line
        assert cached(ask(server.url, random_prompt(700, seed=2), 4)) == 0
