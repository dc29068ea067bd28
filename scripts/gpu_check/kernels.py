"""Our Triton kernels against their definitions in float64, and how often a server compiles them.

    python -m scripts.gpu_check.kernels            # on the GPU; in Triton's interpreter without one
    python -m scripts.gpu_check.kernels --small    # fewer, for compute-sanitizer

Needs torch and Triton, not SGLang. Tensors are made and compared on the CPU; every slot that is to
be written holds NaN before.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from itertools import accumulate

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from scripts.gpu_check.findings import tell  # noqa: E402
from scripts.gpu_check.layers import LAYERS, Shape, spread, state_launches  # noqa: E402
from sglang_hybrid.checkpoints.compile_kernels import warm_up  # noqa: E402
from sglang_hybrid.kernels import checkpoint_states as cs  # noqa: E402
from sglang_hybrid.kernels import host_rows, naive  # noqa: E402
from sglang_hybrid.kernels.divided_rows import DividedRows  # noqa: E402
from sglang_hybrid.storage.codecs.codecs import Codec  # noqa: E402
from sglang_hybrid.storage.codecs.in_place import InPlace  # noqa: E402

if not GPU:
    from scripts.gpu_check import interpreter  # noqa: F401

DEVICE = "cuda" if GPU else "cpu"
LENGTHS = [300, 1, 70]
ASKED = [(0, 1), (0, 128), (0, 201), (0, 300), (1, 1), (2, 64), (2, 69)]
"""(sequence, tokens of it): borders of chunks, ends, and between them."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DELTA_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 1e-2}


def bounds() -> list[int]:
    return list(accumulate(LENGTHS, initial=0))


def to_device(**tensors: Tensor | None) -> dict[str, Tensor | None]:
    return {name: None if t is None else t.to(DEVICE) for name, t in tensors.items()}


def targets() -> cs.Targets:
    """`ASKED`, the i-th to slot i."""
    at = bounds()
    sequences = torch.tensor([s for s, _ in ASKED])
    ends = torch.tensor([at[s] + tokens for s, tokens in ASKED])
    lists = (sequences, ends, torch.arange(len(ASKED)))
    return cs.Targets(*(values.to(DEVICE) for values in lists))


