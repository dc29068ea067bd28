"""The table of docs/security.md, row by row: two tenants, and everything that keeps something.

Most rows share one server with all of it switched on. What tenant `a` sends carries words, a key
and a salt that stand nowhere else; they may be in nothing that `b` is told, and key and salt in no
file.
A row that needs another model, or files that are written after minutes, names tests that show it.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.core.records.pin import PinRequest
from sglang_hybrid.core.returns.hints import PromptHints
from sglang_hybrid.extensions.cpu.models.tiny import DEFAULT_ARCHITECTURE
from sglang_hybrid.serving.requests import kv_hints
from sglang_hybrid.serving.server_process import ServerProcess
from tests import test_keys
from tests.cache import test_learning, test_learnt_split, test_state_events
from tests.cache import test_tenants as on_the_tree
from tests.core import test_prefix_ranks
from tests.extensions.disk import test_shared_store, test_uses_file
from tests.extensions.lab.simulation import test_parity
from tests.extensions.lab.simulation.tuner import test_trace_file
from tests.extensions.router import test_index, test_picker
from tests.server import test_adapters, test_images, test_modular, test_page, test_prompt_route
from tests.server import test_tenant_routes as routes
from tests.server.client import hybrid_cache, random_prompt
from tests.serving import test_images as test_serving_images
from tests.serving.requests import test_encoded_pieces

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
SALT, KEY = "salt-of-a-91bc", "key-of-a-7f3a"
A = {"cache_salt": SALT, "extra_key": KEY}
B = {"cache_salt": "b", "extra_key": KEY + "b"}
SECRET = "Seventeen grey herons"
"""The texts of `a`."""

SCHEMA = f'<schema name="heron-schema">{{}}<module name="m">{SECRET} wait. {{}}</module></schema>'
TIERS = ("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-storage-backend", "file")


@dataclass
class World:
    """A server, what it prints, and the files that it writes."""

    url: str
    log: Path
    disk: Path
    recording: Path

    def generate(self, **fields: Any) -> dict[str, Any]:
        body = {"sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
        answer = requests.post(self.url + "/generate", json={**body, **fields}, timeout=120)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def report(self, **fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.generate(**fields)["meta_info"]["hybrid_cache"]
        return found

    def explain(self, **fields: Any) -> requests.Response:
        return requests.post(self.url + "/hybrid_cache/explain", json=fields, timeout=60)

    def schema(self, method: str, path: str = "", **query: str) -> requests.Response:
        url = f"{self.url}/v1/prompt_schemas{path}"
        return requests.request(method, url, params=query, timeout=60)


def answers(world: World) -> None:
    prompt = random_prompt(300, seed=1)
    world.generate(input_ids=prompt, **A)
    assert world.report(input_ids=prompt, **A)["hit_tokens"] == 299
    found = world.report(input_ids=prompt, **B)
    assert (found["hit_tokens"], found["kv_only_tokens"]) == (0, 0)


def checkpoints(world: World) -> None:
    """`a` branches at 200 tokens; what a prompt of `b` leaves is as if nobody had."""
    stem = random_prompt(200, seed=2)
    for seed in (3, 4, 5):
        world.generate(input_ids=stem + random_prompt(100, seed), **A)
    prompt = stem + random_prompt(100, seed=6)
    found = [
        [each["position"] for each in world.report(input_ids=prompt, **whose)["checkpoints"]]
        for whose in (B, {"cache_salt": "came first"}, A)
    ]
    assert found[0] == found[1] != found[2]


def waiting(world: World) -> None:
    before = hybrid_cache(world.url)["waited_for_prefix"]
    prompt = random_prompt(1_500, seed=7)
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(world.report, input_ids=prompt, **whose) for whose in (A, B)]
    assert [one.result()["hit_tokens"] for one in sent] == [0, 0]
    assert hybrid_cache(world.url)["waited_for_prefix"] == before


def explanations(world: World) -> None:
    prompt = random_prompt(300, seed=8)
    world.generate(input_ids=prompt, rid="of a", **A)
    told = world.explain(input_ids=prompt, **B).json()
    assert (told["hit"], told["kv"], told["deeper"]) == (0, 0, [])
    assert world.explain(request_id="of a", **A).status_code == 200
    assert world.explain(request_id="of a", **B).status_code == 404


def schemas(world: World) -> None:
    register(world, A)
    assert [one["name"] for one in world.schema("GET", **A).json()] == ["heron-schema"]
    assert world.schema("GET", **B).json() == []
    foreign = [("GET", ""), ("DELETE", ""), ("POST", "/lint"), ("POST", "/prewarm")]
    for method, path in foreign:
        body = {"budget_mb": 1, **B} if path == "/prewarm" else None
        url = f"{world.url}/v1/prompt_schemas/heron-schema{path}"
        told = requests.request(method, url, params=B, json=body, timeout=60)
        assert told.status_code == 404, (method, path)
        assert SECRET not in told.text
    asked = {"pml": '<prompt schema="heron-schema"><m/></prompt>', **B}
    told = requests.post(world.url + "/generate", json=asked, timeout=60)
    assert told.status_code == 400 and SECRET not in told.text


def residency(world: World) -> None:
    """The same schema, declared by both; `a`'s prefixes are stored."""
    register(world, A)
    world.generate(pml='<prompt schema="heron-schema"><m/></prompt>', **A)
    register(world, B)
    mine, theirs = (
        world.schema("GET", "/heron-schema", **whose).json()["residency"] for whose in (A, B)
    )
    assert mine != theirs
    fresh = {"cache_salt": "declares the same"}
    register(world, fresh)
    assert world.schema("GET", "/heron-schema", **fresh).json()["residency"] == theirs
    for whose in (B, fresh):
        assert world.schema("DELETE", "/heron-schema", **whose).status_code == 200


