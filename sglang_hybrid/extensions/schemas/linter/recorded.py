"""Finds what keeps recorded prompts from being cached, and the reorder that would save most.

Each prompt is compared with the earlier ones of its tenant. Where text that they share stands
behind text that varies, it was computed again; in the other order it would have been a hit. What
that saved is added up over the requests that were seen, so no probability is assumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from sglang_hybrid.core.records.edges import common_prefix
from sglang_hybrid.core.traffic.requests import Request, TokenArray
from sglang_hybrid.explain.changing_text import line_of
from sglang_hybrid.extensions.lab.simulation.prefill_time import PrefillTime
from sglang_hybrid.extensions.schemas.linter.alignment import RUN, Aligner, Alignment, EqualBlock
from sglang_hybrid.extensions.schemas.linter.lint import DATES

LEAST_TOKENS = 32
"""Tokens that a request would save by a change, for it to count."""

LEAST_REQUESTS = 3
"""Requests in which something is seen, for it to be reported."""

LEAST_SHARE = 0.005
"""Share of a tenant's prompt tokens that a change would save, for it to be reported."""

LONGEST_VALUE = 64
"""Tokens of the longest parameter; longer text that varies is a part of the prompt."""

MOST_EXAMPLES = 32
"""Examples of a change that are looked at."""

EXAMPLE_TOKENS = 24
"""Tokens of a varying text that are shown, at most."""

Decode = Callable[[Sequence[int]], str]


CONTEXT = 8
"""Tokens on either side of a varying text, in which it may be a part of a date or an id."""


@dataclass(frozen=True)
class Example:
    """A text that varies, and the tokens around it."""

    before: tuple[int, ...]
    value: tuple[int, ...]
    after: tuple[int, ...]

    def in_a_date_or_id(self, decode: Decode) -> bool:
        """True if any of it is a part of one."""
        start = len(decode(self.before))
        end = len(decode(self.before + self.value))
        text = decode(self.before + self.value + self.after)
        return any(match.start() <= end and match.end() >= start for match in DATES.finditer(text))


@dataclass
class Change:
    """One change to prompts. requests: how many it would help. tokens, seconds: what all of these
    would save. values: the texts that vary, as token ids, with their counts. places: positions at
    which those texts begin. shared: for each request, tokens behind the varying text that an
    earlier prompt has too. before: tokens of a prompt before its varying text. message: number of
    the client's message that has that text, from 1 on; 0 where that is not known.
    """

    rule: str
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    values: Counter[tuple[int, ...]] = field(default_factory=Counter)
    places: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    before: TokenArray = field(default_factory=lambda: np.zeros(0, np.int32))
    message: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class TenantReport:
    """The findings about the prompts of one tenant. tenant: its name in the trace. requests,
    prompt_tokens: in all. hit_tokens: tokens that an unbounded cache would hit. changes: those that
    save most first. short: the number of places where prompts part that are worth less than a
    state, and of requests that pass them.
    """

    tenant: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    changes: list[Change]
    short: tuple[int, int] = (0, 0)


def analyse(
    requests: Iterable[Request], prefill: PrefillTime, decode: Decode | None, state_tokens: int = 0
) -> list[TenantReport]:
    """A report for each tenant, the one with most prompt tokens first.

    prefill: how long prefills take. decode: text of tokens; None if it is not known. state_tokens:
    tokens whose KV takes as much memory as a state; 0 if that is not known.
    """
    apart: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        apart[request.tenant].append(request)
    found = [_Tenant(prefill, decode).report(name, own) for name, own in apart.items()]
    if state_tokens:
        for report in found:
            report.short = short_branches([_prompt(r) for r in apart[report.tenant]], state_tokens)
    return sorted(found, key=lambda report: -report.prompt_tokens)


def sentences(report: TenantReport, decode: Decode | None, state_tokens: int) -> Iterator[str]:
    """The findings to tell of a tenant: a rule and a sentence in each line."""
    for change in report.changes:
        yield f"{change.rule}: {_sentence(change, report.requests, decode)}"
    branches, passing = report.short
    if branches:
        yield (
            f"short-module: prompts part less than {state_tokens:,} tokens behind the place before "
            f"in {branches:,} places, which requests pass {passing:,} times; a state takes the "
            "memory of that much KV. Join short parts with a neighbour if it can be."
        )


def short_branches(prompts: Sequence[TokenArray], state_tokens: int) -> tuple[int, int]:
    """Places where prompts part that lie fewer than `state_tokens` behind the place before, and the
    requests that pass them. Places that fewer than three requests pass are left out.
    """
    ordered = sorted(prompts, key=lambda tokens: tokens.astype(">i4").tobytes())
    shared = [common_prefix(one, other) for one, other in pairwise(ordered)]
    branches = passing = 0
    open_: list[list[int]] = [[0, 0]]  # depth, and the first prompt below
    for at, depth in enumerate([*shared, 0]):
        first = at
        while depth < open_[-1][0]:
            deep, first = open_.pop()
            above = max(depth, open_[-1][0])
            count = at + 1 - first
            if count >= LEAST_REQUESTS and 0 < deep - above < state_tokens:
                branches, passing = branches + 1, passing + count
        if depth > open_[-1][0]:
            open_.append([depth, first])
    return branches, passing


