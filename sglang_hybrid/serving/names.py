"""Names that clients give: of requests, sessions, tenants and adapters."""

from __future__ import annotations

from typing import Final

from sglang_hybrid.core.sentences import quote

LONGEST: Final = 1_024
"""Characters of a name. Several processes keep each one."""


def check_name(field: str, value: object) -> None:
    """Raise ValueError unless `value` is a name, a list of names, or None."""
    if isinstance(value, list):
        for at, one in enumerate(value):
            check_name(f"{field}[{at}]", one)
    elif value is None:
        return
    elif not isinstance(value, str):
        raise ValueError(f"{field} is {quote(value)}; it must be a text.")
    elif len(value) > LONGEST:
        raise ValueError(f"{field} has {len(value):,} characters; it may have {LONGEST:,} at most.")
    else:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{field} is {quote(value)}, which is no Unicode text.") from None