def pins(world: World) -> None:
    prompt = random_prompt(300, seed=9)
    hint = kv_hints.write(PromptHints(pins=(PinRequest(200, 3_000),)))
    told = world.report(input_ids=prompt, kv_hints=hint, **A)
    assert told["declared"]["pinned"] == [200]
    assert "declared" not in world.report(input_ids=prompt, **B)
    asked = world.explain(input_ids=prompt[:250], **B).json()["checkpoint"]
    assert asked is None or asked.get("pinned_until") is None


def diagnostics(world: World) -> None:
    for stream in (False, True):
        routes.test_a_message_is_compared_with_its_tenants_own(world.url, stream)


def sessions(world: World) -> None:
    routes.test_a_session_belongs_to_the_tenant_that_opened_it(world.url)


def stored_responses(world: World) -> None:
    routes.test_a_stored_response_is_its_tenants(world.url)


def totals(world: World) -> None:
    for path in ("/metrics", "/server_info", "/v1/loads", "/v1/models"):
        told = requests.get(world.url + path, timeout=60).text
        assert not any(word in told for word in (SECRET, SALT, KEY, "heron-schema")), path
    printed = world.log.read_text(errors="replace")
    assert not any(word in printed for word in (SECRET, SALT, KEY))


def recording(world: World) -> None:
    text = world.recording.read_text()
    assert text.count("\n") > 5  # it has the requests
    assert stat.S_IMODE(world.recording.stat().st_mode) == 0o600
    assert SALT not in text and KEY not in text


def below(world: World, suffix: str) -> list[Path]:
    found = [path for path in world.disk.rglob("*" + suffix) if path.is_file()]
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name
    return found


def disk(world: World) -> None:
    """After all else: names, and the bytes of all files."""
    assert below(world, ".safetensors")
    for path in world.disk.rglob("*"):
        assert not any(word in path.name for word in (SALT, KEY, "heron"))
        if path.is_file():
            content = path.read_bytes()
            assert SALT.encode() not in content and KEY.encode() not in content, path.name


def saved_schemas(world: World) -> None:
    files = [path for path in world.disk.rglob("*") if path.is_file()]
    kept = [path for path in files if SECRET.encode() in path.read_bytes()]
    assert len(kept) == 1  # in plain, as the page says, in the folder of one tenant
    assert stat.S_IMODE(kept[0].stat().st_mode) == 0o600


