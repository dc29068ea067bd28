"""Aborts, disconnects, retractions and flushes under SGLang's own checks leave every slot free."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import requests

from sglang_hybrid.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.server_process import ServerProcess
from tests.server.client import random_prompt

pytestmark = pytest.mark.slow

REQUESTS = 600
SLOTS = 40
FLAGS = (
    *("--max-mamba-cache-size", str(SLOTS), "--max-running-requests", "8"),
    *("--max-total-tokens", "4000", "--chunked-prefill-size", "256"),
    *("--schedule-policy", "lpm"),
)
CHECKED = {
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",  # SGLang's tree, and our mirror of it
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_TEST_RETRACT": "1",  # retract now and then, as if KV had run out
}


class Client:
    """Sends requests that share prefixes; some are aborted, some hang up."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.documents = [random_prompt(50 + 29 * i, seed=i) for i in range(20)]
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        places = asyncio.Semaphore(24)
        timeout = aiohttp.ClientTimeout(240)
        async with aiohttp.ClientSession(self.url, timeout=timeout) as session:
            await asyncio.gather(*(self._one(session, i, places) for i in range(REQUESTS)))

    async def _one(self, session: aiohttp.ClientSession, i: int, places: asyncio.Semaphore) -> None:
        async with places:
            document = self.random.choice(self.documents)
            suffix = random_prompt(self.random.randrange(60), seed=1000 + i)
            body = {
                "rid": f"soak-{i}",
                "input_ids": document[: self.random.randrange(20, 600)] + suffix,
                "sampling_params": {
                    "max_new_tokens": self.random.randrange(1, 120),
                    "temperature": 0,
                    "ignore_eos": True,
                },
            }
            fate = self.random.random()
            if fate > 0.9:
                await self._hang_up(session, body)
                return
            if fate < 0.15:
                asyncio.get_running_loop().call_later(
                    self.random.random() / 2, self._abort, session, str(body["rid"])
                )
            async with session.post("/generate", json=body) as response:
                assert response.status == 200
                record = await response.json()
                self.outcomes[record["meta_info"]["finish_reason"]["type"]] += 1

    async def _hang_up(self, session: aiohttp.ClientSession, body: dict) -> None:
        async with session.post("/generate", json={**body, "stream": True}) as response:
            await response.content.readline()
        self.outcomes["hung up"] += 1

    def _abort(self, session: aiohttp.ClientSession, rid: str) -> None:
        async def send() -> None:
            async with session.post("/abort_request", json={"rid": rid}) as response:
                await response.read()

        self._aborting = asyncio.ensure_future(send())


def test_every_slot_comes_back(model_directory: Callable[[str], Path]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    model = str(model_directory(DEFAULT_ARCHITECTURE))
    with ServerProcess(["--model-path", model, *FLAGS], environment=CHECKED) as server:
        client = Client(server.url, seed)
        asyncio.run(client.run())
        assert client.outcomes.total() == REQUESTS
        assert re.search(r"#retracted_reqs: [1-9]", server.log.read_text(errors="replace"))
        assert client.outcomes["abort"] and client.outcomes["hung up"]
        requests.post(
            server.url + "/flush_cache", params={"timeout": 30}, timeout=60
        ).raise_for_status()
        info = requests.get(server.url + "/server_info", timeout=30).json()
        cache = info["internal_states"][0]["hybrid_cache"]
        assert cache["evicted"]["state"] and cache["evicted"]["leaf"] and cache["evicted"]["kv"]
        assert cache["state_slots_free"] == SLOTS
        assert server.process is not None and server.process.poll() is None
