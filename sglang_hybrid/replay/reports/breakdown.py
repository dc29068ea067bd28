"""Where the hits of caches in tiers came from, and where others were lost, in percent."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_hybrid.replay.runner import Result

NEVER = "never stored"


def hits_by_tier(results: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    """Percent of the prompt tokens by policy and tier; nothing without tiers."""
    found: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        tiers, total = result.job.tiers, int(result.input_len.sum())
        if tiers is not None and result.tiers is not None:
            hits = result.tiers.hit_tokens
            found[name] = {tier.name.lower(): 100 * hits[tier] / total for tier in tiers.present}
    return found


def lost_tokens(results: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    """Percent of the prompt tokens by policy and reason; what was never stored is known only beside
    an unbounded cache. Reasons that nobody had are left out. Nothing without tiers.
    """
    found: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        if result.lost is None:
            continue
        total = int(result.input_len.sum())
        found[name] = {why: 100 * tokens / total for why, tokens in result.lost.items()}
        if "unbounded" in results:
            more = results["unbounded"].hit_tokens - result.hit_tokens - sum(result.lost.values())
            found[name][NEVER] = 100 * max(0, more) / total
    seen = {why for shares in found.values() for why, share in shares.items() if share}
    return {
        name: {why: share for why, share in shares.items() if why in seen}
        for name, shares in found.items()
    }
