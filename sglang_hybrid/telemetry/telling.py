"""An `Account` in words."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_hybrid.telemetry.account import Account, Gap, House, Reason, Rest

KINDS = {
    "branch": "branch point",
    "message": "message start",
    "prompt_end": "prompt's end",
    "tail": "answer's end",
    "chunk": "chunk's end",
}
"""What a checkpoint of each kind stands at."""

FREE_SLOTS_ONLY = ("chunk", "prompt_end")
"""Kinds that push nothing out where nobody knows how often they come back (core/admission.py)."""

WORTH_MENDING = 16
"""Tokens that a checkpoint must have saved for a flag to be named."""

SHOWN = 12
"""Positions that are told one by one."""


def tell(account: Account) -> Iterator[str]:
    """The account, line by line."""
    request = account.request
    if request is not None:
        started = "" if request.started else ", which has not been prefilled yet"
        when = "" if request.when is None else f", {_ago(request.when)}"
        yield f"request {request.request_id}{when}{started}, found:"
    prompt = _count(account.prompt, "token")
    yield f"prompt      {prompt}; a hit can reach token {account.usable:,}"
    yield f"KV          stored to token {account.kv:,}"
    yield f"resumes at  {_resumed(account)}"
    yield f"to compute  {_count(account.prompt - account.hit, 'token')}"
    yield from _deeper(account)
    yield from _unstored(account)
    if account.leaves:
        yield f"Sent now, its prefill would leave states at {_positions(account.leaves)}."
    yield from _request(account)
    yield from _remembered(account)
    advice = mend(account)
    if advice is not None:
        yield f"What would mend it: {advice}"


def mend(account: Account) -> str | None:
    """The flag that would have kept the deepest checkpoint that a flag could keep, if one would."""
    house = account.house
    if account.request is not None and account.request.missed == "no_slot":
        return _more_slots(house)
    for gap in account.deeper:
        if gap.gain < WORTH_MENDING:
            continue
        if gap.reason in (Reason.NO_SLOT, Reason.NOT_WORTH) or gap.short == "states":
            return _more_slots(house)
        if gap.short == "kv":
            return _more_kv(house)
        if gap.reason is Reason.MICRO_BRANCH and gap.gain < house.min_branch_tokens:
            return (
                f"--hybrid-min-branch-tokens {gap.gain} or less; it is {house.min_branch_tokens}."
            )
        if gap.reason is Reason.GRID and house.admission == "all":
            return "--hybrid-admission judicious, which takes exact states."
    unstored = account.unstored
    if unstored is not None and unstored.why is Rest.EVICTED:
        return _more_slots(house) if unstored.short == "states" else _more_kv(house)
    return None


def _resumed(account: Account) -> str:
    if account.request is not None and account.request.missed == "no_slot":
        return "token 0: a state was there, but no free slot to copy it into"
    used = account.checkpoint
    if used is None:
        if not account.house.states:
            return f"token {account.hit:,}; this model needs no states"
        return "token 0: no checkpoint is on its path"
    about = []
    if used.kind is not None:
        about.append(KINDS.get(used.kind, used.kind))
    if used.taken is not None and used.hits is not None:
        hits = _count(used.hits, "hit")
        last = f", the last one {_ago(used.last_used)}" if used.hits else ""
        about.append(f"taken {_ago(used.taken)}, {hits}{last}")
    return f"token {used.position:,}: " + ("; ".join(about) or "a checkpoint")


def _deeper(account: Account) -> Iterator[str]:
    if account.hit == account.usable:
        yield "Nothing was missed."
    if not account.deeper:
        return
    yield "Where a checkpoint would have helped, deepest first:"
    for gap in account.deeper[:SHOWN]:
        kind = "" if gap.kind is None else f"{KINDS.get(gap.kind, gap.kind)}: "
        why = _why(gap, account.house)
        yield f"  token {gap.position:,} (+{gap.gain:,}) {kind}{why}"
    if len(account.deeper) > SHOWN:
        yield f"  and {len(account.deeper) - SHOWN} more (--json lists them)"


def _why(gap: Gap, house: House) -> str:
    when = f", {_ago(gap.when)}" if gap.when is not None else ""
    if gap.reason is Reason.EVICTED:
        return _evicted(gap)
    if gap.reason is Reason.NO_SLOT:
        return f"wanted{when}, but no slot was free and nothing could be pushed out"
    if gap.reason is Reason.NOT_WORTH:
        if gap.score is not None:
            worth = f"{_score(gap.score)} against {_score(gap.against)} by {gap.policy}"
            return f"wanted{when}, but worth no more than the cheapest state ({worth}); pool full"
        if gap.kind in FREE_SLOTS_ONLY:
            return f"wanted{when}, but it takes free slots only; pool full"
        return f"wanted{when}, but worth no more than what it would have pushed out; pool full"
    if gap.reason is Reason.MICRO_BRANCH:
        if gap.gain < house.min_branch_tokens:
            return f"a micro-branch: gains fewer than {house.min_branch_tokens} tokens"
        return f"not taken{when}: within {house.min_branch_tokens} tokens of another checkpoint"
    if gap.reason is Reason.GRID:
        return f"never stored: SGLang tracks states on a grid of {house.grid} tokens"
    if gap.reason is Reason.NOT_WANTED:
        if gap.kind == "branch":
            return "never stored: no earlier prompt left the stored ones here"
        return "never stored: no prefill wanted a state here"
    return "no state; why is not remembered"


def _evicted(gap: Gap) -> str:
    short = {"states": "state slots", "kv": "KV"}.get(gap.short or "", "room")
    said = f"evicted {_ago(gap.when)} by {gap.policy}{_worth(gap.score)}, when {short} ran short"
    if gap.taker is not None:
        kind = KINDS.get(gap.taker.kind, gap.taker.kind)
        said += (
            f"; its slot went to the {kind} at token {gap.taker.position:,} "
            f"of request {gap.taker.request}{_worth(gap.taker.score)}"
        )
    elif gap.short == "states":
        said += "; another request needed the slot"
    if gap.hits is not None and gap.unused is not None:
        said += f"; {_count(gap.hits, 'hit')}, unused for {_span(gap.unused)}"
    return said


def _unstored(account: Account) -> Iterator[str]:
    rest = account.unstored
    if rest is None:
        return
    tokens = f"Tokens {rest.start:,} to {rest.end:,}"
    if rest.why is Rest.NEW:
        yield f"{tokens} were never sent before."
        return
    upto = "" if rest.known is None else f", which was sent before to token {rest.known:,},"
    if rest.why is Rest.EVICTED:
        short = {"states": "state slots", "kv": "KV"}.get(rest.short or "", "room")
        yield (
            f"{tokens}: KV from here on{upto} was evicted {_ago(rest.when)} by {rest.policy}, "
            f"when {short} ran short."
        )
    elif rest.why is Rest.GONE:
        yield f"{tokens}: KV from here on{upto} is gone; when it went is not remembered."
    else:
        yield f"{tokens} are not stored; whether they were ever sent is not remembered."


def _request(account: Account) -> Iterator[str]:
    request = account.request
    if request is None:
        return
    if request.left:
        yield f"It left states at {_positions(request.left)}."
    for gap in request.refused:
        kind = "" if gap.kind is None else f" ({KINDS.get(gap.kind, gap.kind)})"
        yield f"It left none at token {gap.position:,}{kind}: {_why(gap, account.house)}."
    yield f"Sent again now, it would resume at token {request.now:,}."


def _remembered(account: Account) -> Iterator[str]:
    house = account.house
    if not house.recorded:
        yield (
            "Under --hybrid-eviction lru nothing is recorded of states that were skipped or "
            "evicted, nor of when a state was taken and used."
        )
    elif house.full and any(gap.reason is Reason.UNKNOWN for gap in account.deeper):
        yield "Older decisions are forgotten."
    if house.emptied is not None and (account.deeper or account.unstored):
        yield f"The cache was emptied {_ago(house.emptied)}; what was noted before is gone."


def _more_slots(house: House) -> str:
    return (
        f"more state slots: --max-mamba-cache-size above {house.state_slots:,}, "
        "or a larger --mamba-full-memory-ratio."
    )


def _more_kv(house: House) -> str:
    more = f"more KV: --max-total-tokens above {house.kv_room:,}, or a larger --mem-fraction-static"
    if house.state_slots is None:
        return more + "."
    return (
        f"{more}; or a smaller --mamba-full-memory-ratio, where /server_info shows that state "
        "slots stay free."
    )


def _worth(score: float | None) -> str:
    return "" if score is None else f" (worth {_score(score)})"


def _score(score: float | None) -> str:
    """Scores compare within one policy only; below 0, nobody is expected to come back."""
    return "nothing" if score is None or score < 0 else f"{score:.3g}"


def _positions(places: list[tuple[int, str]]) -> str:
    return ", ".join(f"{position:,} ({KINDS.get(kind, kind)})" for position, kind in places)


def _ago(seconds: float | None) -> str:
    if seconds is None:
        return "at an unknown time"
    return "just now" if seconds == 0 else f"{_span(seconds)} ago"


def _span(seconds: float) -> str:
    """To about two digits."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + "s" * (number != 1)
