"""Our flags as `argparse` knows them, by topic: what each takes, and what `--help` says of it.

`HybridConfig` has their defaults and checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from sglang_hybrid.core.records.pins import MOST_OF_ALL
from sglang_hybrid.models import ARCHITECTURES
from sglang_hybrid.serving.flag_values import (
    AUTO_ALPHA,
    DEFAULT_ALPHA,
    TIER_CODECS,
    alpha,
    count,
    links,
    nonnegative,
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
        choices=values_of(defaults["hybrid_eviction"]),
        default=defaults["hybrid_eviction"].value,
        help="what is evicted first when KV or state slots run short: the node that saves the "
        "fewest FLOPs per byte, weighed by recency (marconi) or by how likely it is used again "
        "(reuse), the node whose own last hit is longest ago (lru), what SGLang itself would "
        "evict (sglang-lru; no decisions are recorded), the node that is cheapest to replay "
        "(seglen), greedy-dual size frequency (gdsf); auto is reuse, and with "
        "--hybrid-tuner-workers switches to what finds more in a replay of the server's own "
        "traffic (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-alpha",
        type=alpha,
        metavar="NUMBER",
        default=AUTO_ALPHA,
        help="weight of FLOP efficiency against recency for --hybrid-eviction marconi; 0 is "
        "recency alone. A number pins that policy; auto is what the tuner finds, or "
        f"{DEFAULT_ALPHA:g} under --hybrid-eviction marconi without one (default: %(default)s)",
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
        "--hybrid-min-branch-tokens",
        type=count,
        metavar="N",
        default=defaults["hybrid_min_branch_tokens"],
        help="a branch point must gain this many tokens over the hit to get a state "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-slots-per-request",
        type=count,
        metavar="N",
        default=defaults["hybrid_slots_per_request"],
        help="state slots that a running request counts for when SGLang caps the running "
        "requests by the state pool; fewer let more requests run and leave fewer slots for "
        "checkpoints. 0 is SGLang's number, 3, or 5 with the extra buffer (default: "
        "%(default)s)",
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
    """Which request runs when, and how long it may."""
    group.add_argument(
        "--hybrid-schedule",
        choices=values_of(defaults["hybrid_schedule"]),
        default=defaults["hybrid_schedule"].value,
        help="in which order waiting requests run: of those at the front of the queue, first "
        "those of whose prefill least remains (window), or those that reuse something, then "
        "those that reuse nothing, then those that must load (car); as they came (fcfs), or "
        "the longest hit first (lpm), as in SGLang; sglang is what --schedule-policy says "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-schedule-window",
        type=count,
        metavar="N",
        default=defaults["hybrid_schedule_window"],
        help="how many requests, from the front of the queue, window and car choose from "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-schedule-overtaken",
        type=count,
        metavar="N",
        default=defaults["hybrid_schedule_overtaken"],
        help="a request that so many later ones have overtaken is overtaken no more, under "
        "window and car (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-schedule-seconds",
        type=nonnegative,
        metavar="SECONDS",
        default=defaults["hybrid_schedule_seconds"],
        help="a request that has waited so long is overtaken no more, under window and car "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-burst-ms",
        type=nonnegative,
        metavar="MS",
        default=defaults["hybrid_burst_ms"],
        help="an idle server that gets a prompt of which 512 tokens or more are not cached waits "
        "this long for requests sent at the same time, so that they can share its prefix; 0 turns "
        "it off (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-drain-seconds",
        type=nonnegative,
        metavar="SECONDS",
        default=defaults["hybrid_drain_seconds"],
        help="how long running requests may go on after SIGTERM or Ctrl-C; then they end with "
        "an error of status 503 (default: %(default)s)",
    )


def _add_learning(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """What is learnt from traffic, and what is computed before it."""
    group.add_argument(
        "--hybrid-history-mb",
        type=count,
        metavar="N",
        default=defaults["hybrid_history_mb"],
        help="MiB for the history of prompts and answers that reuse learns from: two bytes per "
        "token, 600 per fork or end and 500 per answer; when it is full, the tenant that holds "
        "most forgets what it sent longest ago (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-answers-mb",
        type=count,
        metavar="N",
        default=defaults["hybrid_answers_mb"],
        help="MiB for what answers and clients' hints tell of a return, for --hybrid-eviction "
        "reuse: 3 per tenant, of tenants that came last; 0 turns that off (default: "
        "%(default)s)",
    )
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
        "--hybrid-tuner-window",
        type=count,
        metavar="N",
        default=defaults["hybrid_tuner_window"],
        help="requests before they first do; 0 is twice those that ended before the first "
        "eviction, 64 at least and 4,096 at most (default: %(default)s)",
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
        "--hybrid-offload-watermark",
        type=share,
        metavar="SHARE",
        default=defaults["hybrid_offload_watermark"],
        help="with --enable-hierarchical-cache: what would be evicted next, until no more than "
        "this share of the device's memory were in use, is copied to the host beforehand; 1 turns "
        "that off (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-simulate-bandwidth",
        type=links,
        metavar="TIER=SPEED,...",
        default=defaults["hybrid_simulate_bandwidth"],
        help="for measurements on the CPU platform: copies to and from a tier take as long as "
        "at this bandwidth, with this latency if one is given, as in "
        "host=25GB/s+20us,disk=3GB/s; without it they take what they take on this machine",
    )
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
        choices=TIER_CODECS,
        default=defaults["hybrid_tier_codec"],
        help="how copies of KV and states are stored below the device: as they are, as "
        "bfloat16, or as int8 with a scale for each row; hits on copies that are not exact "
        "say so (default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-tier-error",
        type=nonnegative,
        metavar="LOGPROB",
        default=defaults["hybrid_tier_error"],
        help="instead of one codec for all layers: measure at the start how far each layer's "
        "smaller copies move log probabilities, and give each the smallest codec within this "
        "bound; 0 turns that off (default: %(default)s)",
    )


def _add_model(group: argparse._ArgumentGroup, defaults: Mapping[str, Any]) -> None:
    """The kernels of the CPU platform, and the model of a server without one."""
    group.add_argument(
        "--hybrid-native-kernels",
        choices=values_of(defaults["hybrid_native_kernels"]),
        default=defaults["hybrid_native_kernels"].value,
        help="CPU platform: auto compiles C++ kernels at the first start, into the user's folder "
        "of caches, and does without them where there is no compiler; off is plain torch "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--hybrid-default-model",
        metavar="ARCHITECTURE",
        choices=sorted(ARCHITECTURES),
        default=defaults["hybrid_default_model"],
        help="architecture of the embedded tiny model with random weights that is served when "
        f"no --model-path is given: {', '.join(sorted(ARCHITECTURES))} (default: %(default)s)",
    )
