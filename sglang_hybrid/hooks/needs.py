"""Needs: what a hook or a patch is there for, and so what a start does where SGLang lacks a piece.

All pieces of one need go together: where one of them does not fit, none takes hold. Without the
cache's own pieces nothing starts. Without those of a model, or of a flag, a start with our cache
that has the model, or the flag, is refused. Without a convenience a line of the log says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sglang_hybrid.serving.config import BACKEND, HybridConfig
from sglang_hybrid.serving.flag_values import FullHit, Ui

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class _Needed:
    """One need. what: reads behind "needed for". is_always: whether no start can be without it.
    has: whether a model needs it. asks: whether resolved arguments of SGLang and our own do, and
    flag: which; of a need with both, a start needs it that has both. of_guard: whether it goes with
    the guard, which an operator may turn off.
    """

    what: str
    is_always: Callable[[], bool] = lambda: False
    has: Callable[[ModelConfig], bool] | None = None
    flag: str = ""
    asks: Callable[[Any, HybridConfig], bool] | None = None
    of_guard: bool = False


def _types(model: ModelConfig) -> set[str]:
    configs = (model.hf_config, model.hf_text_config)
    return {str(getattr(config, "model_type", "")) for config in configs}


def _is(*families: str) -> Callable[[ModelConfig], bool]:
    """True if the name of a model's type begins with one of these."""
    return lambda model: any(name.startswith(families) for name in _types(model))


def _has_mamba1(model: ModelConfig) -> bool:
    return not _types(model).isdisjoint({"mamba", "falcon_mamba"})


_has_short_convolutions = _is("lfm2", "zaya")
_has_inklings_convolutions = _is("inkling")


def _has_mamba2(model: ModelConfig) -> bool:
    from sglang.srt.configs.hybrid_arch import mamba2_config

    others = (_has_mamba1, _has_short_convolutions, _has_inklings_convolutions)
    return mamba2_config(model) is not None and not any(has(model) for has in others)


def _has_delta_rule(model: ModelConfig) -> bool:
    from sglang.srt.configs import hybrid_arch

    known = hybrid_arch.hybrid_gdn_config(model) or hybrid_arch.hybrid_kda_config(model)
    return known is not None or hybrid_arch.linear_attn_model_spec(model) is not None


def _has_kda(model: ModelConfig) -> bool:
    from sglang.srt.configs.hybrid_arch import hybrid_kda_config

    return hybrid_kda_config(model) is not None


def _has_lightning(model: ModelConfig) -> bool:
    from sglang.srt.configs.hybrid_arch import hybrid_lightning_config

    return hybrid_lightning_config(model) is not None


