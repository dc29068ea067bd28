"""Our flags as `argparse` knows them: what each takes, and what `--help` says of it.

`HybridConfig` has their defaults and checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang_hybrid.core.programs import MOST_PROCESSES, whole
from sglang_hybrid.core.records.pin import MOST_OF_ALL
from sglang_hybrid.serving.flag_values import (
    DEFAULT_ALPHA,
    TINY_MODELS,
    TRAINED,
    codec,
    count,
    eviction,
    flag_name,
    hosts,
    order,
    share,
    tenants,
)

GROUP = "sglang_hybrid"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        field: the field of `HybridConfig` that it sets.
        about: what `--help all` says of it, beside its default. `--help` says it up to the first
            colon.
        metavar: how `--help` calls its value.
        read: makes a value of its text.
        choices: the texts that it takes, where `read` does not say; without any, those of the
            Enum that the default is of.
    """

    field: str
    about: str
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: Sequence[str] | None = None


def add_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any], *, brief: bool = False
) -> None:
    """Add our flags to `parser`, in a group of their own; `defaults` by the names of
    `HybridConfig`'s fields. brief: one line of help for each.
    """
    group = parser.add_argument_group(GROUP, "flags of sglang_hybrid; all others are SGLang's own")
    for flag in FLAGS:
        default, choices = defaults[flag.field], flag.choices
        if isinstance(default, Enum):
            values = [each.value for each in type(default)]
            default, choices = default.value, values if flag.read is str else None
        group.add_argument(
            flag_name(flag.field),
            type=flag.read,
            choices=choices,
            metavar=flag.metavar,
            default=default,
            help=_help(flag.about, default, brief),
        )


def _help(about: str, default: object, brief: bool) -> str:
    if brief:
        about = about.partition(": ")[0]
    said = "(%(default)s)" if brief else "(default: %(default)s)"
    return about if default == "" else f"{about} {said}"


