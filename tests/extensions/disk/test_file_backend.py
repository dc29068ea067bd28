"""The calls of SGLang's controller to a storage backend, on pools without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from sglang_hybrid.core.own_files import identity_of
from sglang_hybrid.extensions.disk import file_backend
from sglang_hybrid.extensions.disk.file_backend import FileBackend
from sglang_hybrid.extensions.disk.served_model import Unidentified
from sglang_hybrid.plugin import bring_storage
from sglang_hybrid.storage import weights
from tests.extensions.disk.objects import warnings_of

PAGE = 4


class Pool:
    """A host pool of bfloat16 rows."""

    dtype, layout, storage_format_tag, pin_memory = torch.bfloat16, "page_first", None, False

    end_layer: int

    def __init__(self, page_size: int, width: int) -> None:
        self.page_size, self.width = page_size, width
        self.rows = torch.randn(64, width).bfloat16()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page_size * self.width, dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.rows[index : index + self.page_size].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.rows[index : index + self.page_size] = page.view(self.page_size, self.width)


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_backend, "served_model", lambda: {"weights": "some"})
    parallel = SimpleNamespace(dp_rank=None, dp_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setenv("SGLANG_HYBRID_DISK_MB", "1")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "disk"))


def config(**changes: Any) -> HiCacheStorageConfig:
    values: dict[str, Any] = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    values |= dict(attn_cp_rank=0, attn_cp_size=1, is_mla_model=False, model_name="m")
    values |= dict(enable_storage_metrics=False, is_page_first_layout=True)
    return HiCacheStorageConfig(**values | changes)


def backend(**changes: Any) -> FileBackend:
    """A backend, made as the factory and the controller make it."""
    bring_storage()
    made = StorageBackendFactory.create_backend("file", config(**changes), None)
    assert isinstance(made, FileBackend)
    kv, states = Pool(PAGE, 8), Pool(1, 100)
    made.register_mem_pool_host(kv)  # type: ignore[arg-type]
    made.register_mem_host_pool_v2(kv, PoolName.KV)  # type: ignore[arg-type]
    made.register_mem_host_pool_v2(states, PoolName.MAMBA)  # type: ignore[arg-type]
    made.on_host_pools_registered()
    store: Any = made.store
    if store is not None:
        store.ready.wait()
    return made


def keys(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def set_kv(made: FileBackend, *numbers: int) -> list[torch.Tensor]:
    pages = [made.mem_pool_host.get_data_page(number * PAGE) for number in numbers]
    assert made.batch_set(keys(*numbers), pages)
    return pages


def states(names: list[str], places: list[int]) -> PoolTransfer:
    tail = PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(PoolName.MAMBA, torch.tensor(places), keys=names, hit_policy=tail)


def test_ranks_share_the_budget() -> None:
    made = backend(tp_rank=1, tp_size=2)
    assert made.store is not None and made.store.budget == 1 << 19
    made.close()


@pytest.mark.parametrize(
    "change", ["tp_size", "pp_size", "attn_cp_size", "tp_rank", "pp_rank", "attn_cp_rank"]
)
def test_other_ranks_have_other_folders(change: str) -> None:
    one = backend()
    two = backend(**{change: 2 if change.endswith("size") else 1})
    assert one.store is not None and two.store is not None
    same = one.store.folder.identity == two.store.folder.identity
    assert same == change.endswith("rank") and one.store.folder.path != two.store.folder.path
    one.close()
    two.close()


@pytest.mark.parametrize(
    "name",
    [
        *("layout", "page_size", "dtype", "storage_format_tag", "layer_num", "head_num"),
        *("head_dim", "kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer"),
        *("temporal_dtype", "temporal_state_shape"),
        "conv_state_shapes",
    ],
)
def test_what_a_page_looks_like_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It counts also if a page has as many bytes."""
    before = file_backend._pool_facts(Pool(PAGE, 8), 2)
    pool = Pool(2 * PAGE, 4) if name == "page_size" else Pool(PAGE, 8)
    if name != "page_size":
        value = torch.float16 if name == "dtype" else "another"
        monkeypatch.setattr(pool, name, value, raising=False)
    after = file_backend._pool_facts(pool, 2)
    assert after["page_bytes"] == before["page_bytes"] and identity_of(after) != identity_of(before)


def test_without_stages_layers_do_not_count() -> None:
    """A model's only stage has all of them, however a pool counts."""
    one, other = Pool(PAGE, 8), Pool(PAGE, 8)
    one.end_layer, other.end_layer = 9, 1
    facts = [file_backend._pool_facts(pool, 1) for pool in (one, other)]
    assert facts[0] == facts[1]


