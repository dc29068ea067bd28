"""Identities of images, videos and sounds in prompts.

SGLang takes two for the same if a hash of 64 bits of their values is. A page upright and the same
page across may have equal values, in patches, and differ in their grid alone. And what its encoders
made of one is kept for all clients, under a hash that a client may choose (`mm_hashes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from sglang_hybrid.serving.tenants import Tenant


def set_image_identity(item: Any, tenant: Tenant) -> None:
    """Make the token ids that stand for `item` (a MultimodalDataItem that has its hash) in the tree
    depend on all that says how its values are read, and the key of what the encoder makes of it
    on the tenant, too.
    """
    digest = sha256(item.hash.to_bytes(8, "big"))
    for part in _parts(item):
        digest.update(sha256(part).digest())
    item.set_identity(digest.digest())
    digest.update(repr(tenant).encode())
    item.hash = int.from_bytes(digest.digest()[:8], "big")


def _parts(item: Any) -> Iterator[bytes]:
    """The data of an item beside its values: a grid of patches, or seconds of frames."""
    yield item.modality.name.encode()
    for name, value in sorted(item.model_specific_data.items()):
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, np.ndarray):
            yield name.encode()
            yield value.tobytes()
        elif isinstance(value, list | tuple | int | float | str):
            yield f"{name}={value!r}".encode()
