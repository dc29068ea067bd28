"""Images that are taken for the same: by what they are read with, and by whose they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform, which installs the patches)
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

from sglang_hybrid.serving.images import set_image_identity
from sglang_hybrid.serving.tenants import Tenant

GRID = torch.tensor([[1, 10, 16]])


def image(
    tenant: Tenant = None, kind: Modality = Modality.IMAGE, value: float = 1.0, **more: Any
) -> MultimodalDataItem:
    """An item of 40 tokens as a scheduler keeps it."""
    given = {"image_grid_thw": GRID} | more
    item = MultimodalDataItem(modality=kind, model_specific_data=given)
    item.feature = torch.full((160, 8), value)
    item.set_pad_value()
    set_image_identity(item, tenant)
    return item


def test_the_same_image_has_the_same_ids() -> None:
    one, other = image(), image(image_grid_thw=GRID.clone())
    assert one.padding_sequence(40) == other.padding_sequence(40)
    assert one.hash == other.hash


@pytest.mark.parametrize(
    "other",
    [
        {"value": 2.0},
        {"kind": Modality.VIDEO},
        {"image_grid_thw": torch.tensor([[1, 16, 10]])},
        {"image_grid_thw": np.array([[1, 16, 10]])},
        {"second_per_grid_ts": [0.5]},
        {"second_per_grid_ts": torch.tensor([0.5], dtype=torch.bfloat16)},
    ],
)
def test_another_image_shares_no_id(other: dict[str, Any]) -> None:
    one, two = image(), image(**other)
    assert not {*one.padding_values()} & {*two.padding_values()}
    assert one.hash != two.hash


def test_a_tenant_s_image_has_the_same_ids_and_another_place_with_the_encoder() -> None:
    """Trees are apart anyway; ids must say nothing of a tenant, since events show them."""
    hashes = set()
    for tenant in (None, ("a", None), (None, "a"), ("b", None)):
        item = image(tenant)
        assert item.padding_values() == image().padding_values()
        hashes.add(item.hash)
    assert len(hashes) == 4