class Need(Enum):
    """The purpose of a piece. Patches name a need of these, rows of `table.py` have one."""

    CACHE = _Needed("the cache, right answers, and tenants that stay apart", is_always=lambda: True)
    NO_TORCHVISION = _Needed(
        "servers without torchvision", is_always=lambda: find_spec("torchvision") is None
    )

    # Models.
    MAMBA1 = _Needed("models with Mamba layers", has=_has_mamba1)
    MAMBA2 = _Needed("models with Mamba2 layers", has=_has_mamba2)
    DELTA_RULE = _Needed("models with gated delta nets or KDA", has=_has_delta_rule)
    LIGHTNING = _Needed("models with lightning attention", has=_has_lightning)
    SHORT_CONVOLUTIONS = _Needed("models with short convolutions", has=_has_short_convolutions)
    LFM2 = _Needed("LFM2", has=_is("lfm2"))
    ZAYA = _Needed("Zaya", has=_is("zaya"))
    NO_ATTENTION = _Needed(
        "models without attention on a CPU",
        has=_is("mamba", "falcon_mamba"),
        asks=lambda sglangs, _: sglangs.device == "cpu",
    )
    KDA_GATES = _Needed("models with KDA", has=_has_kda)
    JET_NEMOTRON = _Needed("Jet-Nemotron", has=_is("jet_"))
    QWEN4_EXP = _Needed("Qwen4-Exp", has=_is("qwen4_exp"))
    INKLING = _Needed("Inkling", has=_has_inklings_convolutions)

    # Flags.
    FULL_HITS = _Needed(
        "answers to whole prompts that were asked before",
        flag="--hybrid-full-hit on",
        asks=lambda _, ours: ours.hybrid_full_hit is not FullHit.OFF,
    )
    UNIFIED_MEMORY = _Needed(
        "one memory for KV and states, SGLang's unified pool below our cache",
        flag="--enable-unified-memory (--hybrid-memory one, on a CPU the default, turns it on)",
        asks=lambda sglangs, _: bool(sglangs.enable_unified_memory),
    )
    HOST_COPIES = _Needed(
        "copies of states on the host",
        flag="--enable-hierarchical-cache",
        asks=lambda sglangs, _: bool(sglangs.enable_hierarchical_cache),
    )
    SMALLER_COPIES = _Needed(
        "smaller copies on host and disk",
        flag="--hybrid-tier-codec",
        asks=lambda _, ours: bool(ours.smaller_copies),
    )
    HIDDEN_STATES = _Needed(
        "hidden states of whole prompts",
        flag="--enable-return-hidden-states",
        asks=lambda sglangs, _: bool(sglangs.enable_return_hidden_states),
    )
    ADAPTERS = _Needed(
        "adapters on a CPU",
        flag="--enable-lora on a CPU",
        asks=lambda sglangs, _: bool(sglangs.enable_lora) and sglangs.device == "cpu",
    )
    STAGES = _Needed(
        "stages of a pipeline",
        flag="--pp-size above 1",
        asks=lambda sglangs, _: sglangs.pp_size > 1,
    )
    KEYS = _Needed(
        "keys that neither /server_info nor the log tells",
        flag="--api-key and --admin-api-key",
        asks=lambda sglangs, _: bool(sglangs.api_key or sglangs.admin_api_key),
    )

    # Conveniences.
    REPORTS = _Needed("reports of the cache in answers and /server_info")
    STARTS = _Needed("starts that fail in a sentence")
    PROMPTS = _Needed(
        "marked blocks, schemas and diagnostics of prompts, `explain` and the live page",
        flag="--hybrid-prewarm and --hybrid-ui",
        asks=lambda _, ours: bool(ours.hybrid_prewarm) or ours.hybrid_ui is not Ui.OFF,
    )
    CLIENTS = _Needed(
        "what clients of others send: keys in x-api-key, the model name `default`, and first lines "
        "that change with every request"
    )
    SPEEDS = _Needed("measured speeds of prefills, and times of arrival")
    QUICKER = _Needed("quicker schedulers, frees of KV slots, logits on a CPU, checks of token ids")
    CLOSED_SESSIONS = _Needed("closed sessions as a hint to the cache")
    DATA_PARALLEL = _Needed("prompts that go to the data-parallel rank that has their prefix")
    ONE_SLOT = _Needed("--mamba-radix-cache-strategy no_buffer beside the overlap scheduler")

    # The guard's (extensions/guard).
    CHECKS = _Needed(
        "requests that are refused in a sentence, as their clients know them", of_guard=True
    )
    SCHEDULERS_GO_ON = _Needed(
        "schedulers that go on after a request that cannot be done", of_guard=True
    )
    ENDS = _Needed("servers that end quickly, and leave nothing behind", of_guard=True)
    LONG_REQUESTS = _Needed("short requests that do not wait for long ones", of_guard=True)
    PENALTIES = _Needed("penalties that count each token once", of_guard=True)
    GRAMMARS = _Needed("a bound on the grammars that are kept", of_guard=True)

    @property
    def what(self) -> str:
        """Words behind "needed for"."""
        return self.value.what

    @property
    def is_always(self) -> bool:
        """True if no start can be without this."""
        return self.value.is_always()

    def why_refused(self, sglangs: Any, ours: HybridConfig, model: ModelConfig) -> str:
        """The part of a start with our cache that cannot be without this; "" if there is none.
        sglangs: SGLang's resolved arguments.
        """
        row = self.value
        if row.asks is not None and not row.asks(sglangs, ours):
            return ""
        if row.has is not None:
            return f"the model of type {model.hf_config.model_type!r}" if row.has(model) else ""
        return row.flag


@dataclass(frozen=True)
class Misfit:
    """A piece of the installed SGLang that is missing, or is not the one that we know: a function's
    or a file's name, what it is needed for, and a sentence.
    """

    need: Need
    piece: str
    why: str


def refuse(lacking: Mapping[Need, Misfit], server_args: ServerArgs) -> None:
    """Raise ValueError, in a sentence, for a start that needs what the installed SGLang lacks."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    if not lacking or view.radix_cache_backend != BACKEND or view.disable_radix_cache:
        return
    ours, model = HybridConfig.from_environment(), model_config_of(server_args)
    for need, misfit in lacking.items():
        if refused := need.why_refused(view, ours, model):
            raise ValueError(f"{refused} cannot be served here: {misfit.why}")
