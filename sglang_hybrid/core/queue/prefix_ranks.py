"""Chooses the data-parallel rank that a prompt is sent to: where least is left to do before its
answer.

Each rank has a cache of its own. A prompt that was sent to a rank is taken to be cached there,
whatever the rank has evicted since; it is remembered for each tenant apart, in whole blocks.

    left(rank) = tokens that wait there to be computed
               + REQUEST_TOKENS for each request there, waiting or running
               + AGAIN times the tokens of the prompt that the rank does not know

So a prompt goes where its prefix is, or is being computed, and a prefix that many ask for at once
gets a second rank when that is worth computing it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Final

import numpy as np

from sglang_hybrid.core.records.latest import Latest

BLOCK: Final = 64
"""Tokens. What is shorter is sent by load alone."""

REQUEST_TOKENS: Final = 64
"""The cost of a request to others on its rank, in tokens of a prefill: it makes each of their steps
longer, and takes memory.
"""

AGAIN: Final = 2
"""Tokens that are computed take time of this request, and of those that come after it."""

MOST_BLOCKS: Final = 1 << 16
"""Blocks that are remembered, of all tenants together: about 4 million tokens, and 20 MB."""

HORIZON: Final = 1.0
"""Seconds after which a request that no rank has told of is taken to have ended."""


@dataclass
class RankLoad:
    """The work of one rank.

    reported_at: when the rank told of its load, in seconds. requests, tokens: of that time;
    requests that wait or run, and tokens that wait to be computed. sent: (time, tokens to compute)
    of each request since.
    """

    reported_at: float = 0.0
    requests: int = 0
    tokens: int = 0
    sent: deque[tuple[float, int]] = field(default_factory=deque)

    def on_load_report(self, at: float, requests: int, tokens: int) -> None:
        """The rank tells of its load at the time `at`; only what is newer than the last counts."""
        if at > self.reported_at:
            self.reported_at, self.requests, self.tokens = at, requests, tokens

    def pending_tokens(self, now: float) -> int:
        """The work that is left, in tokens of a prefill."""
        while self.sent and self.sent[0][0] <= max(self.reported_at, now - HORIZON):
            self.sent.popleft()
        waiting = self.tokens + sum(tokens for _, tokens in self.sent)
        return waiting + REQUEST_TOKENS * (self.requests + len(self.sent))


class PrefixRanks:
    """The prefixes that were sent to each of several ranks.

    Which of equal ranks a prompt gets follows from its tokens and its tenant, so that it tells no
    tenant how many requests others sent.
    """

    def __init__(self, ranks: int, most_blocks: int = MOST_BLOCKS) -> None:
        self.loads = [RankLoad() for _ in range(ranks)]
        self._holders: Latest[int] = Latest(most_blocks)  # by block, a bit for each rank

    def send(
        self, tenant: Hashable, prompt: Sequence[int], now: float, allowed: Collection[int]
    ) -> int:
        """The rank that a prompt [n] of `tenant` is sent to, of those that are `allowed`; it counts
        as sent, at `now` seconds.
        """
        blocks = _blocks(prompt)
        known = self._known_tokens(tenant, blocks)
        count = len(self.loads)
        first = _hash((tenant, blocks[-1:], list(prompt[len(blocks) * BLOCK :])))

        def cost(at: int) -> tuple[int, int]:
            new = len(prompt) - known[at]
            return self.loads[at].pending_tokens(now) + AGAIN * new, (at - first) % count

        rank = min(allowed, key=cost)
        self.loads[rank].sent.append((now, len(prompt) - known[rank]))
        for block in reversed(blocks):  # the end of a prompt is forgotten first
            held = self._holders.get(tenant, block) or 0
            self._holders.put(tenant, block, held | 1 << rank, 1)
        return rank

    def of_session(self, session: str) -> int:
        """The rank of a session, whose requests can continue each other on one rank only."""
        return _hash(session) % len(self.loads)

    def _known_tokens(self, tenant: Hashable, blocks: Sequence[str]) -> list[int]:
        """The tokens from the start of a prompt that were sent to each rank before."""
        known = [len(blocks) * BLOCK] * len(self.loads)
        held = (1 << len(known)) - 1
        for number, block in enumerate(blocks):
            still = held & (self._holders.get(tenant, block) or 0)
            if still != held:
                for rank in range(len(known)):
                    if (held & ~still) >> rank & 1:
                        known[rank] = number * BLOCK
            held = still
            if not held:
                break
        return known


def _hash(value: object) -> int:
    """The same for equal values, in any process."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest())


def _blocks(prompt: Sequence[int]) -> list[str]:
    """A name for each whole block of a prompt, of its tokens and all before them."""
    tokens = np.asarray(prompt, np.int64)
    names, above = [], b""
    for start, end in pairwise(range(0, len(tokens) + 1, BLOCK)):
        above = blake2b(above + tokens[start:end].tobytes(), digest_size=16).digest()
        names.append(above.hex())
    return names
