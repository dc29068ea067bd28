"""Sentences by which checks refuse a value."""

from __future__ import annotations

from typing import Any

import pytest


def refused(check: Any, *arguments: Any) -> str:
    """The sentence with which `check` refuses these arguments: one line, and not long."""
    with pytest.raises(ValueError) as error:
        check(*arguments)
    said = str(error.value)
    assert said.endswith(".") and "\n" not in said and len(said) < 400
    return said
