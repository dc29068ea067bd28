"""Recurrent layers of SGLang that leave states inside a prefill, and the reasons why others do not.

A row of `SCANS` is one of SGLang's linear-attention backends with one of its prefill kernels. To
have another kind of layer leave states, call `PrefillTracks` from where its scan holds them (patch
0007), and add its row here; `tracks.py` knows no layer.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from sglang_hybrid.kernels.checkpoint_states import (
    DELTA_CHUNK,
    save_delta_states,
    save_kda_states,
    save_lightning_states,
    save_ssd_states,
)

Save = Callable[..., None]
"""A function of ``kernels/checkpoint_states.py``: `save(pool, targets, **what the scan holds)`."""


@dataclass(frozen=True)
class Scan:
    """The abilities of prefills of one of SGLang's linear-attention backends.

    Classes are written ``module:name`` and meant exactly: a subclass has a prefill of its own.

    Args:
        backend: the backend's class; ``kernel``: that of its prefill kernel, None if it has no
            choice.
        layers: classes of the layers that call `PrefillTracks`, by the backend or themselves, and
            the kernel that each launches for it on a GPU (None: the layer hands its states over, or
            its state is the window alone). A model's recurrent layers must all be among them.
        every: tokens between the states that the scan itself leaves. Tokens from one of them to a
            position are scanned again (`tails.py`); 1 if states are taken at any position.
        copies_ends: whether states at the ends of sequences are copied from the live ones behind
            the scan, and a kernel writes those inside only: where the scan's chunk states may have
            the model's type, while live states have the pool's, and where it leaves no chunk
            states.
        refused: names of switches of the backend; each that is on makes a prefill that leaves no
            states.
        in_float32: names of layers whose scan has queries, keys and values in float32, whatever
            the model's type.
        one_rank: whether the layers leave states on one tensor-parallel rank only, because on
            several of them one kernel adds up their inputs and convolves the sums.
    """

    backend: str
    layers: Mapping[str, Save | None]
    kernel: str | None = None
    every: int = 1
    copies_ends: bool = False
    refused: tuple[str, ...] = ()
    in_float32: tuple[str, ...] = ()
    one_rank: bool = False


_ATTENTION = "sglang.srt.layers.attention"
_GDN = f"{_ATTENTION}.linear.gdn_backend:GDNAttnBackend"
_KERNELS = f"{_ATTENTION}.linear.kernels"
_LINEAR_LAYER = "sglang.srt.layers.radix_linear_attention:RadixLinearAttention"
_LING = "sglang.srt.models.bailing_moe_linear:BailingMoELinearAttention"
_MINICPM = "sglang.srt.models.minicpm:MiniCPMLightningMixer"
_JET = "sglang.srt.models.jet_nemotron:JetBlock"
_BREAK_GRAPHS = {_LINEAR_LAYER, _LING, _MINICPM}
"""Layers that call their backend through SGLang's `RadixLinearAttention` or `RadixAttention`, which
its breakable graphs leave out."""

SCANS: tuple[Scan, ...] = (
    Scan(
        backend=f"{_ATTENTION}.hybrid_linear_attn_backend:Mamba2AttnBackend",
        layers={
            f"{_ATTENTION}.mamba.mamba:MambaMixer2": save_ssd_states,
            f"{_ATTENTION}.mamba.mamba1:MambaMixer1": None,
        },
    ),
    Scan(
        backend=f"{_ATTENTION}.linear.short_conv_backend:ShortConvAttnBackend",
        layers={
            "sglang.srt.models.lfm2:Lfm2ShortConv": None,
            "sglang.srt.models.lfm2_moe:Lfm2MoeShortConv": None,
            "sglang.srt.models.zaya:CCA": None,
        },
    ),
    Scan(
        backend=f"{_ATTENTION}.linear.inkling_sconv_backend:InklingShortConvAttnBackend",
        layers={"sglang.srt.models.inkling_common.sconv:ShortConvolution": None},
        one_rank=True,
    ),
    Scan(
        backend=_GDN,
        kernel=f"{_KERNELS}.gdn_triton:TritonGDNKernel",
        layers=dict.fromkeys((_LINEAR_LAYER, _JET), save_delta_states),
        copies_ends=True,
        refused=("enable_mis",),
    ),
    Scan(
        backend=_GDN,
        kernel=f"{_KERNELS}.gdn_flashinfer:FlashInferGDNKernel",
        layers={_LINEAR_LAYER: None},
        every=DELTA_CHUNK,
        refused=("enable_mis",),
    ),
    Scan(
        backend=f"{_ATTENTION}.linear.kda_backend:KDAAttnBackend",
        kernel=f"{_KERNELS}.kda_triton:TritonKDAKernel",
        layers={_LINEAR_LAYER: save_kda_states},
        copies_ends=True,
    ),
    Scan(
        backend=f"{_ATTENTION}.linear.lightning_backend:LightningAttentionBackend",
        layers=dict.fromkeys((_LING, _MINICPM), save_lightning_states),
        copies_ends=True,
        in_float32=(_LING,),
    ),
)


def name_of(kind: type) -> str:
    """``module:name`` of a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_scan(backend: Any) -> Scan | None:
    """The row of this SGLang linear-attention backend; None if its prefills leave no states."""
    name, kernel = name_of(type(backend)), name_of(type(_kernel_of(backend)))
    for scan in SCANS:
        if scan.backend == name and scan.kernel in (None, kernel):
            return None if any(getattr(backend, it) for it in scan.refused) else scan
    return None


