"""Hits under the flags of production servers, to the token: docs/support.md.

Each row that passes is written anew. What a CPU cannot run is said from the flags alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hybrid.checkpoints.support import why_unplanned
from tests.server.client import Serve, ask, cached, cold, random_prompt, said, same
from tests.server.divided import CAN_TRANSFER, WITHOUT_TRANSFERS, Divide, Divided
from tests.server.test_checkpoints import CONFIGURATIONS
from tests.tables import table

PAGE = Path(__file__).parents[2] / "docs" / "support.md"

DOCUMENT = random_prompt(700, seed=1)
PROMPTS = [
    DOCUMENT,
    DOCUMENT + random_prompt(5, seed=2),
    *(DOCUMENT[:500] + random_prompt(200, seed=seed) for seed in (3, 4)),
]
"""Asked behind a first DOCUMENT: it again, it and five tokens more, two siblings of its first 500,
of which the first leaves the state that the second hits.
"""

EXACT = {0: 699, 1: 699, 3: 500}
"""Hits of these prompts. The other one may hit the end of a chunk."""


@dataclass(frozen=True)
class Feature:
    """A row of the page.

    flags: of the server. page: tokens in a page of KV. planned: whether hits are exact, to pages.
    divided: prefill and decode servers. whole: the state of a whole prompt is hit.
    """

    name: str
    flags: tuple[str, ...] = ()
    page: int = 1
    planned: bool = True
    divided: bool = False
    whole: bool = False

    @property
    def row(self) -> list[str]:
        """The first cells of its row."""
        return [self.name, f"`{' '.join(self.flags)}`" if self.flags else ""]


DIVIDED = ("--disaggregation-mode", "prefill")

FEATURES = [
    Feature("defaults"),
    Feature("chunked prefill", CONFIGURATIONS["chunks of 128"]),
    Feature("chunks mixed with decodes", CONFIGURATIONS["mixed chunks of 128"]),
    Feature("pages of 16 tokens", CONFIGURATIONS["page 16"], page=16),
    Feature("extra buffers, lazily", CONFIGURATIONS["lazy"]),
    Feature("no overlap", CONFIGURATIONS["no overlap"]),
    Feature("tensor parallelism", CONFIGURATIONS["two ranks"]),
    Feature("pipeline parallelism", CONFIGURATIONS["two stages"]),
    Feature("data parallelism", ("--dp-size", "2")),
    Feature("requests at every fourth step", CONFIGURATIONS["requests at every fourth step"]),
    Feature("several tokenizers", CONFIGURATIONS["two tokenizers"]),
    Feature("no tokenizer", CONFIGURATIONS["without a tokenizer"]),
    Feature("one memory", ("--enable-unified-memory",)),
    Feature("host memory", ("--enable-hierarchical-cache", "--hicache-ratio", "2")),
    Feature("priorities", ("--enable-priority-scheduling",)),
    Feature("a window over the queue", ("--hybrid-schedule", "window")),
    Feature("drafts from n-grams", ("--speculative-algorithm", "NGRAM")),
    Feature("disaggregated prefill", DIVIDED, divided=True, whole=True),
    Feature("streaming sessions", ("--enable-streaming-session",)),
    Feature("full hits", ("--hybrid-full-hit", "on"), whole=True),
    Feature("SGLang's admission", ("--hybrid-admission", "all"), planned=False),
]

NOT_HERE = {
    "speculative decoding by DFLASH": {"speculative_algorithm": "DFLASH"},
    "ReplaySSM": {"enable_linear_replayssm": True},
    "two-batch overlap": {"enable_two_batch_overlap": True},
    "deterministic inference": {"enable_deterministic_inference": True},
    "decode context parallelism": {"dcp_size": 2},
}
"""Settings that the CPU platform does not serve: SGLang's arguments, where they differ from its
defaults.
"""

COLUMNS = ("feature", "flags", "exact states", "cached tokens", "with SGLang's own cache")


@contextmanager
def rows() -> Iterator[dict[str, list[str]]]:
    """The table of the page."""
    order = [*(feature.name for feature in FEATURES), *NOT_HERE]
    with table(PAGE, "support", COLUMNS, order) as found:
        found.update({name: [name, "", "no", "", ""] for name in NOT_HERE})
        yield found


def hits(url: str) -> list[int]:
    """Hits of the prompts on a cache that knows the document; answers are those of cold ones."""
    ask(url, DOCUMENT, 4)
    records = [ask(url, prompt, 4) for prompt in PROMPTS]
    for record, prompt in zip(records, PROMPTS, strict=True):
        assert same(record, cold(url, prompt, 4))
    return [cached(record) for record in records]


@pytest.fixture(scope="module")
def hits_of_sglangs(serve: Serve, divide: Divide) -> Callable[[Feature], list[int]]:
    """A function that says what SGLang's own cache hits under a feature's flags, but for ours: each
    set of flags takes one server.
    """

    @cache
    def under(flags: tuple[str, ...], divided: bool) -> list[int]:
        plain = {"module": "sglang.launch_server"}
        with divide(**plain) if divided else serve(*flags, **plain) as server:
            return hits(server.url)

    def found(feature: Feature) -> list[int]:
        ours_alone = any(flag.startswith("--hybrid") for flag in feature.flags)
        return under(() if ours_alone or feature.divided else feature.flags, feature.divided)

    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_hits_under(
    feature: Feature,
    serve: Serve,
    divide: Divide,
    hits_of_sglangs: Callable[[Feature], list[int]],
) -> None:
    if feature.divided and not CAN_TRANSFER:
        pytest.skip(WITHOUT_TRANSFERS)
    with divide() if feature.divided else serve(*feature.flags) as server:
        ours = hits(server.url)
        for one in server.servers if isinstance(server, Divided) else [server]:
            assert said(one)
    exact = {which: position - position % feature.page for which, position in EXACT.items()}
    exact[1] += feature.whole
    assert ({which: ours[which] for which in EXACT} == exact) is feature.planned
    theirs = hits_of_sglangs(feature)
    if feature.planned:
        assert sum(ours) > sum(theirs), (ours, theirs)
    told = ["yes" if feature.planned else "no", *(", ".join(map(str, of)) for of in (ours, theirs))]
    with rows() as found:
        found[feature.name] = [*feature.row, *told]


def test_what_is_not_planned_is_on_the_page() -> None:
    defaults = {"speculative_algorithm": None, "disaggregation_mode": "null"}
    defaults |= {"enable_linear_replayssm": False, "enable_linear_replayssm_spec": False}
    defaults |= {"enable_two_batch_overlap": False, "dcp_size": 1}
    defaults |= {"enable_deterministic_inference": False}
    assert why_unplanned(SimpleNamespace(**defaults)) is None
    page = PAGE.read_text()
    for name, changed in NOT_HERE.items():
        assert why_unplanned(SimpleNamespace(**{**defaults, **changed})) == name
        assert f"| {name} |  | no |" in page
    assert all(f"| {' | '.join(feature.row)} | " in page for feature in FEATURES)
