"""What a server does not tell: the keys that it was started with (patch 0014), and in its log the
tenants that requests name in their addresses (patch 0067).
"""

import logging
import shlex
from typing import Any

from sglang.srt.utils.msgspec_utils import msgspec_to_builtins

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""SGLang's arguments that open something."""

COMMAND = "launch_command"
HIDDEN = "(hidden)"


def without_keys(info: dict[str, Any]) -> dict[str, Any]:
    """What /server_info tells, as plain values: who may read it has the ordinary key at most."""
    told: dict[str, Any] = msgspec_to_builtins(info)
    secrets = {str(told[name]) for name in SECRETS if told.get(name)}
    return {key: _hide(key, value, secrets) for key, value in told.items()}


def _hide(key: str, value: Any, secrets: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _hide(name, part, secrets) for name, part in value.items()}
    if isinstance(value, list):
        return [_hide(key, part, secrets) for part in value]
    if key in SECRETS and value:
        return HIDDEN
    if key == COMMAND and isinstance(value, str):
        return shlex.join(_hide_word(word, secrets) for word in shlex.split(value))
    return value


def _hide_word(word: str, secrets: set[str]) -> str:
    flag, _, value = word.partition("=")
    if value in secrets:
        return f"{flag}={HIDDEN}"
    return HIDDEN if word in secrets else word


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