def test_pages_come_back_as_they_were() -> None:
    made = backend()
    pages = set_kv(made, 1, 2, 3)
    made.close()
    made = backend()
    targets = [made.mem_pool_host.get_dummy_flat_data_page() for _ in range(4)]
    found = made.batch_get(keys(1, 2, 3, 4), targets)
    assert found[3] is None
    for right, page in zip(pages, found, strict=False):
        assert page is not None and torch.equal(page, right)
    assert made.batch_exists(keys(1, 2, 9, 3)) == 2 and made.exists(keys(3)[0])
    made.close()


def test_states_come_back_as_they_were() -> None:
    made = backend()
    pool = made.registered_pools[PoolName.MAMBA]
    assert made.batch_set_v2([states(keys(5), [7])]) == {PoolName.MAMBA: [True]}
    assert made.batch_get_v2([states(keys(5), [9])]) == {PoolName.MAMBA: [True]}
    assert torch.equal(pool.rows[9], pool.rows[7])
    before = pool.rows.clone()
    assert made.batch_get_v2([states(keys(6), [10])]) == {PoolName.MAMBA: [False]}
    assert torch.equal(pool.rows, before), "what is not there leaves the pool alone"
    made.close()


def test_a_prompt_is_restored_to_a_length_that_has_a_state() -> None:
    made = backend()
    set_kv(made, *range(1, 7))
    made.batch_set_v2([states(keys(2), [0])])
    made.batch_set_v2([states(keys(4), [0])])
    result = made.batch_exists_v2(keys(*range(1, 9)), [states(["__trailing__"], [0])])
    assert result.kv_hit_pages == 4 and result.restorable_prefix_pages == [2, 4]
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}
    assert made.batch_exists_v2(keys(*range(1, 9))).kv_hit_pages == 6
    assert made.batch_exists_v2(keys(9, 1)).kv_hit_pages == 0
    made.close()


def test_indices_that_do_not_fit_are_no_pages() -> None:
    made = backend()
    assert made.batch_set_v2([states(keys(5, 6), [7])]) == {PoolName.MAMBA: [False, False]}
    assert made.batch_get_v2([states(keys(5, 6), [7])]) == {PoolName.MAMBA: [False, False]}
    made.close()


def test_after_an_update_of_the_weights_nothing_is_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = backend()
    set_kv(made, 1)
    weights.on_change()
    weights.on_change()
    assert made.batch_exists(keys(1)) == 0
    set_kv(made, 2)
    assert made.batch_exists(keys(2)) == 0
    (line,) = warnings_of(caplog)
    assert "weights were updated" in line
    made.close()
    again = backend()
    assert again.batch_exists(keys(1)) == 0, "attached again, it would have the old weights' KV"
    again.close()
    monkeypatch.setattr(weights, "_changed", False)
    assert backend().batch_exists(keys(1)) == 1, "a restart has the weights of the start"


def test_a_folder_that_cannot_be_used_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk").write_text("not a folder")
    made = backend()
    set_kv(made, 1)
    made.batch_set_v2([states(keys(5), [7])])
    assert made.batch_exists(keys(1)) == 0
    assert made.batch_get(keys(1), [made.mem_pool_host.get_dummy_flat_data_page()]) == [None]
    (line,) = warnings_of(caplog)
    assert "the disk tier is off" in line
    made.clear()
    made.close()


def test_ranks_that_have_the_same_kv_keep_it_each() -> None:
    """SGLang lets the first rank alone write the KV of latent attention, which all ranks have."""
    facts = dict(is_mla_model=True, tp_size=2, tp_rank=1)
    made = backend(**facts)
    assert made.config.is_storage_writer and not config(**facts).is_storage_writer
    set_kv(made, 1)
    assert made.holds(PoolName.KV, keys(1)) == [True]
    made.close()


def test_what_is_not_kept_is_said(caplog: pytest.LogCaptureFixture) -> None:
    divided = dict(is_mla_model=True, tp_size=2, dcp_size=2, logical_page_size=2 * PAGE)
    assert backend(**divided).store is None
    assert "KV whose tokens ranks divide (--dcp-size) is not kept on disk" in caplog.text


def test_weights_without_identity_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unidentified() -> dict[str, Any]:
        raise Unidentified("weights of --load-format dummy have no identity")

    monkeypatch.setattr(file_backend, "served_model", unidentified)
    assert backend().store is None and "dummy" in caplog.text
