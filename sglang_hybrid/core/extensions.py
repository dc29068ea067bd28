"""Loads an extension for the product: by name, when it is first asked for.

No file of the product imports one (pyproject.toml has the contract), so what is not asked for is
neither loaded nor can it break anybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def extension(name: str) -> Any:
    """A module of `sglang_hybrid.extensions` by its name there, as "disk.learning".

    tests/test_loaded.py checks that each one exists that the product names, and has what is taken
    from it.
    """
    return import_module(f"sglang_hybrid.extensions.{name}")


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
