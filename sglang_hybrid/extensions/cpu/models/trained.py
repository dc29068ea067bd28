"""The embedded model that answers: a Nemotron-H of tiny sizes whose weights are in this package.

``python -m scripts.train`` made them; docs/tried.md says from what and how well it answers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from sglang_hybrid.extensions.cpu.models.architectures.base import Model, Scale, tiny_only
from sglang_hybrid.extensions.cpu.models.architectures.nemotron_h import SIZES, config
from sglang_hybrid.extensions.cpu.models.tokenizer import VOCAB_SIZE
from sglang_hybrid.extensions.cpu.models.weights import Array, Weights
from sglang_hybrid.serving.flag_values import TRAINED

WEIGHTS = Path(__file__).parent / "trained.safetensors"

_TABLES = ("model.embeddings.weight", "lm_head.weight")


def trained(seed: int, scale: Scale) -> Model:
    """The model of this package's weights, whatever the seed."""
    tiny_only(TRAINED, scale)
    return read(WEIGHTS)


def read(file: Path) -> Model:
    """The model of a file that :func:`keep` wrote; tokens without rows get rows of zeros."""
    weights = Weights(seed=0)
    stored = load_file(file)
    tokens = stored.pop("tokens")
    for name, value in stored.items():
        if name in _TABLES:
            table = np.zeros((VOCAB_SIZE, value.shape[1]), dtype=np.float32)
            table[tokens] = value
            value = table
        weights.put(name, value)
    return Model(config(SIZES["tiny"]), weights)


def keep(tensors: dict[str, Array], tokens: list[int], file: Path) -> None:
    """Write the model's tensors as float16, with the ids of ``tokens``.

    The first rows of the embedding and of the head are those of ``tokens``; later ones are left
    out.
    """
    small = {
        name: (value[: len(tokens)] if name in _TABLES else value).astype(np.float16)
        for name, value in tensors.items()
    }
    save_file(small | {"tokens": np.array(tokens, dtype=np.int32)}, str(file))
