"""`--hybrid-prewarm FILE`: prompts and schemas that a server computes when it has started."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import requests

from sglang_hybrid.core.named_files import MOST_BYTES, decode_json, read_text
from sglang_hybrid.serving.routes import SCHEMAS_PATH
from sglang_hybrid.serving.tenants import FIELDS

logger = logging.getLogger(__name__)

TIMEOUT = 600.0
"""Seconds that one line may take."""


Posts: TypeAlias = list[tuple[str, dict[str, Any]]]
"""Requests to make in turn, as path and body."""


def read_lines(path: Path) -> dict[int, Posts]:
    """The requests of each line of a file, by the line's number. Raises ValueError with a sentence
    that names file and line.

    Each line is a JSON object: the body of a chat completion (`messages`), that of a /generate
    (`text`, `input_ids` or `pml`), or a schema (`schema`, and how much memory its prefixes may
    take: `budget_mb`).
    """
    text = read_text(path, MOST_BYTES)
    found: dict[int, Posts] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            body = decode_json(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON: {error}.") from None
        try:
            posts = [*_posts(body)] if isinstance(body, dict) else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not posts:
            raise ValueError(
                f"{path}, line {number}: an object with messages, text, input_ids, pml or schema "
                "is wanted."
            )
        found[number] = posts
    return found


def prewarm(path: Path, url: str, key: str | None) -> int:
    """Compute what a file asks for on the server at `url`; returns how many lines were. What the
    server refuses is logged.

    key: for the header of each request.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    done = 0
    lines = read_lines(path)
    for number, posts in lines.items():
        for where, body in posts:
            try:
                answer = requests.post(url + where, json=body, headers=headers, timeout=TIMEOUT)
            except requests.RequestException as error:
                logger.warning("sglang_hybrid: pre-warming ends at line %d: %s", number, error)
                return done
            if not answer.ok:
                logger.warning(
                    "sglang_hybrid: line %d of %s was refused: %s", number, path, answer.text
                )
                break
        else:
            done += 1
    logger.info("sglang_hybrid: %d of %d lines of %s are pre-warmed.", done, len(lines), path)
    return done


def prewarm_if_asked(server_args: Any) -> None:
    """Prewarms a server that is ready for requests, before anybody is told so."""
    from sglang_hybrid.serving.config import HybridConfig

    file = HybridConfig.from_environment().hybrid_prewarm
    if file:
        key = server_args.admin_api_key or server_args.api_key
        prewarm(Path(file), server_args.url(), key)


def _posts(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if "schema" in body:
        tenant = {name: body[name] for name in FIELDS if name in body}
        yield SCHEMAS_PATH, {"pml": body["schema"], **tenant}
        if "budget_mb" in body:
            name = _name_of(str(body["schema"]))
            yield (
                f"{SCHEMAS_PATH}/{name}/prewarm",
                {"budget_mb": body["budget_mb"], **tenant},
            )
    elif "messages" in body:
        nothing = {"max_tokens": 0, "max_completion_tokens": None}
        yield "/v1/chat/completions", {"model": "default", **body, **nothing}
    elif {"text", "input_ids", "pml"} & body.keys():
        given = body.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise ValueError("sampling_params is no object.")
        sampling = {**given, "max_new_tokens": 0}
        yield "/generate", {**body, "sampling_params": sampling}


def _name_of(schema: str) -> str:
    from sglang_hybrid.extensions.schemas.declared.schema import read_schema

    return read_schema(schema).name
