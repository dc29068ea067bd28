"""Thirty-two clients of five tenants on small pools above a host and a disk: all stays in order."""

from __future__ import annotations

import asyncio
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from sglang_hybrid.serving.server_process import ServerProcess
from tests.server.client import Serve, ask, cached, hybrid_cache, logprobs, metric, said, same
from tests.server.crowd import Crowd
from tests.server.one_memory import ONE_MEMORY, SPILLS, TWO_POOLS, all_is_free
from tests.server.soak import Watched
from tests.server.test_soak import CHECKED, CODED, answers_stand, emptied

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = 30
SLOTS = 24
DISK_MB = 32
"""Half of what a busy machine writes in the time."""
ASKED_AGAIN = 40
"""Kept answers that are asked for again, cold and after the restart."""

LIMIT = 15
"""Seconds within which a server that is asked to end has ended."""

FLAGS = (
    *("--max-total-tokens", "4000", "--max-mamba-cache-size", str(SLOTS)),
    *("--max-running-requests", "8"),
    *("--chunked-prefill-size", "256", "--enable-metrics", "--enable-cache-report"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "file"),
    *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 64}'),
    *("--hybrid-disk-mb", str(DISK_MB)),
)
CONFIGURATIONS = {
    "two pools": TWO_POOLS,
    "one memory, window": (*ONE_MEMORY, "--hybrid-schedule", "window"),
}
WITHOUT_RETRACTIONS = {name: on for name, on in CHECKED.items() if "RETRACT" not in name}
COUNTS = ("requests", "prompt_tokens", "hit_tokens", "kv_only_tokens")


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_crowd(configuration: str, serve: Serve, seed: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    flags = (*FLAGS, *CONFIGURATIONS[configuration], "--hybrid-disk-folder", str(disk))
    started = partial(serve, *flags, module="tests.server.checked", environment=WITHOUT_RETRACTIONS)
    with started() as server:
        crowd = Crowd(server.url, seed)
        asyncio.run(crowd.stay(SECONDS))
        asked = random.Random(seed).sample(crowd.kept, ASKED_AGAIN)
        print(crowd.outcomes, len(crowd.kept))
        everything_happened(crowd)
        assert all(is_same(server.url, kept, extra_key=f"cold-{n}") for n, kept in enumerate(asked))
        (seen,) = emptied(server)
        numbers_agree(server.url, seen)
        assert all_is_free(seen, SLOTS)
        assert seen["tiers"]["disk"]["files_evicted"] > 0
        assert seen["tiers"]["loaded_bytes"] > 0 and seen["tiers"]["failed_loads"] == 0
        last = ends_in_the_middle(server, seed)
    assert sum(file.stat().st_size for file in disk.rglob("*.safetensors")) <= DISK_MB << 20
    with started() as server:
        assert hybrid_cache(server.url)["tiers"]["disk"]["found_at_start"] > 0
        assert all(is_same(server.url, kept) for kept in [*asked, *reversed(last)])
        assert hybrid_cache(server.url)["tiers"]["disk"]["read"] > 0
        assert said(server)


BARE = FLAGS[: FLAGS.index("--enable-hierarchical-cache")]
LEAST_HITS_ALONE = 1 / 20
"""Share of kept answers, without a tier below the small pools: 9 of 104 were seen."""

MORE_SLOTS = 160
"""More than the states of the prompts that the pool of KV holds."""
ALONE = {
    "coded, two pools": (*CODED, *TWO_POOLS),
    "coded, one memory": (*CODED, *ONE_MEMORY),
    "spilled states": SPILLS,
    "parked KV": (*SPILLS, "--max-mamba-cache-size", str(MORE_SLOTS)),
}


@pytest.mark.parametrize("kind", ALONE)
def test_a_crowd_on_a_device_alone(serve: Serve, kind: str, seed: int) -> None:
    """All that a crowd does, and the end in its middle, where entries are coded on the device, and
    where pools lend.
    """
    flags, environment = (*BARE, *ALONE[kind]), WITHOUT_RETRACTIONS
    with serve(*flags, module="tests.server.checked", environment=environment) as server:
        crowd = Crowd(server.url, seed)
        asyncio.run(crowd.stay(SECONDS))
        print(crowd.outcomes, len(crowd.kept))
        everything_happened(crowd, LEAST_HITS_ALONE)
        answers_stand(server.url, random.Random(seed).sample(crowd.kept, ASKED_AGAIN))
        (seen,) = emptied(server)
        assert [metric(server.url, f"{name}_total") for name in COUNTS] == [
            seen[name] for name in COUNTS
        ]
        assert all_is_free(seen, MORE_SLOTS if kind == "parked KV" else SLOTS)
        if kind == "spilled states":
            spilled = seen["spilled"]
            assert spilled["spilled"] and spilled["fetched"] and not spilled["now"]
        elif kind == "parked KV":
            parked = seen["parked"]
            assert parked["parked"] and parked["brought_back"] and not parked["now"]
        else:
            assert seen["coded"]["decoded"].keys() == {"kv", "states"}
            assert not any(seen["coded"]["now"].values())
        ends_in_the_middle(server, seed)


def everything_happened(crowd: Crowd, least_hits: float = 1 / 10) -> None:
    """The crowd did all that it can, and hit in at least this share of its kept answers."""
    did = {"streamed", "talked", "samples", "hung up", "refused", "explained"}
    assert did <= crowd.outcomes.keys()
    hits = sum(cached(kept.record) > 0 for kept in crowd.kept)
    assert hits > least_hits * len(crowd.kept)


def is_same(url: str, kept: Watched, **tenant: str) -> bool:
    """True if the server says the same again, to the same tenant if no other is given."""
    again = ask(url, kept.prompt, len(logprobs(kept.record)), **(tenant or kept.tenant))
    assert not tenant or cached(again) == 0
    return same(again, kept.record)


def numbers_agree(url: str, seen: dict) -> None:
    """/metrics counts what /server_info counts, and hits are of one tier or another."""
    assert [metric(url, f"{name}_total") for name in COUNTS] == [seen[name] for name in COUNTS]
    by_tier = seen["tiers"]["hit_tokens"]
    name = 'tier_hit_tokens_total{{.*tier="{}".*}}'
    assert {tier: metric(url, name.format(tier)) for tier in by_tier} == by_tier
    assert sum(by_tier.values()) == seen["hit_tokens"]


def ends_in_the_middle(server: ServerProcess, seed: int) -> list[Watched]:
    """SIGTERM while the crowd is there: each client gets its answer, or status 503. Returns the
    answers that were kept.
    """
    assert server.process is not None
    crowd = Crowd(server.url, seed + 1)

    async def use() -> None:
        stay = asyncio.create_task(crowd.stay(60))
        await asyncio.sleep(3)
        assert server.process is not None
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(BaseExceptionGroup):
            await stay

    asyncio.run(use())
    assert crowd.outcomes["answered"]
    assert server.process.wait(LIMIT) == 0
    assert said(server)
    return crowd.kept
