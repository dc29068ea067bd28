"""Start-up advice: one line for each setting that makes the cache inert or wasteful, with the flag
that mends it.

The numbers are those of one rank after its pools were allocated. The lines go into the log once and
into the report of /server_info.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from sglang_hybrid.core.costs.cost import TOKENS_PER_STATE

LONGEST = 16_384
"""KV tokens that one checkpoint can be expected to stand for at most. A turn leaves two or three
checkpoints, whether it is a chat's of some hundred tokens or an agent's of some ten thousand; with
more KV than this for each free slot, slots run out while most of the KV has never been used."""

SHORTEST = 32
"""KV tokens that it can be expected to stand for at least. With less KV than this for each free
slot, KV runs out while most of the slots have never been used."""

RADIX_CACHE_DISABLED = (
    "the prefix cache is off, so every prompt is computed from its start; leave out "
    "--disable-radix-cache."
)


def page_warnings(api_key: str | None, admin_api_key: str | None) -> list[str]:
    """The warning about a page (`--hybrid-ui`) that others than operators may open: one line, or
    none.
    """
    if admin_api_key:
        return []
    who = "every client, who has the API key," if api_key else "everybody who reaches the server"
    return [
        f"the page at /hybrid_cache/ shows what all tenants send, and {who} may open it; give "
        "--admin-api-key."
    ]


@dataclass(frozen=True)
class ServerSetup:
    """The settings and sizes that one rank of a server serves with.

    Args:
        slots: state slots that were allocated; 0 for a model without recurrent state.
        held: slots that a running request holds.
        counted: slots that it counts for when SGLang caps the running requests.
        running: requests that may run at once.
        asked: requests that were asked to, None if nobody asked.
        kv_tokens: size of the KV pool.
        state_bytes: of a slot.
        kv_bytes: of a KV token.
        kv_costs: KV tokens take memory, which they do not without any attention layer.
        one_memory: KV and states share their bytes, so neither can run out before the other.
        context: tokens of the longest request.
        page_size: tokens of a page.
        pages_needed: the attention backend needs pages of several tokens.
        planned: prefills leave the states that we want, and not those that SGLang tracks.
        unplanned: what keeps them from it, "" if nothing does.
        grid: tokens between the states that SGLang tracks.
        sent_by: SGLang's --load-balance-method, if it sends prompts to ranks that do not have their
            prefix; "" if none does.
        all_admitted: because of `--hybrid-admission all`.
        no_buffer: SGLang's strategy keeps states at the ends of prompts and answers only.
        no_buffer_asked: it was asked for by name.
        tuner_workers: processes of the tuner that were asked for.
        pinned: the flag that pins a policy and so leaves them nothing to do, "" without one.
        shards: ranks of DP attention, among which SGLang divides --max-mamba-cache-size and
            --max-running-requests; all numbers here are of one of them.
        spills: two pools lend each other room.
    """

    slots: int
    held: int
    counted: int | Fraction
    running: int
    asked: int | None
    kv_tokens: int
    state_bytes: int
    kv_bytes: int
    kv_costs: bool
    one_memory: bool
    context: int
    page_size: int
    pages_needed: bool
    planned: bool
    all_admitted: bool
    no_buffer: bool
    no_buffer_asked: bool
    tuner_workers: int = 0
    pinned: str = ""
    unplanned: str = ""
    grid: int = 1
    sent_by: str = ""
    shards: int = 1
    spills: bool = False

    @property
    def divided(self) -> bool:
        """True if KV and states have a pool each, which lend each other nothing."""
        return self.kv_costs and not (self.one_memory or self.spills)

    @property
    def free(self) -> int:
        """Slots for checkpoints when as many requests run as may."""
        return max(0, self.slots - self.running * self.held)

    @property
    def bytes(self) -> int:
        """The bytes of both pools. No advice needs more, since there may be no more."""
        return self.slots * self.state_bytes + self.kv_tokens * self.kv_bytes

    @property
    def usual(self) -> int:
        """KV tokens that one checkpoint usually stands for."""
        return min(TOKENS_PER_STATE, self.context)

    def tokens_beside(self, slots: int) -> int:
        """KV tokens that fit into the memory of both pools beside so many slots; negative if the
        slots do not fit.
        """
        return (self.bytes - slots * self.state_bytes) // self.kv_bytes


def advise(it: ServerSetup) -> list[str]:
    """The lines for a setting, none if there is nothing to mend."""
    states = (_running, _room, _balance, _branches, _grid)
    lines = [] if it.slots == 0 else [each(it) for each in states]
    return [line for line in (*lines, _pages(it), _ranks(it), _tuner(it)) if line]


def _running(it: ServerSetup) -> str | None:
    """The state pool caps the running requests below what was asked for."""
    if it.asked is None or it.running >= it.asked or it.slots // it.counted >= it.asked:
        return None
    fewer = f"lower --max-running-requests to {it.running * it.shards:,}"
    mends = [*_more_slots(it, ceil(it.asked * it.counted)), fewer]
    return (
        f"the {it.slots:,} state slots let {it.running:,} requests run at once instead of "
        f"{it.asked:,}, since each counts for {float(it.counted):g}; {', or '.join(mends)}."
    )


def _room(it: ServerSetup) -> str | None:
    """Each running request should find a slot for at least one checkpoint: the end of its answer,
    which the next turn resumes from.
    """
    if it.one_memory or it.spills or it.free >= it.running:
        return None
    mends = _more_slots(it, it.running * (it.held + 1))
    fewer = it.slots // (it.held + 1)
    if fewer:
        mends.append(f"lower --max-running-requests to {fewer * it.shards:,}")
    return (
        f"{it.running:,} running requests hold {it.slots - it.free:,} of the {it.slots:,} state "
        f"slots and leave {it.free:,} for checkpoints, less than one for each; "
        f"{', or '.join(mends) or 'the server needs more memory'}."
    )


def _more_slots(it: ServerSetup, slots: int) -> list[str]:
    """The flag for so many slots in the same memory, if the longest request still finds room."""
    tokens = it.tokens_beside(slots)
    if tokens < it.context:
        return []
    flag = f"raise --max-mamba-cache-size to {slots * it.shards:,}"
    return [f"{flag}, which leaves room for {tokens:,} KV tokens"]


def _balance(it: ServerSetup) -> str | None:
    """The two pools should run out at about the same time.

    KV without a state that leads to it gives no hits, and a slot without KV holds nothing. What
    traffic needs is not known at start, so only what suits no usual traffic is named: more than
    `LONGEST` KV tokens (or than the longest request has) for each slot that checkpoints can have,
    or less than `SHORTEST`.
    """
    if it.one_memory or it.spills or it.free < it.running:
        return None  # `_room` has said it
    each = it.kv_tokens / it.free
    slots_run_out = it.kv_costs and each > min(LONGEST, it.context)
    if not slots_run_out and each >= SHORTEST:
        return None
    slots, tokens = _balanced(it)
    if slots_run_out and slots <= it.slots:
        return None  # the longest request needs that much KV
    unused = "the KV is" if slots_run_out else "the slots are"
    return (
        f"{it.kv_tokens:,} KV tokens for {it.free:,} free state slots are {each:,.0f} for each, "
        f"so that {'slots run' if slots_run_out else 'KV runs'} out while most of {unused} unused; "
        f"use --max-mamba-cache-size {slots * it.shards:,} with --max-total-tokens {tokens:,}, "
        "which take the same memory."
    )


def _balanced(it: ServerSetup) -> tuple[int, int]:
    """Slots and KV tokens, in the memory that both pools have, with `usual` tokens for each slot
    that checkpoints can have; the longest request finds room.
    """

    def free(slots: int) -> float:
        return slots - it.held * min(it.asked or slots, slots / it.counted)

    def taken(slots: int) -> int:
        return slots * it.state_bytes + int(free(slots) * it.usual * it.kv_bytes)

    most = it.bytes // it.state_bytes
    slots = max(1, bisect_right(range(most + 1), it.bytes, key=taken) - 1)
    if it.tokens_beside(slots) < it.context:
        slots = max(1, (it.bytes - it.context * it.kv_bytes) // it.state_bytes)
    return slots, min(it.tokens_beside(slots), max(it.context, int(free(slots) * it.usual)))


def _branches(it: ServerSetup) -> str | None:
    """States at branches are what hybrid prefixes are shared by."""
    if it.planned or not it.no_buffer:
        return None
    if it.all_admitted:
        mend = "use --hybrid-admission judicious"
    elif it.no_buffer_asked:
        mend = "leave out --mamba-radix-cache-strategy no_buffer"
    else:
        mend = "use --mamba-radix-cache-strategy extra_buffer if the model can"
    return (
        "with SGLang's strategy no_buffer no state is kept where prompts branch, so that prompts "
        f"which share a beginning and then differ do not hit; {mend}."
    )


def _grid(it: ServerSetup) -> str | None:
    """States on SGLang's grid end hits there."""
    if it.planned or it.no_buffer or it.all_admitted:
        return None
    return (
        f"with {it.unplanned} states are taken where SGLang tracks them, on a grid of {it.grid:,} "
        f"tokens: hits end there, up to {it.grid - 1:,} tokens early, and prompts that share a "
        "beginning and then differ hit less; serve without it if the model allows."
    )


