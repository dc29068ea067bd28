"""Flags of SGLang on the CPU platform: what is refused, and what another default stands for."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import sglang.srt.platforms  # noqa: F401 (finds our platform; that cannot be imported before it)

from sglang_hybrid.extensions.cpu.flags import check_flags
from sglang_hybrid.extensions.cpu.platform import HybridCpuPlatform
from sglang_hybrid.serving.startup import StartupError
from tests.extensions.cpu.test_bind_cores import unset_arguments


def flags(**given: Any) -> argparse.Namespace:
    asked = {"speculative_algorithm": None, "speculative_eagle_topk": None, "lora_backend": "csgmv"}
    backends = {"attention_backend": None, "decode_attention_backend": None}
    return argparse.Namespace(**{**asked, **backends, **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"speculative_algorithm": "DFLASH"},
            "--speculative-algorithm DFLASH does not work on",
        ),
        (
            {"speculative_algorithm": "eagle", "speculative_eagle_topk": 4},
            "--speculative-eagle-topk 4 does not work on the CPU",
        ),
        (
            {"speculative_algorithm": "NGRAM", "attention_backend": "torch_native"},
            "torch_native knows no drafts",
        ),
        (
            {"attention_backend": "flashinfer"},
            "--attention-backend flashinfer does not work on the CPU; leave it out, and hybrid_cpu",
        ),
        ({"sampling_backend": "flashinfer"}, "--sampling-backend flashinfer does not work"),
        (
            {"enable_page_major_kv_layout": True},
            "--enable-page-major-kv-layout does not work on the CPU",
        ),
        (
            {"enable_dp_attention": True},
            "--enable-dp-attention does not work on the CPU: its ranks exchange tokens by Triton",
        ),
        ({"lora_backend": "triton"}, "--lora-backend triton does not work on the CPU"),
    ],
)
def test_what_needs_an_accelerator_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        check_flags(flags(**given))
    check_flags(flags())
    check_flags(flags(lora_backend="torch_native", attention_backend="torch_native"))


def test_adapters_are_computed_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")  # it is set otherwise
    for asked in ("csgmv", "torch_native"):
        args = unset_arguments(lora_backend=asked)
        HybridCpuPlatform().apply_server_args_defaults(args)
        assert args.lora_backend == "torch_native"
