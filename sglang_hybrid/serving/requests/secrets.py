"""Keys of a server are read from files and told nowhere; its log does not tell the tenants that
requests name in their addresses (hooks/serving.py, patch 0067).
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_hybrid.core.named_files import read_text

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""SGLang's arguments that are keys or passwords."""

FLAGS = tuple("--" + name.replace("_", "-") for name in SECRETS)
FILE = "@"
"""Begins the name of a file where a flag would have a key."""

LONGEST_KEY = 1 << 16
"""Bytes of such a file."""

HIDDEN = "(hidden)"


def read_key(given: str | None) -> str | None:
    """The key that a flag gives: its value, or what the file holds that is named behind an `@`.
    Raises ValueError for a file that holds no key, and for a key that no header of HTTP can carry.
    """
    if given is None:
        return None
    if not given.startswith(FILE):
        if not (given.isascii() and given.isprintable()):
            raise ValueError("the key has characters that no header of HTTP can have.")
        return given
    name = given.removeprefix(FILE)
    try:
        key = read_text(Path(name), LONGEST_KEY).strip()
    except ValueError as error:
        raise ValueError(f"the key's file: {error}.") from None
    if not key or not (key.isascii() and key.isprintable()):
        raise ValueError(f"the key's file {name!r} must have one line of ASCII, the key.")
    return key


def with_hidden_keys(arguments: Any) -> Any:
    """A dictionary of arguments with `HIDDEN` in place of keys; anything else as it is."""
    if not isinstance(arguments, dict):
        return arguments
    hidden = {name: HIDDEN for name in SECRETS if arguments.get(name)}
    return arguments | hidden if hidden else arguments


def words_without_keys(command: Iterable[str]) -> list[str]:
    """The words of a command line with `HIDDEN` in place of keys."""
    words: list[str] = []
    follows = False
    for word in command:
        flag, equals, _ = word.partition("=")
        opens = not follows and _is_secret(flag)
        if follows or (opens and equals):
            word = HIDDEN if follows else f"{flag}={HIDDEN}"
        words.append(word)
        follows = opens and not equals
    return words


def _is_secret(flag: str) -> bool:
    """True for one of `FLAGS`, which may be cut short. --ssl-keyfile counts, too."""
    return flag.startswith("--") and len(flag) > 2 and any(each.startswith(flag) for each in FLAGS)


def hide_queries() -> None:
    """Let the HTTP server's access log leave out what stands behind a path: a request may name its
    tenant there.
    """
    log = logging.getLogger("uvicorn.access")
    if _without_query not in log.filters:
        log.addFilter(_without_query)


def _without_query(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(
            part.partition("?")[0] if isinstance(part, str) and part.startswith("/") else part
            for part in record.args
        )
    return True
