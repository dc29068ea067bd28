"""Our flags: their names, defaults and checks, in one place."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from sglang_hybrid.models import ARCHITECTURES

GROUP = "sglang_hybrid"


@dataclass(frozen=True)
class HybridConfig:
    """What `python -m sglang_hybrid.launch_server` takes beside SGLang's own flags."""

    hybrid_default_model: str = "nemotron-h"

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """Add our flags to `parser`, in a group of their own."""
        group = parser.add_argument_group(
            GROUP, "flags of sglang_hybrid; all others are SGLang's own"
        )
        group.add_argument(
            "--hybrid-default-model",
            metavar="ARCHITECTURE",
            choices=sorted(ARCHITECTURES),
            default=HybridConfig.hybrid_default_model,
            help="architecture of the embedded tiny model with random weights that is served when "
            f"no --model-path is given: {', '.join(sorted(ARCHITECTURES))} (default: %(default)s)",
        )

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(namespace, field.name) for field in fields(cls)})

    @classmethod
    def split(cls, argv: Sequence[str]) -> tuple[Self, list[str]]:
        """Our part of a command line that has been checked already, and what is left for SGLang."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        cls.add_flags(parser)
        namespace, rest = parser.parse_known_args(list(argv))
        return cls.from_namespace(namespace), rest
