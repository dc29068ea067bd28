"""Fields that patch 0040 adds to SGLang's models of requests.

Every process of SGLang imports those models, so this file imports nothing of ours.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Lifetime = Literal["30m", "12h"]
DEFAULT_LIFETIME: Lifetime = "30m"


class PromptCacheBreakpoint(BaseModel):
    """Marks the end of a reusable prefix at a content part."""

    mode: Literal["explicit"] = "explicit"
    ttl: Lifetime | None = None


class PromptCacheOptions(BaseModel):
    """The options of a whole request. ttl: for breakpoints without one of their own.
    comparison_response_id: of the response whose prompt this one is compared with (/v1/responses).
    """

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Lifetime = DEFAULT_LIFETIME
    comparison_response_id: str | None = None


class ImportedModule(BaseModel):
    """A module that a chat imports. parameters: values by name. imports: modules within it."""

    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, str] = {}
    imports: list[str | ImportedModule] = []


class PromptSchema(BaseModel):
    """A registered schema, and what a chat imports from it; a text is a module's name."""

    model_config = ConfigDict(extra="forbid")

    name: str
    imports: list[str | ImportedModule] = []
    mode: Literal["exact", "modular"] = "exact"
