"""Rows of the table of settings, `HybridConfig`: flags that `argparse` knows, and variables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field
from enum import Enum
from typing import Any

from sglang_hybrid.serving.flag_values import flag_name

GROUP = "sglang_hybrid"
FLAG, VARIABLE = "flag", "variable"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Args:
        about: the text of `--help all`, beside the default. `--help` shows it up to the first
            colon.
        metavar: the name of its value in `--help`.
        read: makes a value of its text.
        choices: the texts that it takes, where `read` does not say; without any, those of the
            Enum that the default is of.
    """

    about: str
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: Sequence[str] | None = None


def flag(default: object, about: str, **more: Any) -> Any:
    """A setting that is a flag. more: of `Flag`."""
    return field(default=default, metadata={FLAG: Flag(about, **more)})


def variable(default: object, read: Callable[[str], Any]) -> Any:
    """A setting that is a variable of the environment and no flag. read: makes a value of it."""
    return field(default=default, metadata={VARIABLE: read})


def add_flags(
    parser: argparse.ArgumentParser, settings: Iterable[Field[Any]], *, brief: bool = False
) -> None:
    """Add those of `settings` that are flags to `parser`, in a group of their own. brief: one line
    of help for each.
    """
    group = parser.add_argument_group(GROUP, "flags of sglang_hybrid; all others are SGLang's own")
    for setting in settings:
        if FLAG not in setting.metadata:
            continue
        flag: Flag = setting.metadata[FLAG]
        default, choices = setting.default, flag.choices
        if isinstance(default, Enum):
            values = [each.value for each in type(default)]
            default, choices = default.value, values if flag.read is str else None
        group.add_argument(
            flag_name(setting.name),
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
