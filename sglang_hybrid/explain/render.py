"""A `MissReport` in words."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_hybrid.core.returns.answers import THRESHOLDS
from sglang_hybrid.explain.miss_report import (
    BelowDevice,
    CacheSnapshot,
    MissedCheckpoint,
    MissReport,
    Reason,
    Unstored,
    UnstoredReason,
)
from sglang_hybrid.serving.telemetry.stats import ChangingText

KINDS = {
    "branch": "branch point",
    "declared": "declared position",
    "message": "message start",
    "prompt_end": "prompt's end",
    "tail": "answer's end",
    "chunk": "chunk's end",
    "composed": "modules' end",
}
"""The position of a checkpoint of each kind, in words."""

FREE_SLOTS_ONLY = ("chunk", "prompt_end")
"""Kinds that push nothing out where nobody knows how often they come back
(core/checkpoints/admission.py)."""

LEAST_REMEDY_GAIN = 16
"""Tokens that a checkpoint must have saved for a flag to be named."""

UNLIKELY, LIKELY = THRESHOLDS

MOST_LISTED = 12
"""Positions that are named one by one."""


def render(report: MissReport) -> Iterator[str]:
    """The report, line by line."""
    request = report.request
    if request is not None:
        started = "" if request.started else ", which has not been prefilled yet"
        when = "" if request.when is None else f", {_ago(request.when)}"
        yield f"request {request.request_id}{when}{started}, found:"
    prompt = _count(report.prompt, "token")
    yield f"prompt      {prompt}; a hit can reach token {report.usable:,}"
    yield f"KV          stored to token {report.kv:,}"
    yield f"resumes at  {_resumed(report)}"
    if report.below is not None:
        yield f"below       {_below(report.below)}"
    yield f"to compute  {_count(report.prompt - report.hit, 'token')}"
    yield from _deeper(report)
    yield from _unstored(report)
    if report.leaves:
        yield f"Sent now, its prefill would leave states at {_positions(report.leaves)}."
    yield from _request(report)
    yield from _remembered(report)
    advice = remedy(report)
    if advice is not None:
        yield f"What would mend it: {advice}"


def remedy(report: MissReport) -> str | None:
    """The flag that would have kept the deepest checkpoint that a flag could keep, if one would."""
    cache = report.cache
    if report.request is not None and report.request.missed == "no_slot":
        return _more(cache, "states")
    unstored = report.unstored
    if unstored is not None and unstored.changing_text is not None:
        return (
            "text that changes with each request belongs behind text that stays the same; move the "
            f"one at token {unstored.changing_text.position:,} to the end of the prompt, or into "
            "the last message."
        )
    for missed in report.deeper:
        if missed.gain < LEAST_REMEDY_GAIN:
            continue
        if missed.reason in (Reason.NO_SLOT, Reason.NOT_WORTH):
            return _more(cache, "states")
        if missed.short is not None:
            return _more(cache, missed.short)
        if missed.reason is Reason.MICRO_BRANCH and missed.gain < cache.min_branch_tokens:
            return (
                f"SGLANG_HYBRID_MIN_BRANCH_TOKENS={missed.gain} or less; it is "
                f"{cache.min_branch_tokens}."
            )
        if missed.reason is Reason.GRID:
            return _exact(cache)
    if unstored is not None and unstored.why is UnstoredReason.EVICTED:
        return _more(cache, unstored.short or "kv")
    if unstored is not None and unstored.why is UnstoredReason.GRID:
        return _exact(cache)
    return None


def _below(below: BelowDevice) -> str:
    """The part that is not on the device, and whether it is loaded."""
    held = ["its state"] if below.state == "host" else []
    held += [f"KV of {_count(below.host_tokens, 'token')}"] if below.host_tokens else []
    verb = "is" if held == ["its state"] else "are"
    times = f"{1e3 * below.load_seconds:.3g} ms, computing {1e3 * below.compute_seconds:.3g} ms"
    end = {
        below.position: "it is loaded",
        0: "it is computed",
    }.get(below.resumes_at, f"the prefill resumes at token {below.resumes_at:,}")
    return (
        f"token {below.position:,}: {' and '.join(held)} {verb} in host memory; loading takes "
        f"{times}: {end}"
    )


def _resumed(report: MissReport) -> str:
    if report.request is not None and report.request.missed == "no_slot":
        return "token 0: a state was there, but no free slot to copy it into"
    used = report.checkpoint
    if used is None:
        if not report.cache.states:
            return f"token {report.hit:,}; this model needs no states"
        return "token 0: no checkpoint is on its path"
    about = []
    if used.kind is not None:
        about.append(_kind(used.kind))
    if used.taken is not None and used.hits is not None:
        hits = _count(used.hits, "hit")
        last = f", the last one {_ago(used.last_used)}" if used.hits else ""
        about.append(f"taken {_ago(used.taken)}, {hits}{last}")
    if used.return_expected is not None:
        about.append(_expected(used.return_expected))
    if used.pinned_for is not None:
        about.append(f"kept because pinned until {_span(used.pinned_for)} from now")
    return f"token {used.position:,}: " + ("; ".join(about) or "a checkpoint")


def _deeper(report: MissReport) -> Iterator[str]:
    if report.hit == report.usable:
        yield "Nothing was missed."
    if not report.deeper:
        return
    yield "Where a checkpoint would have helped, deepest first:"
    for missed in report.deeper[:MOST_LISTED]:
        kind = "" if missed.kind is None else f"{_kind(missed.kind)}: "
        why = _why(missed, report.cache)
        yield f"  token {missed.position:,} (+{missed.gain:,}) {kind}{why}"
    if len(report.deeper) > MOST_LISTED:
        yield f"  and {len(report.deeper) - MOST_LISTED} more (--json lists them)"


def _why(missed: MissedCheckpoint, cache: CacheSnapshot) -> str:
    when = f", {_ago(missed.when)}" if missed.when is not None else ""
    if missed.reason is Reason.EVICTED:
        return _evicted(missed)
    if missed.reason is Reason.NO_SLOT:
        return f"wanted{when}, but no slot was free and nothing could be pushed out"
    if missed.reason is Reason.NOT_WORTH:
        if missed.score is not None:
            worth = (
                f"{_score(missed.score)} against {_score(missed.victim_score)} by {missed.policy}"
            )
            return f"wanted{when}, but worth no more than the cheapest state ({worth}); pool full"
        if missed.kind in FREE_SLOTS_ONLY:
            return f"wanted{when}, but it takes free slots only; pool full"
        return f"wanted{when}, but worth no more than what it would have pushed out; pool full"
    if missed.reason is Reason.MICRO_BRANCH:
        if missed.gain < cache.min_branch_tokens:
            return f"a micro-branch: gains fewer than {cache.min_branch_tokens} tokens"
        return f"not taken{when}: within {cache.min_branch_tokens} tokens of another checkpoint"
    if missed.reason is Reason.GRID:
        return f"never stored: SGLang tracks states on a grid of {cache.grid} tokens"
    if missed.reason is Reason.NOT_WANTED:
        if missed.kind == "branch":
            return "never stored: no earlier prompt left the stored ones here"
        return "never stored: no prefill wanted a state here"
    return "no state; why is not remembered"


def _evicted(missed: MissedCheckpoint) -> str:
    said = (
        f"evicted {_ago(missed.when)} by {missed.policy}{_worth(missed.score)}, "
        f"when {_pool(missed.short)} ran short"
    )
    gets = missed.recipient
    if gets is not None:
        said += (
            f"; its slot went to the {_kind(gets.kind)} at token {gets.position:,} "
            f"of request {gets.request}{_worth(gets.score)}"
        )
    elif missed.short == "states":
        said += "; another request needed the slot"
    if missed.hits is not None and missed.unused is not None:
        said += f"; {_count(missed.hits, 'hit')}, unused for {_span(missed.unused)}"
    if missed.pinned:
        said += "; it was pinned, but all else was worth more or in use"
    if missed.return_expected is not None:
        said += f"; {_expected(missed.return_expected)}"
    return said


def _unstored(report: MissReport) -> Iterator[str]:
    rest = report.unstored
    if rest is None:
        return
    tokens = f"Tokens {rest.start:,} to {rest.end:,}"
    if rest.why is UnstoredReason.NEW:
        yield f"{tokens} were never sent before."
        return
    if rest.changing_text is not None:
        yield _changing(rest, rest.changing_text)
        return
    upto = "" if rest.known is None else f", which was sent before to token {rest.known:,},"
    if rest.why is UnstoredReason.GRID:
        yield (
            f"{tokens}: not stored{upto.removesuffix(',')}; SGLang keeps KV up to its last state, "
            f"on a grid of {report.cache.grid or 1} tokens."
        )
    elif rest.why is UnstoredReason.EVICTED:
        yield (
            f"{tokens}: KV from here on{upto} was evicted {_ago(rest.when)} by {rest.policy}, "
            f"when {_pool(rest.short)} ran short."
        )
    elif rest.why is UnstoredReason.GONE:
        yield f"{tokens}: KV from here on{upto} is gone; when it went is not remembered."
    else:
        yield f"{tokens} are not stored; whether they were ever sent is not remembered."


def _changing(rest: Unstored, found: ChangingText) -> str:
    numbers = {"line": rest.line, "message": found.message}
    where = [f"{name} {number:,}" for name, number in numbers.items() if number]
    place = f" ({', '.join(where)})" if where else ""
    return (
        f"At token {found.position:,}{place} a text of {_count(found.tokens, 'token')} differs "
        f"from an earlier prompt's; of the tokens behind it, {found.same_tokens:,} are the same, "
        "and cannot be hit."
    )


def _request(report: MissReport) -> Iterator[str]:
    request = report.request
    if request is None:
        return
    if request.left:
        yield f"It left states at {_positions(request.left)}."
    for missed in request.refused:
        kind = "" if missed.kind is None else f" ({_kind(missed.kind)})"
        yield f"It left none at token {missed.position:,}{kind}: {_why(missed, report.cache)}."
    yield f"Sent again now, it would resume at token {request.now:,}."


def _remembered(report: MissReport) -> Iterator[str]:
    cache = report.cache
    if not cache.recorded:
        yield (
            "Under --hybrid-eviction sglang-lru nothing is recorded of states that were skipped or "
            "evicted, nor of when a state was taken and used."
        )
    elif cache.full and any(missed.reason is Reason.UNKNOWN for missed in report.deeper):
        yield "Older decisions are forgotten."
    if cache.emptied is not None and (report.deeper or report.unstored):
        yield f"The cache was emptied {_ago(cache.emptied)}; older decisions are forgotten."


def _exact(cache: CacheSnapshot) -> str | None:
    """The settings that let the cache take states at any position."""
    if cache.admission == "all":
        return "--hybrid-admission judicious, which takes exact states."
    return f"a server without {cache.unplanned}, which takes exact states."


def _more(cache: CacheSnapshot, short: str) -> str:
    """The flags that give more of the pool that ran short ("states" or "kv")."""
    if cache.shared_bytes is not None:
        return (
            f"more memory: KV and states share {cache.shared_bytes:,} bytes; a larger "
            "--max-total-tokens, --max-mamba-cache-size or --mem-fraction-static makes them more."
        )
    if short == "states" and cache.state_slots is not None:
        return (
            f"more state slots: --max-mamba-cache-size above {cache.state_slots:,}, "
            "or a larger --mamba-full-memory-ratio."
        )
    more = f"more KV: --max-total-tokens above {cache.kv_room:,}, or a larger --mem-fraction-static"
    if cache.state_slots is None:
        return more + "."
    return (
        f"{more}; or a smaller --mamba-full-memory-ratio, where /server_info shows that state "
        "slots stay free."
    )


def _kind(kind: str) -> str:
    return KINDS.get(kind, kind)


def _pool(short: str | None) -> str:
    return {"states": "state slots", "kv": "KV"}.get(short or "", "room")


def _expected(p: float) -> str:
    """The return that the last answer there, or the client, let expect."""
    if p > LIKELY:
        return f"kept longer, for after such an answer somebody comes back (p = {p:.2f})"
    if p <= UNLIKELY:
        return f"kept shorter, for after such an answer nobody comes back (p = {p:.2f})"
    return f"after such an answer somebody may come back (p = {p:.2f})"


def _worth(score: float | None) -> str:
    return "" if score is None else f" (worth {_score(score)})"


def _score(score: float | None) -> str:
    """Scores compare within one policy only; below 0, nobody is expected to come back."""
    return "nothing" if score is None or score < 0 else f"{score:.3g}"


def _positions(places: list[tuple[int, str]]) -> str:
    return ", ".join(f"{position:,} ({_kind(kind)})" for position, kind in places)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "at an unknown time"
    return "just now" if seconds == 0 else f"{_span(seconds)} ago"


def _span(seconds: float) -> str:
    """A span of seconds, to about two digits."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + "s" * (number != 1)