FLAGS = (
    # What is kept and what is evicted.
    Flag(
        "hybrid_eviction",
        "what is evicted first when KV or state slots run short: the node that saves the "
        "fewest FLOPs per byte, weighed by recency (marconi; marconi:ALPHA sets the weight of "
        f"FLOPs, 0 is recency alone, {DEFAULT_ALPHA:g} without a tuner) or by how likely it is "
        "used again (reuse), the node whose own last hit is longest ago (lru), what SGLang itself "
        "would evict (sglang-lru; no decisions are recorded), the node that is cheapest to replay "
        "(seglen), greedy-dual size frequency (gdsf); auto is reuse, and with "
        "--hybrid-tuner-workers switches to what finds more in a replay of the server's own "
        "traffic",
        metavar="POLICY",
        read=eviction,
    ),
    Flag(
        "hybrid_admission",
        "which states are kept: exact ones where prompts branch, at the start of the last message, "
        "at the end of a prompt and of an answer, each if it is worth more than what it pushes "
        "out (judicious); every one that SGLang tracks (all)",
    ),
    Flag(
        "hybrid_memory",
        "how KV and states divide the device's memory: they share one budget of bytes, which is "
        "what SGLang's two pools (--max-total-tokens and --max-mamba-cache-size, or their "
        "defaults) would take together, and what is worth least makes room for either (one); each "
        "has its pool (split); auto is one on the CPU platform for a hybrid model with planned "
        "checkpoints, split elsewhere and with --mamba-full-memory-ratio",
    ),
    Flag(
        "hybrid_pin_share",
        "share of the device's memory that what one tenant pins may take: of KV and of states; all "
        f"tenants together pin {MOST_OF_ALL:g} of it at most, and with 0 nothing is pinned",
        metavar="SHARE",
        read=share,
    ),
    Flag(
        "hybrid_full_hit",
        "answer a prompt that was asked twice without a forward when it comes again: the state "
        "behind its last token is kept, and the hidden state from which its first token is sampled",
    ),
    # Which request runs when.
    Flag(
        "hybrid_schedule",
        "in which order waiting requests run: of those at the front of the queue, first "
        "those of whose prefill least remains (window), or those that reuse something, then "
        "those that reuse nothing, then those that must load (car); as they came (fcfs), or "
        "the longest hit first (lpm), as in SGLang; sglang is what --schedule-policy says. "
        "window and car take options, as in window:size=128,overtaken=64,seconds=60: how many "
        "requests they choose from, and how many may overtake one, and for how long it may wait, "
        "before it is overtaken no more",
        metavar="ORDER",
        read=order,
    ),
    # What is learnt from traffic, and what is computed before it.
    Flag(
        "hybrid_tuner_workers",
        "processes that replay recent requests under other policies: now and then, at the lowest "
        "priority, for --hybrid-eviction auto, or under other alphas, for marconi; 0 turns that "
        "off",
        metavar="N",
        read=whole(0, MOST_PROCESSES),
    ),
    Flag(
        "hybrid_record",
        "write every finished request there, for the replay: its token ids and arrival (python -m "
        "sglang_hybrid.replay)",
        metavar="FILE",
    ),
    Flag(
        "hybrid_prewarm",
        "compute the prompts in this file when the server has started: one JSON object a "
        "line, with messages, text, input_ids or pml as in a request, or with schema and "
        "budget_mb",
        metavar="FILE",
    ),
    # Memory and disk below the device.
    Flag(
        "hybrid_disk_folder",
        "where --hicache-storage-backend file keeps KV and states: in a folder "
        "sglang_hybrid-tier of its own; by default what SGLang's own settings name, or "
        "sglang_hybrid/tiers in the user's folder of caches; mooncake://HOST:PORT is a store "
        "that several servers share",
        metavar="DIR",
    ),
    Flag(
        "hybrid_disk_mb",
        "MiB that this folder may take: shared by all ranks; 0 is all but 5%% of the disk",
        metavar="N",
        read=count,
    ),
    Flag(
        "hybrid_warm_start",
        "MiB of what the disk holds that a starting server reads into memory: per rank, while it "
        "already serves, what was used last, states first",
        metavar="MB",
        read=count,
    ),
    Flag(
        "hybrid_tier_codec",
        "how copies of KV and states are stored below the device: as they are (exact), as "
        "bfloat16 (bf16), or as int8 with a scale for each row (int8); hits on copies that are not "
        "exact say so. auto:LOGPROB measures at the start how far each layer's smaller copies "
        "move log probabilities, and gives each the smallest codec within this bound",
        metavar="CODEC",
        read=codec("exact"),
    ),
    Flag(
        "hybrid_device_codec",
        "how KV and states that would be evicted are kept on the device instead: not at all (off), "
        "or in a half or a quarter of their bytes, as bfloat16 (bf16) or as int8 with a scale for "
        "each row (int8); a hit decodes them, and says that it is not exact. "
        "auto:LOGPROB measures at the start how far smaller KV and smaller states move log "
        "probabilities, and takes the smallest codec within this bound for each of both",
        metavar="CODEC",
        read=codec("off"),
    ),
    # Whose a request is.
    Flag(
        "hybrid_tenants",
        "what makes tenants, and whether one is required: beside extra_key, cache_salt and the "
        "header X-Hybrid-Tenant, the API key that a client sends (api-key); and whether a request "
        "without a tenant is refused (required); or both, as api-key,required",
        metavar="WORDS",
        read=tenants,
    ),
    # What an operator sees.
    Flag(
        "hybrid_hosts",
        "names by which this server may be asked at /hybrid_cache/: with commas between them, "
        "beside localhost, the address that it is bound to and this machine's name; a request with "
        "another name in its header Host is refused, since a web page may have made it",
        metavar="NAMES",
        read=hosts,
    ),
    Flag(
        "hybrid_ui",
        "a live page of the cache at /hybrid_cache/: it takes the admin key if one is set, and "
        "shows lengths and hashes of what was sent (lengths), or its text, too (text)",
    ),
    # The model of a server without --model-path.
    Flag(
        "hybrid_default_model",
        "the embedded tiny model that is served without --model-path: trained, which "
        "answers questions about Python's standard library, or one of random weights: "
        f"{', '.join(TINY_MODELS)}",
        metavar="MODEL",
        choices=[TRAINED, *TINY_MODELS],
    ),
)
