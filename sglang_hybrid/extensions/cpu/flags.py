"""SGLang's flags that the CPU platform cannot honour. Imports neither torch nor SGLang."""

from __future__ import annotations

import argparse

from sglang_hybrid.checkpoints.support import EXACT_DRAFTS
from sglang_hybrid.serving.config import CPU_ATTENTION
from sglang_hybrid.serving.flag_values import flag_name
from sglang_hybrid.serving.startup import StartupError

NOT_ON_CPU = {
    "enable_dp_attention": "its ranks exchange tokens by Triton kernels",
    "enable_page_major_kv_layout": "it needs Triton kernels",
}
"""SGLang's flags that do not work without an accelerator, and why."""

ON_CPU = {
    "attention_backend": (CPU_ATTENTION, "torch_native"),
    "prefill_attention_backend": (CPU_ATTENTION, "torch_native"),
    "decode_attention_backend": (CPU_ATTENTION, "torch_native"),
    "sampling_backend": ("pytorch",),
}
"""Flags that name a backend, and what they may name here; the first is taken without the flag."""

ADAPTERS_OF_SGLANG = "csgmv"
"""SGLang's default for --lora-backend, in Triton."""

ADAPTERS_ON_CPU = "torch_native"
"""The only --lora-backend in plain torch."""


def check_flags(flags: argparse.Namespace) -> None:
    """Raise `StartupError` for a flag that cannot work on this platform."""
    for name, why in NOT_ON_CPU.items():
        if getattr(flags, name, None):
            raise StartupError(f"{flag_name(name)} does not work on the CPU: {why}; leave it out.")
    _check_drafts(flags)
    for name, known in ON_CPU.items():
        given = getattr(flags, name, None)
        if given not in (None, *known):
            raise StartupError(
                f"{flag_name(name)} {given} does not work on the CPU; leave it out, and {known[0]} "
                "is taken."
            )
    if flags.lora_backend not in (ADAPTERS_OF_SGLANG, ADAPTERS_ON_CPU):
        raise StartupError(
            f"--lora-backend {flags.lora_backend} does not work on the CPU; leave it out, and "
            f"{ADAPTERS_ON_CPU} is taken."
        )


def _check_drafts(flags: argparse.Namespace) -> None:
    """Raise `StartupError` for speculative decoding of a kind that this platform does not have."""
    algorithm = (flags.speculative_algorithm or "").upper()
    if not algorithm:
        return
    if algorithm not in EXACT_DRAFTS:
        raise StartupError(
            f"--speculative-algorithm {algorithm} does not work on the CPU; use one of "
            f"{', '.join(EXACT_DRAFTS)}."
        )
    if algorithm != "NGRAM" and (flags.speculative_eagle_topk or 1) > 1:
        raise StartupError(
            f"--speculative-eagle-topk {flags.speculative_eagle_topk} does not work on the CPU: "
            "there a draft model makes one token behind the other; use 1."
        )
    if "torch_native" in (flags.attention_backend, flags.decode_attention_backend):
        raise StartupError(
            "--attention-backend torch_native knows no drafts of speculative decoding; leave it "
            f"out, and {CPU_ATTENTION} is taken."
        )
