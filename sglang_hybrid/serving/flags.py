"""Our flags as `argparse` knows them, by topic: what each takes, and what `--help` says of it.

`HybridConfig` has their defaults and checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from sglang_hybrid.core.records.pin import MOST_OF_ALL
from sglang_hybrid.models import ARCHITECTURES
from sglang_hybrid.serving.flag_values import (
    DEFAULT_ALPHA,
    codec,
    count,
    eviction,
    order,
    share,
    values_of,
)

GROUP = "sglang_hybrid"


def add_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add our flags to `parser`, in a group of their own; `defaults` by the names of
    `HybridConfig`'s fields.
    """
    group = parser.add_argument_group(GROUP, "flags of sglang_hybrid; all others are SGLang's own")
    _add_policy(group, defaults)
    _add_schedule(group, defaults)
    _add_learning(group, defaults)
    _add_tiers(group, defaults)
    _add_model(group, defaults)


def _add_policy(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """What is kept and what is evicted."""
    group.add_argument(
        "--hybrid-eviction",
        type=eviction(values_of(defaults["hybrid_eviction"])),
        metavar="POLICY",
        default=defaults["hybrid_eviction"].value,
        help="what is evicted first when KV or state slots run short: the node that saves the "
        "fewest FLOPs per byte, weighed by recency (marconi; marconi:ALPHA sets the weight of "
        f"FLOPs, 0 is recency alone, {DEFAULT_ALPHA:g} without a tuner) or by how likely it is "
        "used again (reuse), the node whose own last hit is longest ago (lru), what SGLang itself "
        "would evict (sglang-lru; no decisions are recorded), the node that is cheapest to replay "
        "(seglen), greedy-dual size frequency (gdsf); auto is reuse, and with "
        "--hybrid-tuner-workers switches to what finds more in a replay of the server's own "
        "traffic (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-admission",
        choices=values_of(defaults["hybrid_admission"]),
        default=defaults["hybrid_admission"].value,
        help="judicious: exact states where prompts branch, at the start of the last message, "
        "at the end of a prompt and of an answer, each if it is worth more than what it pushes "
        "out; all: every state that SGLang tracks (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-memory",
        choices=values_of(defaults["hybrid_memory"]),
        default=defaults["hybrid_memory"].value,
        help="one: KV and states share one budget of bytes, which is what SGLang's two pools "
        "(--max-total-tokens and --max-mamba-cache-size, or their defaults) would take "
        "together, and what is worth least makes room for either; split: each has its "
        "pool; auto: one on the CPU platform for a hybrid model with planned checkpoints, "
        "split elsewhere and with --mamba-full-memory-ratio (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-pin-share",
        type=share,
        metavar="SHARE",
        default=defaults["hybrid_pin_share"],
        help="share of the device's memory, of KV and of states, that what one tenant pins may "
        f"take; all tenants together pin {MOST_OF_ALL:g} of it at most; 0: nothing is pinned "
        "(default: %(default)s)",
    )


def _add_schedule(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """Which request runs when."""
    group.add_argument(
        "--hybrid-schedule",
        type=order(values_of(defaults["hybrid_schedule"])),
        metavar="ORDER",
        default=defaults["hybrid_schedule"].value,
        help="in which order waiting requests run: of those at the front of the queue, first "
        "those of whose prefill least remains (window), or those that reuse something, then "
        "those that reuse nothing, then those that must load (car); as they came (fcfs), or "
        "the longest hit first (lpm), as in SGLang; sglang is what --schedule-policy says. "
        "window and car take options, as in window:size=128,overtaken=64,seconds=60: how many "
        "requests they choose from, and how many may overtake one, and for how long it may wait, "
        "before it is overtaken no more (default: %(default)s)",
    )


def _add_learning(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """What is learnt from traffic, and what is computed before it."""
    group.add_argument(
        "--hybrid-tuner-workers",
        type=count,
        metavar="N",
        default=defaults["hybrid_tuner_workers"],
        help="processes of lowest priority that now and then replay recent requests under "
        "other policies, for --hybrid-eviction auto, or other alphas, for marconi; 0 turns "
        "that off (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-record",
        metavar="FILE",
        default=defaults["hybrid_record"],
        help="write every finished request's token ids and arrival there, for `python -m "
        "sglang_hybrid.replay`",
    )
    group.add_argument(
        "--hybrid-prewarm",
        metavar="FILE",
        default=defaults["hybrid_prewarm"],
        help="compute the prompts in this file when the server has started: one JSON object a "
        "line, with messages, text, input_ids or pml as in a request, or with schema and "
        "budget_mb",
    )


def _add_tiers(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """Memory and disk below the device."""
    group.add_argument(
        "--hybrid-disk-folder",
        metavar="DIR",
        default=defaults["hybrid_disk_folder"],
        help="where --hicache-storage-backend file keeps KV and states, in a folder "
        "sglang_hybrid-tier of its own; by default what SGLang's own settings name, or "
        "sglang_hybrid/tiers in the user's folder of caches",
    )
    group.add_argument(
        "--hybrid-disk-mb",
        type=count,
        metavar="N",
        default=defaults["hybrid_disk_mb"],
        help="MiB that the folder may take, shared by all ranks; 0 is all but 5%% of the disk "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-warm-start",
        type=count,
        metavar="MB",
        default=defaults["hybrid_warm_start"],
        help="MiB of what the disk holds that a starting server reads into memory while it "
        "already serves, per rank: what was used last, states first (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-tier-codec",
        type=codec,
        metavar="CODEC",
        default=defaults["hybrid_tier_codec"],
        help="how copies of KV and states are stored below the device: as they are (exact), as "
        "bfloat16 (bf16), or as int8 with a scale for each row (int8); hits on copies that are not "
        "exact say so. auto:LOGPROB measures at the start how far each layer's smaller copies "
        "move log probabilities, and gives each the smallest codec within this bound (default: "
        "%(default)s)",
    )


def _add_model(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """The model of a server without --model-path."""
    group.add_argument(
        "--hybrid-default-model",
        metavar="ARCHITECTURE",
        choices=sorted(ARCHITECTURES),
        default=defaults["hybrid_default_model"],
        help="architecture of the embedded tiny model with random weights that is served when "
        f"no --model-path is given: {', '.join(sorted(ARCHITECTURES))} (default: %(default)s)",
    )
