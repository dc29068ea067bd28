"""Schemas that clients registered, apart for each tenant, and what prompts did with them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_hybrid.core.records.shares import payer_of
from sglang_hybrid.core.returns.hints import MOST_POSITIONS
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.extensions.schemas.declared.described import described
from sglang_hybrid.extensions.schemas.declared.modular import Layout, ModularPrompt, modular
from sglang_hybrid.extensions.schemas.declared.resolve import (
    Import,
    Piece,
    Prompt,
    Resolved,
    read_prompt,
    resolve,
)
from sglang_hybrid.extensions.schemas.declared.saved import SavedSchemas
from sglang_hybrid.extensions.schemas.declared.schema import Schema, read_schema
from sglang_hybrid.extensions.schemas.declared.tokens import PromptTokenizer, Tokenized
from sglang_hybrid.serving.tenants import Tenant

MOST_SCHEMAS = 64
"""Schemas of one payer (`core/records/shares.py`)."""

MOST_TENANT_BYTES = 8 << 20
"""Bytes of all schemas of one payer."""

MOST_BYTES = 64 << 20
"""Bytes of all schemas of a server."""

MOST_OF_ALL = 1 << 14
"""Schemas of a server: the smallest one takes more memory than its bytes, and a new one is compared
with the bounds by looking at each.
"""

MOST_VALUES = 1_024
"""Values of parameters that are remembered for each schema."""


class NoSchema(ValueError):
    """The tenant has no schema of that name; the message is one sentence."""


@dataclass
class Registered:
    """A schema in use. tokenizer: of its tenant's texts. imports: how often each module was
    imported, by its path. values: hashes of parameters' values, the latest last. cached_tokens: of
    all prompts, from the cache. layout: for modular mode, once it was asked for. saved: whether it
    outlives the server. lengths: tokens of its texts, once they were asked for.
    """

    schema: Schema
    size: int
    tokenizer: PromptTokenizer
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    imports: Counter[tuple[str, ...]] = field(default_factory=Counter)
    values: OrderedDict[int, None] = field(default_factory=OrderedDict)
    layout: Layout | None = None
    saved: bool = False
    lengths: dict[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The schema's entry in a list of schemas."""
        return {
            "name": self.schema.name,
            "bytes": self.size,
            "saved": self.saved,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def as_dict(self) -> dict[str, Any]:
        """The answer to a request for the schema. Takes long if its texts are not tokenized yet."""
        parts = [described(part, self.length, self.imports) for part in self.schema.parts]
        return {**self.summary(), "parts": parts}

    def length(self, text: str) -> int:
        """Tokens of a text of the schema."""
        if text not in self.lengths:
            self.lengths[text] = self.tokenizer.length(text)
        return self.lengths[text]

    def seen(self, imports: Sequence[Import]) -> bool:
        """True if an earlier prompt had these values of parameters; they are remembered from now
        on.
        """
        key = hash(tuple(_values(imports)))
        known = key in self.values
        self.values[key] = None
        self.values.move_to_end(key)
        while len(self.values) > MOST_VALUES:
            self.values.popitem(last=False)
        return known


@dataclass(frozen=True)
class Draft:
    """The imports of a prompt from a schema, before they are tokenized."""

    registered: Registered
    prompt: Prompt
    resolved: Resolved

    def followed_by(self, text: str) -> Draft:
        """The same with new text behind it, as it is."""
        new = Piece(text, ())
        return replace(self, resolved=replace(self.resolved, pieces=(*self.resolved.pieces, new)))


@dataclass
class Expanded:
    """A prompt as token ids, and what its answer says of it. positions: declared ones. modular: its
    segments, if modules are computed apart. start: tokens before a chat's own messages.
    on_not_composed: called with `meta_info.hybrid_cache` if modules were not put together.
    """

    registered: Registered
    tokenized: Tokenized
    positions: list[int]
    warnings: Sequence[str]
    modular: ModularPrompt | None = None
    start: int = 0
    on_not_composed: Callable[[Mapping[str, Any]], None] = lambda told: None

    def on_answer(self, meta_info: Mapping[str, Any]) -> dict[str, Any]:
        """`meta_info.prompt` of an answer, or of a part of one that is streamed; the last part is
        counted, and has what may be long.
        """
        name = self.registered.schema.name
        is_last = meta_info.get("finish_reason") is not None
        if is_last:
            self.registered.prompt_tokens += meta_info.get("prompt_tokens", 0)
            self.registered.cached_tokens += meta_info.get("cached_tokens", 0)
        if self.modular is not None:
            told = modular_answer(meta_info, self.warnings, self.on_not_composed)
            return {"schema": name, **told}
        if not is_last:
            return {"schema": name}
        return {
            "schema": name,
            "ends": [
                {"module": "/".join(end.path), "position": end.position}
                for end in self.tokenized.ends
            ],
            "declared": self.positions,
            "warnings": list(self.warnings),
        }


def modular_answer(
    meta_info: Mapping[str, Any],
    warnings: Sequence[str],
    on_not_composed: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """`meta_info.prompt` of a prompt of segments. on_not_composed: see `Expanded`."""
    told = meta_info.get("hybrid_cache") or {}
    composed, why = told.get("composed_tokens"), told.get("composes_nothing")
    if composed == 0 and meta_info.get("finish_reason") is not None:
        on_not_composed(told)
    return {
        "mode": "modular",
        "exact": not composed,
        "warnings": [*warnings, *([why] if why else [])],
    }


class Registry:
    """All schemas of a server. Methods raise ValueError with a sentence.

    saved: where they outlive it, if they do.
    """

    def __init__(self, tokenizer: PromptTokenizer, saved: SavedSchemas | None = None) -> None:
        self.tokenizer = tokenizer
        self._saved = saved
        self._schemas: dict[Tenant, dict[str, Registered]] = {}
        self.whole = ""  # why the server's cache composes no prompt, once it has said so

    def register(self, tenant: Tenant, pml: str) -> Registered:
        """Keep a schema, in place of the tenant's earlier one of its name."""
        registered = self._registered(tenant, pml)
        own = self._own(tenant)
        name = registered.schema.name
        self._check_room(tenant, own, name, registered.size)
        self._schemas.setdefault(tenant, own)[name] = registered
        if self._saved is not None:
            registered.saved = self._saved.save(tenant, name, pml)
        return registered

    def _registered(self, tenant: Tenant, pml: str, *, saved: bool = False) -> Registered:
        tokenizer = self.tokenizer.of(tenant)
        return Registered(read_schema(pml), len(pml.encode()), tokenizer, saved=saved)

    def get(self, tenant: Tenant, name: str) -> Registered:
        """A schema of this tenant; raises NoSchema."""
        found = self._own(tenant).get(name)
        if found is None:
            raise NoSchema(
                f"there is no schema {quote(name)}; register it with POST /v1/prompt_schemas."
            )
        return found

    def size(self, tenant: Tenant, name: str) -> int:
        """Bytes of a schema of this tenant, 0 if there is none."""
        found = self._own(tenant).get(name)
        return 0 if found is None else found.size

    def of(self, tenant: Tenant) -> list[Registered]:
        """All schemas of this tenant, by name."""
        return [one for _, one in sorted(self._own(tenant).items())]

    def delete(self, tenant: Tenant, name: str) -> None:
        """Forget a schema; raises NoSchema. Its prompts stay in the cache like any others."""
        self.get(tenant, name)
        del self._schemas[tenant][name]
        if not self._schemas[tenant]:
            del self._schemas[tenant]
        if self._saved is not None:
            self._saved.delete(tenant, name)

    def _own(self, tenant: Tenant) -> dict[str, Registered]:
        """Schemas of a tenant by name; what was saved for it is read when it first comes."""
        known = self._schemas.get(tenant)
        if known is not None or self._saved is None:
            return known or {}
        found: dict[str, Registered] = {}
        for name, pml in self._saved.take(tenant).items():
            with suppress(ValueError):  # an earlier version of ours took it
                found[name] = self._registered(tenant, pml, saved=True)
        if found:
            self._schemas[tenant] = found
        return found

    def _check_room(
        self, tenant: Tenant, own: Mapping[str, Registered], name: str, size: int
    ) -> None:
        payer = payer_of(tenant)
        together = [
            one
            for other, kept in self._schemas.items()
            if payer_of(other) == payer
            for one in kept.values()
        ]
        if name not in own and len(together) >= MOST_SCHEMAS:
            raise ValueError(
                f"there are {len(together)} schemas already; a tenant may have {MOST_SCHEMAS}. "
                "Delete one first."
            )
        more = size - (own[name].size if name in own else 0)
        held = sum(one.size for one in together) + more
        if held > MOST_TENANT_BYTES:
            raise ValueError(
                f"the schemas would have {held:,} bytes; those of a tenant may have "
                f"{MOST_TENANT_BYTES:,}. Delete one first."
            )
        all_kept = [one for kept in self._schemas.values() for one in kept.values()]
        others, count = sum(one.size for one in all_kept), len(all_kept)
        if self._saved is not None:
            others += self._saved.waiting_bytes
            count += self._saved.waiting_count
        if name not in own and count >= MOST_OF_ALL:
            raise ValueError(
                f"all tenants together may have {MOST_OF_ALL:,} schemas, and they do; try again "
                "when others were deleted."
            )
        if others + more > MOST_BYTES:
            raise ValueError(
                f"the schemas of all tenants may have {MOST_BYTES:,} bytes, and this one would be "
                "too much; try again when others were deleted."
            )

    def expand(
        self,
        tenant: Tenant,
        asked: str | Prompt,
        *,
        text: str = "",
        whole: str = "",
        counts: bool = True,
    ) -> Expanded:
        """The tokens of a prompt, and the positions worth a checkpoint; the prompt is counted.

        asked: the prompt, or its markup. text: what stands behind it, as it is. whole: why this
        server cannot compute modules apart, a sentence; empty if it can. counts: False for a prompt
        that is only looked up, which leaves no trace.
        """
        draft = self.draft(tenant, read_prompt(asked) if isinstance(asked, str) else asked)
        if text:
            draft = draft.followed_by(text)
        tokenized = draft.registered.tokenizer.tokenized(draft.resolved)
        return self.counted(draft, tokenized, whole=whole, counts=counts)

    def draft(self, tenant: Tenant, prompt: Prompt) -> Draft:
        """The imports of a prompt of this tenant, in the schema's order."""
        registered = self.get(tenant, prompt.schema)
        return Draft(registered, prompt, resolve(registered.schema, prompt))

    def counted(
        self, draft: Draft, tokenized: Tokenized, *, whole: str = "", counts: bool = True
    ) -> Expanded:
        """A drafted prompt with the positions worth a checkpoint: ends of modules before the first
        value of a parameter, and behind it if these values came before. Its imports are counted.

        tokenized: the tokens of the draft. whole, counts: see `expand`.
        """
        registered, prompt, whole = draft.registered, draft.prompt, whole or self.whole
        warnings = [*draft.resolved.warnings, *([whole] if whole and prompt.modular else [])]
        segments = None
        if prompt.modular and not whole:
            segments = modular(self.layout(registered), draft.resolved)
        hot = False
        if counts:
            registered.requests += 1
            registered.imports.update(_paths(prompt.imports, ()))
            hot = registered.seen(prompt.imports)
        positions = [] if segments is not None else worthwhile(tokenized, hot=hot)
        return Expanded(registered, tokenized, positions, warnings, segments)

    def layout(self, registered: Registered) -> Layout:
        """The places of the schema's texts in modular mode; made once for each schema."""
        if registered.layout is None:
            registered.layout = Layout(registered.schema, registered.tokenizer)
        return registered.layout

    def expand_path(self, registered: Registered, imports: Sequence[Import]) -> Tokenized:
        """The tokens of a prompt that only imports."""
        prompt = Prompt(registered.schema.name, tuple(imports))
        return registered.tokenizer.tokenized(resolve(registered.schema, prompt))


def worthwhile(tokenized: Tokenized, *, hot: bool) -> list[int]:
    """Ends within the prompt that deserve checkpoints, ascending; the deepest, if many do. hot: the
    values of parameters came before.
    """
    last = len(tokenized.ids)
    found = {
        end.position
        for end in tokenized.ends
        if 0 < end.position < last and (hot or not end.values)
    }
    return sorted(found)[-MOST_POSITIONS:]


def _paths(imports: Sequence[Import], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for one in imports:
        yield (*path, one.name)
        yield from _paths(one.imports, (*path, one.name))


def _values(imports: Sequence[Import]) -> Iterator[Any]:
    for one in imports:
        yield one.name
        yield tuple(sorted(one.values.items()))
        yield from _values(one.imports)