def _pages(it: ServerSetup) -> str | None:
    """Branches and hits lie on whole pages."""
    if it.page_size == 1:
        return None
    also = (
        " and an --attention-backend without pages, such as triton, if that is as fast here"
        if it.pages_needed
        else ""
    )
    slots = (
        f", and a running request holds {it.held} state slots instead of 1"
        if it.slots and it.planned and it.held > 1
        else ""
    )
    return (
        f"branches and hits are rounded down to pages of {it.page_size:,} tokens, up to "
        f"{it.page_size - 1:,} of which are computed again each time{slots}; use --page-size "
        f"1{also}."
    )


def _ranks(it: ServerSetup) -> str | None:
    """Each data-parallel rank has a cache of its own."""
    if not it.sent_by:
        return None
    return (
        f"--load-balance-method {it.sent_by} sends prompts to any rank, so that even the same one "
        f"may hit nothing; leave it out, and prompts go to the rank that has their prefix."
    )


def _tuner(it: ServerSetup) -> str | None:
    """Workers that try other policies, beside one that was asked for."""
    if not (it.tuner_workers and it.pinned):
        return None
    return (
        f"--hybrid-tuner-workers {it.tuner_workers} does nothing beside {it.pinned}, which pins "
        "the policy; leave out one of the two."
    )
