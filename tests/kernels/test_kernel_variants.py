"""A server runs one compiled variant of each kernel, and its start compiles that one.

The launches of many prefills are noted, with tensors laid out as SGLang's layers lay them out, and
Triton says which variant each of them needs. No GPU is asked for, and no kernel runs.
"""

import itertools
import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from sglang_hybrid.checkpoints.compile_kernels import warm_up
from sglang_hybrid.kernels import checkpoint_states_triton as kernels
from tests.kernels.launches import Launch, noted
from tests.kernels.model_layers import LAYERS, Layer, prefill

layers = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def prefills() -> list[tuple[list[int], list[int], list[tuple[int, int]]]]:
    """Batches of all kinds: lengths, prefixes and positions, among them prefills of one token, of
    whole chunks, of one chunk, and lists of one to five states that begin at any word."""
    chosen = random.Random(5)
    found = []
    for lengths in ([1], [2], [16], [64], [128], [256], [257], [1, 1], [15, 33], [64, 1, 128, 40]):
        every = [(s, at) for s, n in enumerate(lengths) for at in {1, n // 2 or 1, n}]
        for count, start in itertools.product(range(1, 6), (0, 5)):
            asked = sorted(set(chosen.choices(every, k=count)))
            found.append((lengths, [start] * len(lengths), asked))
    return found


def variants(launches: list[Launch]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for launch in launches:
        found[launch.name].add(launch.variant())
    return found


@layers
def test_all_prefills_of_a_server_launch_what_its_start_has_compiled(layer: Layer) -> None:
    windows, states = layer.pools()

    def start() -> None:
        for run in warm_up(windows, states, layer.dtype, layer.save, layer.chunk or 0).values():
            run()

    compiled = variants(noted(start))
    lived = variants(
        [launch for batch in prefills() for launch in noted(lambda b=batch: prefill(layer, *b))]
    )
    assert set(compiled) == {layer.kernel, "conv_window" if layer.channels else None} - {None}
    assert lived == compiled
    assert {name: len(keys) for name, keys in lived.items()} == dict.fromkeys(lived, 1)


def test_another_model_needs_variants_of_its_own() -> None:
    """The comparison above can fail."""
    ours = LAYERS["Nemotron-H-8B"]
    batch = ([64], [0], [(0, 5)])
    key = variants(noted(lambda: prefill(ours, *batch)))
    for other in (replace(ours, chunk=64), replace(ours, states=torch.bfloat16)):
        assert variants(noted(lambda o=other: prefill(o, *batch)))["ssd_state"] != key["ssd_state"]


@layers
def test_the_variant_that_runs_knows_that_its_rows_are_dense(layer: Layer) -> None:
    """Arguments that are excluded from specialisation cost no wide loads: pools and rows are known
    to be aligned, and their strides to be multiples of 16.
    """
    launches = noted(lambda: prefill(layer, [64], [0], [(0, 5)]))
    for launch in launches:
        aligned = launch.aligned()
        wanted = {
            "ssd_state": {"pool", "x", "B", "chunk_states", "stride_pool", "stride_x_token"},
            "delta_state": {"pool", "keys", "corrections", "stride_pool", "stride_keys_token"},
            "lightning_state": {"pool", "keys", "values", "stride_pool", "stride_values_token"},
            "conv_window": {"pool"},
        }[launch.name]
        assert wanted <= aligned, launch.name
        assert not aligned & {*kernels.VARYING, *kernels.ANYWHERE}
