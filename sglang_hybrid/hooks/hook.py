"""Hooks, and how they are put around functions of SGLang."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.hooks.needs import Need
from sglang_hybrid.hooks.sources import digest, installed_version, loaded_source


class HookError(RuntimeError):
    """A hook cannot take hold: SGLang's function is missing or is not the released one.

    It is no ImportError, because SGLang and its libraries go on without a module that raises one.
    """


class HookKind(Enum):
    """The time at which ours runs, and its arguments.

    BEFORE: `ours(*args, **kwargs)` returns (args, kwargs) for the function, or None to leave them.
    AFTER: `ours(result, *args, **kwargs)` returns another result, or None to leave it.
    AROUND: `ours(function, *args, **kwargs)` returns the result.
    REPLACE: `ours(function)` returns what stands in its place; for classes.
    """

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


@dataclass(frozen=True)
class Hook:
    """One function of SGLang and ours.

    Args:
        target: `module:name` or `module:Class.name`. A name that the module has imported is
            changed in this module only.
        kind: when ours runs.
        ours: our function.
        needed_for: what the hook is there for.
    """

    target: str
    kind: HookKind
    ours: Callable[..., Any]
    needed_for: Need = Need.CACHE

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]


_held: set[str] = set()


def is_in_place(target: str) -> bool:
    """True if all hooks on `target` have been put around it in this process."""
    return target in _held


def put_around(module: ModuleType, hooks: Iterable[Hook], sha256: dict[str, str]) -> None:
    """Put `hooks` around the functions of `module`, which has just been imported.

    Args:
        hooks: those whose targets are in `module`; of several on one target, the last one is the
            outermost.
        sha256: of each target's source in `SGLANG_VERSION` (`sources.digest`).

    Raises `HookError` for a target that is not there or has another source.
    """
    hooks = list(hooks)
    for target in dict.fromkeys(hook.target for hook in hooks):
        found = _find(module, target)
        source = None if found is None else loaded_source(_function(found))
        need = next(hook.needed_for for hook in hooks if hook.target == target)
        check(target, source, sha256, need)
    for hook in hooks:
        owner, name = _owner(module, hook.name)
        raw = vars(owner)[name]
        put = _around(hook, _function(raw))
        setattr(owner, name, type(raw)(put) if isinstance(raw, classmethod | staticmethod) else put)
        _held.add(hook.target)


def check(target: str, source: str | None, sha256: dict[str, str], need: Need) -> None:
    """Raise `HookError` unless `source` is the released one of `target`; None: it is missing.

    need: what it is needed for.
    """
    if target not in sha256:
        raise HookError(
            f"sglang_hybrid hooks {target} and has no hash of it; scripts/port.py makes it."
        )
    if source is None:
        raise HookError(
            f"{target}, needed for {need.what}, is not in the installed sglang "
            f"{installed_version()}; reinstall sglang=={SGLANG_VERSION}."
        )
    found = digest(source)
    if found != sha256[target]:
        raise HookError(
            f"{target} of the installed sglang {installed_version()}, needed for {need.what}, is "
            f"not the one of sglang {SGLANG_VERSION} (sha256 {found[:12]} instead of "
            f"{sha256[target][:12]}); reinstall sglang=={SGLANG_VERSION}."
        )


def _owner(module: ModuleType, dotted: str) -> tuple[Any, str]:
    """The module or class that `dotted` names an attribute of, None without one, and its name."""
    owner: Any = module
    *path, name = dotted.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return owner, name


def _find(module: ModuleType, target: str) -> Any:
    owner, name = _owner(module, target.partition(":")[2])
    return None if owner is None else vars(owner).get(name)


def _function(found: Any) -> Any:
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _around(hook: Hook, function: Any) -> Any:
    """`function` with ours around it."""
    ours = hook.ours
    if hook.kind is HookKind.REPLACE:
        return ours(function)

    if hook.kind is HookKind.BEFORE:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            changed = ours(*args, **kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
            return function(*args, **kwargs)

    elif hook.kind is HookKind.AFTER:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            changed = ours(result, *args, **kwargs)
            return result if changed is None else changed

    else:

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return ours(function, *args, **kwargs)

    return functools.update_wrapper(wrapper, function)