class _Tenant:
    """Compares the prompts of one tenant and adds up what changes would save."""

    def __init__(self, prefill: PrefillTime, decode: Decode | None) -> None:
        self._prefill = prefill
        self._decode = decode
        self._changes: dict[tuple[str, int], Change] = {}

    def report(self, name: str, requests: Sequence[Request]) -> TenantReport:
        aligner = Aligner()
        hits = total = 0
        for request in requests:
            prompt = _prompt(request)
            found = aligner.add(prompt, request.tokens[request.input_len :])
            hits += min(found.shared, len(prompt) - 1)
            total += len(prompt)
            self._weigh(request, found)
        kept = [
            change
            for change in self._changes.values()
            if change.requests >= LEAST_REQUESTS and change.tokens >= LEAST_SHARE * total
        ]
        for change in kept:
            if change.rule == "varying":
                change.rule = self._kind(change)
        kept.sort(key=lambda change: -change.tokens)
        return TenantReport(name, len(requests), total, hits, kept)

    def _weigh(self, request: Request, found: Alignment) -> None:
        blocks = list(found.blocks)
        hit = found.shared
        end = hit
        moved = _moved(blocks)
        if moved:
            tokens = sum(block.length for block in moved)
            key = ("changing-order", moved[-1].anchor)
            self._add(key, request, hit, hit, tokens, hit)
            hit, end = hit + tokens, moved[-1].end
            blocks = blocks[len(moved) :]
        for block in blocks:
            self._add(("varying", block.anchor), request, end, block.here, block.length, hit)
            hit, end = hit + block.length, block.end

    def _add(
        self,
        key: tuple[str, int],
        request: Request,
        start: int,
        stop: int,
        tokens: int,
        hit: int,
    ) -> None:
        """A request whose tokens from `start` to `stop` vary would hit `tokens` more than `hit`."""
        if tokens < LEAST_TOKENS:
            return
        prompt = _prompt(request)
        change = self._changes.get(key)
        if change is None:
            message = sum(begin <= start for begin in request.message_starts)
            change = self._changes[key] = Change(key[0], before=prompt[:start], message=message)
        change.requests += 1
        change.tokens += tokens
        new = len(prompt) - hit
        change.seconds += self._prefill.seconds(hit, new) - self._prefill.seconds(
            hit + tokens, new - tokens
        )
        around = prompt[max(0, start - CONTEXT) : stop + CONTEXT].tolist()
        at = min(start, CONTEXT)
        example = Example(
            tuple(around[:at]),
            tuple(around[at : at + stop - start]),
            tuple(around[at + stop - start :]),
        )
        change.values[example.value] += 1
        if len(change.examples) < MOST_EXAMPLES:
            change.examples.append(example)
        change.places.append(start)
        change.shared.append(tokens)

    def _kind(self, change: Change) -> str:
        if self._decode is not None:
            dates = [one.in_a_date_or_id(self._decode) for one in change.examples]
            if 2 * sum(dates) > len(dates):
                return "changing-text"
        lengths = [len(value) for value in change.values.elements()]
        return "early-parameter" if median(lengths) <= LONGEST_VALUE else "early-choice"


def _moved(blocks: Sequence[EqualBlock]) -> list[EqualBlock]:
    """The blocks of the later prompt that stand in another order than in the earlier one.

    It is the beginning of `blocks`, up to the last pair whose order has changed, and the block
    behind it if that follows within `RUN` tokens. Empty if the order is the same.
    """
    furthest, last = -1, 0
    for number, block in enumerate(blocks):
        if block.there < furthest:
            last = number + 1
        furthest = max(furthest, block.there)
    if last and last < len(blocks) and blocks[last].here - blocks[last - 1].end < RUN:
        last += 1
    return list(blocks[:last])


def _prompt(request: Request) -> TokenArray:
    return request.tokens[: request.input_len]


def _sentence(change: Change, requests: int, decode: Decode | None) -> str:
    place = f"at token {int(median(change.places)):,}{_place(change, decode)}"
    seen = f"in {change.requests:,} of {requests:,} requests"
    saved = (
        f"{change.tokens / requests:,.0f} tokens and {change.seconds / requests:.3f} s saved per "
        "request"
    )
    shared = int(median(change.shared))
    if change.rule == "changing-order":
        return (
            f"{place}, {seen}, the same {shared:,} tokens come in another order than before; "
            f"keep one order: {saved}."
        )
    lengths = [len(value) for value in change.values.elements()]
    likely = np.array(list(change.values.values())) / change.requests
    bits = abs(float((likely * np.log2(likely)).sum()))
    what = {
        "changing-text": "a date or an id",
        "early-parameter": "a short text that varies",
        "early-choice": "a part that varies",
    }[change.rule]
    return (
        f"{place}, {seen}, {what} ({len(change.values):,} values of about {median(lengths):,.0f} "
        f"tokens, {bits:.1f} bits{_examples(change, decode)}) stands before {shared:,} tokens that "
        f"an earlier prompt has, too; move it behind them: {saved}."
    )


def _place(change: Change, decode: Decode | None) -> str:
    """Line and message of the first prompt in which it was seen."""
    numbers = {
        "line": 0 if decode is None else line_of(decode(change.before.tolist())),
        "message": change.message,
    }
    known = [f"{name} {number:,}" for name, number in numbers.items() if number]
    return f" ({', '.join(known)})" if known else ""


def _examples(change: Change, decode: Decode | None) -> str:
    if decode is None:
        return ""
    shown = [one.before + one.value[:EXAMPLE_TOKENS] for one in change.examples[:2]]
    return ", as in " + " and ".join(repr(decode(ids).strip()) for ids in shown)