def empty_slots(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((len(ASKED), *shape), torch.nan, dtype=dtype).to(DEVICE)


def largest_error(pool: Tensor, states: list[Tensor]) -> float:
    """The largest error of states, relative to each one's largest element; infinite for NaN.

    states[s] [tokens + 1, ...] are those of sequence s by definition.
    """
    worst = 0.0
    for found, (s, tokens) in zip(pool.cpu().double(), ASKED, strict=True):
        error = (found - states[s][tokens]).abs().amax() / states[s][tokens].abs().amax()
        worst = max(worst, float("inf") if error.isnan() else error.item())
    return worst


def check_mamba2(
    width: int, size: int, dtype: torch.dtype, *, resumed: bool, heads: int = 2, chunk: int = 128
) -> float:
    """The largest error of ``save_ssd_states``."""
    at = bounds()
    x = torch.randn(at[-1], heads, width).to(dtype)
    B = torch.randn(at[-1], 1, size).to(dtype)
    A = -torch.rand(heads) * 15 - 1
    step = torch.nn.functional.softplus(torch.randn(at[-1], heads) - 3)
    initial = torch.randn(len(LENGTHS), heads, width, size) if resumed else None
    chunks = -(-at[-1] // chunk)
    dt = torch.full((heads, chunks * chunk), torch.nan)
    dt[:, : at[-1]] = step.T
    between = torch.full((chunks, heads, width, size), torch.nan)
    states = []
    for s, n in enumerate(LENGTHS):
        part = slice(at[s], at[s] + n)
        start = None if initial is None else initial[s]
        states.append(naive.ssd(x[part], step[part], A, B[part], B[part], initial_state=start)[1])
        for c in range(chunks):
            if at[s] < c * chunk <= at[s] + n:
                between[c] = states[s][c * chunk - at[s]].float()
    pool = empty_slots(heads, width, size)
    scan = to_device(
        x=x,
        dt=dt.view(heads, chunks, chunk),
        A=A,
        B=B,
        chunk_states=between,
        cu_seqlens=torch.tensor(at),
        initial_states=initial,
    )
    cs.save_ssd_states(pool, targets(), **scan)  # type: ignore[arg-type]
    return largest_error(pool, states)


def check_delta(
    size: int, dtype: torch.dtype, *, heads: int = 2, by_channel: bool = False
) -> float:
    """The largest error of ``save_delta_states``, or ``by_channel`` of ``save_kda_states``."""
    save: Callable[..., None] = cs.save_kda_states if by_channel else cs.save_delta_states
    unit = math.log(2) if by_channel else 1.0
    at = bounds()
    k = torch.nn.functional.normalize(torch.randn(at[-1], 1, size), dim=-1).to(dtype)
    v = torch.randn(at[-1], heads, size).to(dtype)
    g = -torch.rand(at[-1], heads, *[size] * by_channel)
    beta = torch.rand(at[-1], heads)
    decays, corrections = torch.empty_like(g), torch.empty_like(v)
    states, rows, offsets = [], [], [0]
    for s, n in enumerate(LENGTHS):
        part = slice(at[s], at[s] + n)
        start = torch.randn(heads, size, size)
        found = naive.gated_delta_rule(
            k[part], k[part], v[part], g[part], beta[part], initial_state=start
        )[1]
        states.append(found)
        rows += [found[c] for c in range(0, n, cs.DELTA_CHUNK)]
        offsets.append(len(rows))
        chunks = torch.split(g[part], cs.DELTA_CHUNK)
        decays[part] = torch.cat([each.cumsum(0) for each in chunks]) / unit
        added = found[1:] - found[:-1] * g[part].double().exp().view(n, heads, 1, -1)
        key = k[part].double() / k[part].double().square().sum(-1, keepdim=True)
        corrections[part] = torch.einsum("thvk,tgk->thv", added, key).to(dtype)
    pool = empty_slots(heads, size, size)
    scan = to_device(
        keys=k,
        corrections=corrections,
        decays=decays,
        chunk_states=torch.stack(rows).to(dtype),
        rows=torch.tensor(
            [offsets[s] + min(tokens, LENGTHS[s] - 1) // cs.DELTA_CHUNK for s, tokens in ASKED]
        ),
        cu_seqlens=torch.tensor(at),
    )
    save(pool, targets(), **scan)
    return largest_error(pool, states)


def check_windows(dtype: torch.dtype, *, channels: int = 300, taps: int = 4) -> float:
    """The largest error of ``save_windows``, which copies: it should be zero."""
    at, sequences = bounds(), len(LENGTHS)
    inputs = torch.randn(at[-1], channels).to(dtype)
    own = torch.randn(sequences, channels, taps - 1).to(dtype)
    resumed = torch.tensor([True, True, False])
    pool = torch.cat([empty_slots(channels, taps - 1, dtype=dtype), own.to(DEVICE)])
    rest = to_device(
        inputs=inputs,
        state_indices=torch.arange(len(ASKED), len(ASKED) + sequences, dtype=torch.int32),
        resumed=resumed,
        cu_seqlens=torch.tensor(at, dtype=torch.int32),
    )
    cs.save_windows(pool, targets(), **rest)  # type: ignore[arg-type]
    states = []
    for s, n in enumerate(LENGTHS):
        before = own[s].T if resumed[s] else torch.zeros(taps - 1, channels, dtype=dtype)
        past = torch.cat([before, inputs[at[s] : at[s] + n]]).double()
        states.append(past.unfold(0, taps - 1, 1))
    if not torch.equal(pool[len(ASKED) :].cpu(), own):
        return float("inf")
    return largest_error(pool[: len(ASKED)], states)


def check_host_rows(span: slice, *, row_bytes: int = 8_240, rows: int = 40) -> float:
    """The error of what ``host_rows`` writes to pinned memory and reads again; infinite if it is
    wrong.
    """
    host = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8)
    host = host.pin_memory() if GPU else host
    expected, chosen = host.clone(), torch.randperm(rows)[:9]
    content = torch.randint(0, 256, (len(chosen), span.stop - span.start), dtype=torch.uint8)
    back = torch.zeros_like(content).to(DEVICE)
    for part, to_host in ((content.to(DEVICE), True), (back, False)):
        host_rows._launch(host[:, span], part, chosen.to(DEVICE), to_host=to_host)
    if GPU:
        torch.cuda.synchronize()
    expected[chosen, span] = content
    same = torch.equal(host, expected) and torch.equal(back.cpu(), content)
    return 0.0 if same else float("inf")


def check_divided_rows(dtype: torch.dtype) -> float:
    """The error of coding rows into parts of slots and decoding them (``divided_rows``): 0 if plain
    torch computes the same, infinite otherwise.
    """
    pool = torch.randn(3, 12, 4, 16, 128).to(dtype)
    plain, on_device = pool.clone(), pool.to(DEVICE)
    definition, other = InPlace([plain], [], Codec.INT8), InPlace([on_device], [], Codec.INT8)
    coded = DividedRows([on_device], other._coded[0].beside, other.parts)
    slots, at = torch.tensor([3, 1, 2, 4, 5]), torch.arange(5)
    places, parts = slots[at // definition.parts], at % definition.parts
    into = torch.tensor([6, 7, 8, 10, 11])
    definition.encode(slots, places, parts)
    coded.encode(*(index.to(DEVICE) for index in (slots, places, parts)))
    definition.decode(places, parts, into)
    coded.decode(*(index.to(DEVICE) for index in (places, parts, into)))
    same = torch.equal(on_device.cpu().view(torch.uint8), plain.view(torch.uint8))
    return 0.0 if same else float("inf")


def compilations(run: Callable[[], object]) -> int:
    """The number of kernels that Triton compiles, or loads compiled, while ``run`` runs."""
    found: list[str] = []

    def noted(**compiled: object) -> bool:
        found.append(str(compiled["repr"]))
        return False

    knobs = triton.knobs.runtime
    before, knobs.jit_post_compile_hook = knobs.jit_post_compile_hook, noted
    try:
        run()
    finally:
        knobs.jit_post_compile_hook = before
    return len(found)


def check_compilations(layer: Shape) -> None:
    """The start compiles what no other layer has compiled before; prefills compile nothing."""
    windows, states = layer.pools(2, DEVICE)

    def start() -> None:
        for run in warm_up(windows, states, torch.bfloat16, layer.save, layer.chunk or 0).values():
            run()

    def prefills() -> None:
        for tokens in (2, 3, 16, 64, 65, 128, 129, 1000, 1024):
            for count in (1, 2, 3):
                state_launches(layer, tokens, sorted({*spread(tokens, count)}), DEVICE)()

    first, later = compilations(start), compilations(prefills)
    what = f"compiled for {layer.name}"
    tell(what, f"{first} at the start, {later} in prefills", first > 0 and later == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="one check of each kernel")
    small = parser.parse_args().small or not GPU
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # definitions go token by token, and threads would wait for each other
    where = torch.cuda.get_device_name() if GPU else "Triton's interpreter"
    print(f"{where}, torch {torch.__version__}, Triton {triton.__version__}, seed {seed}")
    shapes = [(32, 16)] if small else [(64, 128), (128, 256)]
    dtypes = [torch.float32] if not GPU else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for width, size in shapes:
            for resumed in (False, True):
                report(
                    f"Mamba2 [{width}, {size}], {name}, {'resumed' if resumed else 'fresh'}",
                    check_mamba2(width, size, dtype, resumed=resumed),
                    TOLERANCE[dtype],
                )
        edge = 32 if small else 128
        what = f"delta rule [{edge}, {edge}], {name}"
        report(what, check_delta(edge, dtype), DELTA_TOLERANCE[dtype])
        found = check_delta(edge, dtype, by_channel=True)
        report(what.replace("rule", "rule by channel"), found, DELTA_TOLERANCE[dtype])
        report(f"windows, {name}", check_windows(dtype), 0.0)
    for span in (slice(16, 8_216), slice(3, 10)):
        report(f"host rows, {span.stop - span.start} bytes", check_host_rows(span), 0.0)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        report(f"slots coded in place, {name}", check_divided_rows(dtype), 0.0)
    if GPU and not small:
        for layer in LAYERS:
            check_compilations(layer)


def report(what: str, error: float, tolerance: float) -> None:
    found = f"largest error {error:.1e} (at most {tolerance:.0e})"
    tell(what, found, error <= tolerance)


if __name__ == "__main__":
    main()
