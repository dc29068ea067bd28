"""Our flags: their names, defaults and checks.

The launcher puts them into the environment, where every process that SGLang starts finds them; so
can anyone who starts an `sglang.Engine`: SGLANG_HYBRID_EVICTION=marconi is --hybrid-eviction
marconi. What only measurements and tests set is no flag (`variables.py`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from sglang_hybrid.core.costs.cost import MIN_BRANCH_TOKENS
from sglang_hybrid.core.records.pin import DEFAULT_SHARE
from sglang_hybrid.serving.flag_values import (
    DEFAULT_ALPHA,
    EXACT_COPIES,
    NO_CODED_ENTRIES,
    ORDER_OPTIONS,
    TRAINED,
    Admission,
    ClientLines,
    CodecChoice,
    Eviction,
    FullHit,
    Memory,
    NativeKernels,
    Schedule,
    Ui,
    flag_name,
)
from sglang_hybrid.serving.flags import add_flags
from sglang_hybrid.serving.variables import PARTS, VARIABLES, variable

BACKEND = "hybrid"
"""Our name for SGLang's --radix-cache-backend."""

CPU_ATTENTION = "hybrid_cpu"
"""Our name for SGLang's --attention-backend, on the CPU platform."""


@dataclass(frozen=True)
class HybridConfig:
    """What `python -m sglang_hybrid.launch_server` takes beside SGLang's own flags."""

    hybrid_eviction: Eviction = Eviction.AUTO
    hybrid_alpha: float | None = None
    hybrid_admission: Admission = Admission.JUDICIOUS
    hybrid_min_branch_tokens: int = MIN_BRANCH_TOKENS
    hybrid_slots_per_request: int = 0
    hybrid_memory: Memory = Memory.AUTO
    hybrid_schedule: Schedule = Schedule.SGLANG
    hybrid_schedule_window: int = 128
    hybrid_schedule_overtaken: int = 64
    hybrid_schedule_seconds: float = 60.0
    hybrid_history_mb: int = 64
    hybrid_answers_mb: int = 64
    hybrid_drain_seconds: float = 20.0
    hybrid_tuner_workers: int = 0
    hybrid_tuner_window: int = 0
    hybrid_record: str = ""
    hybrid_prewarm: str = ""
    hybrid_pin_share: float = DEFAULT_SHARE
    hybrid_offload_watermark: float = 0.6
    hybrid_simulate_bandwidth: str = ""
    hybrid_native_kernels: NativeKernels = NativeKernels.AUTO
    hybrid_client_lines: ClientLines = ClientLines.DROP
    hybrid_disk_folder: str = ""
    hybrid_disk_mb: int = 0
    hybrid_warm_start: int = 0
    hybrid_tier_codec: CodecChoice = EXACT_COPIES
    hybrid_device_codec: CodecChoice = NO_CODED_ENTRIES
    hybrid_tenants: str = ""
    hybrid_hosts: str = ""
    hybrid_ui: Ui = Ui.OFF
    hybrid_full_hit: FullHit = FullHit.OFF
    hybrid_default_model: str = TRAINED

    @property
    def policy(self) -> Eviction:
        """The policy in force, at first if it is tuned: `auto` is the reuse index, or Marconi if an
        alpha is given.
        """
        if self.hybrid_eviction is not Eviction.AUTO:
            return self.hybrid_eviction
        return Eviction.REUSE if self.hybrid_alpha is None else Eviction.MARCONI

    @property
    def alpha(self) -> float | None:
        """Marconi's alpha, None under another policy; tuned, it starts at 0 as in the paper."""
        if self.policy is not Eviction.MARCONI:
            return None
        if self.hybrid_alpha is None:
            return 0.0 if self.is_tuned else DEFAULT_ALPHA
        return self.hybrid_alpha

    @property
    def smaller_copies(self) -> str:
        """The flag that asks for copies that may not be exact, with its value; "" without one."""
        chosen = self.hybrid_tier_codec
        return f"--hybrid-tier-codec {chosen}" if chosen.may_change else ""

    @property
    def is_judicious(self) -> bool:
        """Whether states are kept only where they are likely to be used again."""
        return self.hybrid_admission is Admission.JUDICIOUS

    @property
    def is_pinned(self) -> bool:
        """Whether a policy was asked for by name or by its alpha."""
        return self.hybrid_eviction is not Eviction.AUTO or self.hybrid_alpha is not None

    @property
    def pinning_flag(self) -> str:
        """The flag that pins a policy so that no other is tried, with its value; "" without one."""
        if self.hybrid_alpha is not None:
            return f"--hybrid-eviction marconi:{self.hybrid_alpha:g}"
        tunable = self.hybrid_eviction in (Eviction.AUTO, Eviction.MARCONI)
        return "" if tunable else f"--hybrid-eviction {self.hybrid_eviction.value}"

    @property
    def is_tuned(self) -> bool:
        """Whether other policies are tried on the traffic."""
        return not self.pinning_flag and self.hybrid_tuner_workers > 0

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser, *, brief: bool = False) -> None:
        """Add our flags to `parser`, in a group of their own. brief: one line of help for each."""
        defaults = {field.name: field.default for field in fields(HybridConfig)}
        add_flags(parser, defaults, brief=brief)

    @classmethod
    def split(
        cls, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> tuple[HybridConfig, list[str]]:
        """Our part of a command line that has been parsed already, and what is left for SGLang.
        What is no flag is read from the environment. Raises ValueError for flags that do not fit
        together.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        cls.add_flags(parser)
        namespace, rest = parser.parse_known_args(list(argv))
        variables = vars(_read(environment, VARIABLES))
        given = {name: variables[name] for name in VARIABLES if name in variables}
        return cls._from(given | vars(namespace)), rest

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> HybridConfig:
        """What the variables say, defaults elsewhere; raises ValueError for a bad value."""
        names = (field.name for field in fields(cls) if field.name not in PARTS)
        return cls._from(vars(_read(environment, names)))

    def to_environment(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Put every setting where `from_environment` finds it."""
        environment = os.environ if environment is None else environment
        environment.update({variable(name): text for name, text in self._texts().items()})

    def overrides(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables of `environment` that say something else than these settings, and the flags
        that would say it.
        """
        ours = {name: text for name, text in self._texts().items() if name not in VARIABLES}
        return {
            variable(name): flag_name(name)
            for name, text in ours.items()
            if environment.get(variable(name), text) != text
        }

    def changed(self) -> dict[str, str]:
        """The settings that are not the defaults, by the names of their fields, as flags or as
        variables that say them.
        """
        ours, default = self._texts(), HybridConfig()._texts()
        return {
            name: f"{variable(name)}={text}" if name in VARIABLES else f"{flag_name(name)} {text}"
            for name, text in ours.items()
            if text != default[name]
        }

    def _texts(self) -> dict[str, str]:
        """Of flags and variables, as `_from` reads them."""
        texts = {}
        for field in fields(self):
            value = getattr(self, field.name)
            texts[field.name] = value.value if isinstance(value, Enum) else str(value)
        if self.hybrid_alpha is not None:
            texts["hybrid_eviction"] = f"{Eviction.MARCONI.value}:{self.hybrid_alpha}"
        if self.hybrid_schedule.is_ours:
            options = [f"{key}={texts[field]}" for key, (field, _) in ORDER_OPTIONS.items()]
            texts["hybrid_schedule"] += ":" + ",".join(options)
        return {name: text for name, text in texts.items() if name not in PARTS}

    @classmethod
    def _from(cls, values: Mapping[str, Any]) -> HybridConfig:
        """Of values by flag; one that says several settings has them by their fields."""
        known: dict[str, Any] = {}
        for name, value in values.items():
            known |= value if isinstance(value, dict) else {name: value}
        defaults = {field.name: field.default for field in fields(cls)}
        for name, default in defaults.items():
            if isinstance(default, Enum) and name in known:
                known[name] = type(default)(known[name])
        config = cls(**{name: value for name, value in known.items() if name in defaults})
        if config.hybrid_schedule_window < 1:
            raise ValueError("a window of 0 requests leaves nothing to choose; give 1 or more.")
        return config


def _read(environment: Mapping[str, str] | None, names: Iterable[str]) -> argparse.Namespace:
    """What the variables of these fields say, as their flags would. Raises ValueError."""
    environment = os.environ if environment is None else environment
    argv = []
    for name in names:
        text = environment.get(variable(name))
        if text is not None:
            argv += [flag_name(name), text]
    parser = _Raising(add_help=False)
    HybridConfig.add_flags(parser)
    for name, read in VARIABLES.items():
        parser.add_argument(flag_name(name), type=read, default=argparse.SUPPRESS)
    return parser.parse_args(argv)


class _Raising(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(f"sglang_hybrid: {message} (from the environment)")
