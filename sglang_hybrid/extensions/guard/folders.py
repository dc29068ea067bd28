"""Checks where a request may have the server write: only where the operator said, unless it came
with the operator's key (patch 0015). SGLang writes into any folder that a request names.
"""

from __future__ import annotations

import os
from http import HTTPStatus
from pathlib import Path
from typing import Any

from sglang_hybrid.core.sentences import quote
from sglang_hybrid.serving.requests.errors import Refused

DUMPS = ("dump_requests_folder", "crash_dump_folder")
"""Folders for copies of requests and answers, those of all tenants."""

PROFILES = "SGLANG_TORCH_PROFILER_DIR"
"""The environment variable that names the operator's folder for profiles; /tmp without it."""


def check_folders(request: Any, admin_key: str | None) -> None:
    """Raise `Refused` (403) if `request` names a folder and the server has no admin key. With one,
    the routes that take folders want it.
    """
    if admin_key:
        return
    for name in DUMPS:
        folder = getattr(request, name, None)
        if folder:
            raise Refused(
                f"{name} is {quote(folder)}; requests name no folder on a server without "
                "--admin-api-key.",
                HTTPStatus.FORBIDDEN,
            )
    folder = getattr(request, "output_dir", None)
    if folder and not _within(folder, profiles := profile_folder()):
        raise Refused(
            f"output_dir is {quote(folder)}; on a server without --admin-api-key it must be "
            f"in {profiles} ({PROFILES}).",
            HTTPStatus.FORBIDDEN,
        )


def profile_folder() -> str:
    """The folder of profiles."""
    return os.environ.get(PROFILES, "/tmp")


def _within(folder: str, root: str) -> bool:
    try:
        path = Path(folder).expanduser().resolve()
        return path.is_relative_to(Path(root).expanduser().resolve())
    except (OSError, ValueError, RuntimeError):
        return False
