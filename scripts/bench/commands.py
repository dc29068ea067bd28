"""The subcommands of scripts/bench.py: which module each is in, its help, and its options.

A subcommand is a function of the module that `COMMANDS` names, with the subcommand's name. It
measures and prints Markdown; its docstring is its help. Its options are its parameters:

    def server(
        *server_flags: Annotated[str, "flags for the server, after --"],
        requests: Annotated[Count, "prompts per model"] = 16,
    ) -> None:

A bool is a switch, a tuple takes several values, `*parameters` are what has no name. Beside the
type of a parameter stand its help, what reads a value where the type does not, and, in a dict, what
else `add_argument` is told.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sglang_hybrid.core.options import integer

COMMANDS = {
    "ab": "ab",
    "admission": "admission",
    "policies": "policies",
    "pools": "pools",
    "rounds": "rounds",
    "cold": "cold",
    "coded": "coded",
    "modular": "modular",
    "kernels": "kernels",
    "split": "server",
    "tiers": "tiers",
    "one-memory": "one_memory",
    "fleet": "fleet",
    "replay": "replay",
    "server": "server",
    "results": "results",
}
"""Modules by subcommand: fifteen benchmarks, and the pages that they make."""

positive = integer(1)
"""Reads a number of 1 or more, for an option."""

Count = Annotated[int, positive]
APPENDED: dict[str, Any] = {"action": "append", "nargs": None}
"""Settings of a tuple whose values are given one by one, each behind the option's name."""


def one_of(values: Iterable[object]) -> dict[str, Any]:
    """Settings of a parameter that may have these values only, for its type."""
    return {"choices": list(values)}


def name_of(command: str) -> str:
    return command.replace("-", "_")


def function_of(command: str) -> Callable[..., int | None]:
    """The function of a subcommand. It returns an exit status, or None for success."""
    module = import_module(f"scripts.bench.{COMMANDS[command]}")
    function: Callable[..., int | None] = getattr(module, name_of(command))
    return function


@cache
def about(command: str) -> str:
    """The docstring of a subcommand's function, whose module is not imported."""
    path = Path(__file__).with_name(f"{COMMANDS[command]}.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name_of(command):
            return ast.get_docstring(node) or ""
    return ""


def add_options(parser: argparse.ArgumentParser, function: Callable[..., object]) -> None:
    """Options for the parameters of `function`; one that is not given is not in the namespace."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            settings = _settings(hints[name])
            if "choices" in settings:
                settings["choices"] = [
                    *settings["choices"],
                    [],
                ]  # argparse also looks up an empty list there
            parser.add_argument(name, nargs="*", **settings)
        else:
            option = f"--{name.strip('_').replace('_', '-')}"
            parser.add_argument(
                option, dest=name, default=argparse.SUPPRESS, **_settings(hints[name])
            )


def call(function: Callable[..., int | None], options: dict[str, Any]) -> int:
    """Call `function` with the options that were given; returns its exit status."""
    rest: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = options.pop(name)
    return function(*rest, **options) or 0


def _settings(hint: Any) -> dict[str, Any]:
    """The keyword arguments of `add_argument` for a parameter of this type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = _settings(inner[0])
        for note in inner[1:]:
            kind = "help" if isinstance(note, str) else "type"
            found |= note if isinstance(note, dict) else {kind: note}
        return found
    if origin is tuple:
        several = {"nargs": "*", "action": "extend"}
        return _settings(inner[0]) | (several if inner[-1] is ... else {"nargs": len(inner)})
    if origin in (Union, UnionType):  # with None
        return _settings(inner[0])
    if origin is Literal:
        return {"choices": inner}
    return {"action": "store_true"} if hint is bool else {"type": hint}