def _kernel_of(backend: Any) -> Any:
    return getattr(getattr(backend, "kernel_dispatcher", None), "extend_kernel", None)


def linear_backend(model_runner: Any) -> Any:
    """The linear-attention backend of an SGLang ``ModelRunner``."""
    backend = model_runner.attn_backend
    return getattr(backend, "linear_attn_backend", backend)


def launched_kernel(model_runner: Any) -> Save | None:
    """The kernel that the recurrent layers of this ``ModelRunner`` launch on a GPU, if any, where
    `why_split` is None.
    """
    scan = find_scan(linear_backend(model_runner))
    layers: Mapping[str, Save | None] = {} if scan is None else scan.layers
    kinds = (name_of(type(module)) for module in model_runner.model.modules())
    return next((layers[kind] for kind in kinds if kind in layers), None)


def scans_in_float32(model_runner: Any) -> bool:
    """True if the scans of this ``ModelRunner`` have queries, keys and values in float32, whatever
    the model's type.
    """
    scan = find_scan(linear_backend(model_runner))
    kinds = {name_of(type(module)) for module in model_runner.model.modules()}
    return scan is not None and not kinds.isdisjoint(scan.in_float32)


def why_split(model_runner: Any) -> str | None:
    """The reason why a prefill of this SGLang ``ModelRunner`` cannot write the states that a batch
    asks for, so that it is split at the positions instead; None if it can.

    Where it cannot: backends, kernels and layers that are not in `SCANS`, slots that hold more than
    we write, layers that several ranks compute together, and layers inside a CUDA graph. To be
    asked when the graphs are captured.
    """
    from sglang.srt.runtime_context import get_parallel

    backend = linear_backend(model_runner)
    scan = find_scan(backend)
    if scan is None:
        kernel = _kernel_of(backend)
        name = type(backend).__name__ + (f" with {type(kernel).__name__}" if kernel else "")
        return f"{name} writes no states inside a prefill"
    pool = model_runner.req_to_token_pool.mamba_pool
    kinds = [name_of(type(module)) for module in model_runner.model.modules()]
    writing, recurrent = sum(kind in scan.layers for kind in kinds), len(pool.mamba_layer_ids)
    if writing < recurrent:
        return f"{recurrent - writing} of {recurrent} recurrent layers write no states inside one"
    if unwritten := _unwritten(pool, kinds):
        return f"a state has parts that are not written inside a prefill ({', '.join(unwritten)})"
    # Other layers with this scan cannot run in float32 in SGLang at all.
    if model_runner.device == "cuda" and model_runner.dtype is torch.float32 and _JET in kinds:
        return "the scan that leaves states takes no float32"
    if scan.one_rank and get_parallel().tp_size > 1:
        return "its recurrent layers are computed together with sums of several ranks"
    if _in_a_graph(model_runner, scan):
        return (
            "its recurrent layers are inside a prefill's CUDA graph "
            "(--disable-prefill-cuda-graph leaves it out)"
        )
    return None


WRITTEN = frozenset({"conv", "temporal"})
_PLE = "sglang.srt.models.qwen4_exp:Qwen4ExpPLELayer"
_PLE_STATES = "sglang.srt.mem_cache.ple_state_pool"
BESIDE: Mapping[str, str] = {f"{_PLE_STATES}:ShortConvPool": _PLE, f"{_PLE_STATES}:NGramPool": _PLE}
"""Classes of what a model registers for a slot beside its recurrent layers, and of the layer whose
hooks write it (hooks/states.py)."""
EMPTY_AFTER_A_PREFILL = "replayssm_"
"""Begin of the names of rings of decoded tokens (``--enable-linear-replayssm``)."""


def _unwritten(pool: Any, layers: Collection[str]) -> list[str]:
    """Names of what a slot of this SGLang ``MambaPool`` holds that tracks do not write, in a model
    with these classes of layers.

    SGLang's own copies of a slot take all of it along: what a model registers beside its recurrent
    layers (Qwen4-Exp: a window of a short convolution and the last tokens of the context), too.
    """
    states = pool.mamba_cache
    held = [f.name for f in fields(type(pool).State) if getattr(states, f.name, None) is not None]
    unknown = [n for n in held if n not in WRITTEN and not n.startswith(EMPTY_AFTER_A_PREFILL)]
    beside = [type(it) for it in pool._slot_siblings if BESIDE.get(name_of(type(it))) not in layers]
    return [*unknown, *(kind.__name__ for kind in beside)]


def _in_a_graph(model_runner: Any, scan: Scan) -> bool:
    """True if recurrent layers are part of a prefill's CUDA graph, where they repeat its capture.

    SGLang's breakable graphs, its default, leave out the layers that say so (`_BREAK_GRAPHS`),
    unless they can be captured (KDA, where no states are planned), and others in a layer with
    ``_forward_mamba`` (Nemotron-H).
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    graphs = model_runner.prefill_cuda_graph_runner
    if not isinstance(graphs, PrefillCudaGraphRunner):
        return False
    if graphs.prefill_backend_name == Backend.FULL or graphs.enable_cp_bcg_capture:
        return True
    if linear_backend(model_runner).supports_prefill_graph_extend():
        return True
    captured = scan.layers.keys() - _BREAK_GRAPHS
    return any(
        name_of(type(child)) in captured and not hasattr(layer, "_forward_mamba")
        for layer in model_runner.model.modules()
        for child in layer.children()
    )
