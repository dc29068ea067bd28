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

logger = logging.getLogger(__name__)


def choose_codecs(options: HybridConfig, context: TreeCacheBuildContext) -> CodecPlan:
    """One codec for all, or what a measurement on the served model allows for each layer.

    A measurement that fails leaves copies as they are: smaller ones would have errors that nobody
    has seen. It fails on all ranks if it does on one, and all of them find the same plan: a copy
    must be there on all ranks or on none, and smaller copies need less room. Raises RuntimeError if
    a rank failed where the others wait for it.
    """
    if not options.hybrid_tier_error:
        return CodecPlan.uniform(Codec(options.hybrid_tier_codec))
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
        found = calibrate(*probe.layers, probe.error, options.hybrid_tier_error)
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
        "sglang_hybrid: smaller copies: %s; log probabilities move by %.1e at most for one layer "
        "(%g was allowed), by %.1e for all of them together.",
        found.plan,
        found.layer_error,
        options.hybrid_tier_error,
        found.error,
    )
    return found.plan
