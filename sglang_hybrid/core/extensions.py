"""Loads an extension for the product: by name, when it is first asked for.

No file of the product imports one (pyproject.toml has the contract), so what is not asked for is
neither loaded nor can it break anybody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

GUARD: Final = "SGLANG_HYBRID_GUARD"
"""The environment variable that turns the guard off (serving/config.py)."""

OFF: Final = "off"


def extension(name: str) -> Any:
    """A module of `sglang_hybrid.extensions` by its name there, as "disk.learning".

    tests/test_loaded.py checks that each one exists that the product names, and has what is taken
    from it.
    """
    return import_module(f"sglang_hybrid.extensions.{name}")


def guard(name: str) -> Any:
    """A module of `extensions/guard` by its name there; None where the guard is off."""
    return extension(f"guard.{name}") if has_guard() else None


def has_guard() -> bool:
    """True unless the operator has turned the guard off."""
    return os.environ.get(GUARD) != OFF


@contextmanager
def needs_extra(name: str) -> Iterator[None]:
    """Imports of a program's extension: where a package of the extra `name` (pyproject.toml) is not
    installed, the program ends with a sentence. Raises SystemExit.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sglang_hybrid"):
            raise
        raise SystemExit(
            f"error: {error.name} is not installed; install 'sglang-hybrid[{name}]', with all that "
            "this command needs."
        ) from None