Walk = Callable[[World], None]
WALKS: dict[str, Walk] = {
    "`cached_tokens`": answers,
    "which positions get a checkpoint": checkpoints,
    "whom a request waits for": waiting,
    "`POST /hybrid_cache/explain`": explanations,
    "`/v1/prompt_schemas`": schemas,
    "`residency` of a schema": residency,
    "pins": pins,
    "`diagnostics`": diagnostics,
    "sessions": sessions,
    "stored responses": stored_responses,
    "metrics": totals,
    "`--hybrid-record` files": recording,
}
AFTER_THE_END: dict[str, Walk] = {
    "the disk tier": disk,
    "schemas on disk": saved_schemas,
}
ELSEWHERE: dict[str, list[Callable[..., None]]] = {
    "how often files were used": [test_uses_file.test_tenants_are_apart_and_are_not_named],
    "ids of requests": [routes.test_the_id_of_a_request_is_its_tenants_own],
    "the live page": [
        test_page.test_other_hosts_get_nothing,
        test_keys.test_no_route_below_hybrid_cache_answers_a_foreign_page,
        test_keys.test_a_route_is_open_to_the_keys_of_its_level,
    ],
    "a store that servers share": [
        test_shared_store.test_what_depends_on_something_else_has_another_name,
        test_shared_store.test_a_right_object_under_a_wrong_name_is_damaged,
    ],
    "KV events": [
        test_state_events.test_tenants_are_told_by_a_keyed_hash_and_share_no_block,
        test_keys.test_a_route_is_open_to_the_keys_of_its_level,
    ],
    "a router's picker": [
        test_picker.test_what_names_a_tenant_is_told_and_no_more,
        test_index.test_tenants_share_nothing,
    ],
    "`POST /hybrid_cache/prompt/ROUTE`": [
        test_prompt_route.test_what_is_told_is_what_is_sent,
        test_keys.test_a_route_is_open_to_the_keys_of_its_level,
    ],
    "which rank a prompt is sent to": [test_prefix_ranks.test_another_tenants_prefix_steers_nobody],
    "what was learnt": [test_learning.test_names_of_tenants_are_not_in_the_file],
    "the split that was learnt": [test_learnt_split.test_what_was_written_is_read],
    "modules computed apart": [test_modular.test_a_tenant_has_segments_of_its_own],
    "tokens of long texts": [
        test_encoded_pieces.test_tenants_share_nothing,
        test_encoded_pieces.test_whose_pieces,
    ],
    "images": [
        test_images.test_tenants_share_no_image_nor_what_the_encoder_made_of_it,
        test_serving_images.test_a_tenant_s_image_has_the_same_ids_and_another_place_with_the_encoder,
    ],
    "an adapter's part of the tree": [
        test_adapters.test_each_adapter_answers_as_merged_weights_and_hits_its_own_prefixes,
        on_the_tree.test_an_adapter_and_a_key_that_looks_like_one_are_two_tenants,
    ],
    "the worker processes of the tuner and of the comparison of splits": [
        test_trace_file.test_a_file_is_a_trace_that_the_replay_reads,
        test_parity.test_tenants_share_nothing_in_either,
    ],
}


def register(world: World, whose: dict[str, str]) -> None:
    body = {"pml": SCHEMA.format("", "They wait. " * 40), **whose}
    url = world.url + "/v1/prompt_schemas"
    requests.post(url, json=body, timeout=60).raise_for_status()


def rows() -> Iterator[str]:
    """First cells of the table of what is apart."""
    table = PAGE.read_text().split("## What a tenant cannot learn of another")[1].split("\n## ")[0]
    for line in table.splitlines():
        cell = re.match(r"\| (?P<where>.*?) \|", line)
        if cell is not None and cell["where"] != "where":
            yield cell["where"]


def test_every_row_of_the_page_is_walked() -> None:
    walked = [*WALKS, *AFTER_THE_END, *ELSEWHERE]
    for row in rows():
        assert [name for name in walked if row.startswith(name)], row
    for name in walked:
        assert [row for row in rows() if row.startswith(name)], name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_of_one_tenant_is_told_to_another(
    model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_directory(DEFAULT_ARCHITECTURE)
    files = {"disk": tmp_path / "disk", "recording": tmp_path / "recorded.jsonl"}
    flags = ["--model-path", str(model), *TIERS, "--hybrid-disk-folder", str(files["disk"])]
    flags += ["--hybrid-record", str(files["recording"]), "--enable-metrics"]
    flags += ["--enable-cache-report", "--enable-response-store"]
    with ServerProcess(flags, timeout=600) as server:
        world = World(server.url, server.log, **files)
        world.generate(text=f"{SECRET}, said {SECRET}.", **A)
        for walk in WALKS.values():
            walk(world)
    for walk in AFTER_THE_END.values():
        walk(world)
