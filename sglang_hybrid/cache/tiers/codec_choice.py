"""The codecs of copies of KV and states, settled before host pools are built."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_hybrid.serving.ranks import AnotherRankFailed, Ranks
from sglang_hybrid.storage.codecs.codecs import Codec
from sglang_hybrid.storage.codecs.coded_rows import CodecPlan

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_hybrid.serving.config import HybridConfig
    from sglang_hybrid.serving.flag_values import CodecChoice

logger = logging.getLogger(__name__)


def choose_codecs(options: HybridConfig, context: TreeCacheBuildContext) -> CodecPlan:
    """The codecs of copies below the device: one for all, or those that a measurement on the served
    model allows for each layer (`_measured`).
    """
    return _chosen(options.hybrid_tier_codec, context, each_layer=True)


def choose_device_codecs(options: HybridConfig, context: TreeCacheBuildContext) -> CodecPlan:
    """The codecs of entries that the device keeps coded: one for KV and one for states, whose
    layers share slots.
    """
    return _chosen(options.hybrid_device_codec, context, each_layer=False)


def _chosen(choice: CodecChoice, context: TreeCacheBuildContext, *, each_layer: bool) -> CodecPlan:
    if choice.error:
        return _measured(choice.error, context, each_layer=each_layer)
    return CodecPlan.uniform(Codec(choice.codec) if choice.may_change else Codec.EXACT)


def _measured(bound: float, context: TreeCacheBuildContext, *, each_layer: bool) -> CodecPlan:
    """The smallest codecs whose errors are within `bound`, of each layer or of all of a kind.

    A measurement that fails leaves copies as they are: smaller ones would have errors that nobody
    has seen. It fails on all ranks if it does on one, and all of them find the same plan: a copy
    must be there on all ranks or on none, and smaller copies need less room. Raises RuntimeError if
    a rank failed where the others wait for it.
    """
    from sglang_hybrid.storage.codecs.calibration import calibrate
    from sglang_hybrid.storage.codecs.probe import Probe

    if context.params.pp_size > 1:
        logger.warning(
            "sglang_hybrid: copies stay exact, because no stage of a pipeline can measure alone "
            "what smaller ones do to answers; name a codec to have them."
        )
        return CodecPlan()
    ranks = Ranks(context.tp_group.cpu_group if context.tp_size > 1 else None)
    try:
        probe = Probe(context.tp_worker, ranks)
        layers = probe.layers if each_layer else (1, 1)
        found = calibrate(*layers, probe.error, bound)
    except AnotherRankFailed:
        logger.error(
            "sglang_hybrid: copies stay exact, because calibration failed on another rank."
        )
        return CodecPlan()
    except Exception:
        logger.exception("sglang_hybrid: copies stay exact, because calibration failed.")
        ranks.give_up()
        return CodecPlan()
    logger.info(
        "sglang_hybrid: smaller copies: %s; log probabilities move by %.1e at most for one %s "
        "(%g was allowed), by %.1e for all of them together.",
        found.plan,
        found.layer_error,
        "layer" if each_layer else "kind",
        bound,
        found.error,
    )
    return found.plan
