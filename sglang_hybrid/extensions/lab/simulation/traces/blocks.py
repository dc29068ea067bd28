"""kv-cache-tester's conversations: prompts as hashes of blocks of tokens
(github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from sglang_hybrid.core.named_files import decode_as
from sglang_hybrid.core.traffic.requests import (
    Count,
    FreshTokens,
    Length,
    Number,
    Request,
    Seconds,
    TokenArray,
    block_tokens,
    make_request,
)
from sglang_hybrid.extensions.lab.simulation.token_tree import TOKEN_BYTES
from sglang_hybrid.extensions.lab.simulation.traces.arrivals import session_starts
from sglang_hybrid.extensions.lab.simulation.traces.lines import (
    Room,
    Skipped,
    TraceError,
    joined,
    numbered_lines,
)

MOST_NESTED: Final = 16
"""Agents that were started by agents."""


class BlockRequest(msgspec.Struct):
    t: Seconds
    length: Length = msgspec.field(name="in")
    out: Count
    hash_ids: list[Number]


class Nested(msgspec.Struct):
    requests: list[msgspec.Raw]


class Conversation(msgspec.Struct):
    requests: list[msgspec.Raw]
    block_size: Length = 64
    tool_tokens: Count = 0
    system_tokens: Count = 0
    hash_id_scope: str = "local"


class BlockReader:
    """Reads files of one conversation each, or a directory of them.

    Hashes count within a conversation unless it says otherwise, but conversations whose tools and
    system prompt are of the same size share those blocks: an assumption. A prompt's tokens beyond
    its last whole block, and its answer, are taken from the request that continues it, if one does.
    Conversations have no common clock: they begin as Poisson arrivals.
    """

    def __init__(self, skipped: Skipped, session_rate: float, seed: int, room: Room) -> None:
        self.skipped = skipped
        self.room = room
        self.session_rate = session_rate
        self.rng = np.random.default_rng(seed)
        self._blocks: dict[tuple[object, ...], int] = {}
        self._fresh = FreshTokens()
        self._session = -1

    def read(self, path: Path, limit: int | None = None) -> list[Request]:
        files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
        if not files:
            raise TraceError(f"there is no conversation (*.json) in {path}")
        requests: list[Request] = []
        starts = session_starts(self.rng, len(files), self.session_rate)
        for file, start in zip(files, starts, strict=True):
            requests.extend(self._conversation(file, start))
        requests.sort(key=lambda request: request.arrival)
        return requests[:limit]

    def _conversation(self, file: Path, start: float) -> Iterator[Request]:
        text = joined(numbered_lines(file, self.skipped), file)
        try:
            whole = decode_as(text, Conversation)
        except ValueError as error:
            line = text.count(b"\n", 0, _position(error, text)) + 1
            kind = "not a conversation" if isinstance(error, msgspec.ValidationError) else "no JSON"
            self.skipped.bad(f"{file}:{line}: {kind} ({error})", error)
            return
        for thread in self._threads(file, whole.requests, whole.block_size):
            yield from self._thread(whole, thread, file, start)

    def _threads(
        self, file: Path, raw: Iterable[msgspec.Raw], block_size: int, nested: int = 0
    ) -> list[list[BlockRequest]]:
        """The conversation's own requests, then those of each agent that it started. nested: how
        many agents are around these ones.
        """
        own: list[BlockRequest] = []
        threads = [own]
        for number, record in enumerate(raw, start=1):
            try:
                if b'"requests"' in (text := bytes(record)):
                    if nested == MOST_NESTED:
                        raise ValueError(f"agents are nested more than {MOST_NESTED} deep")
                    agent = decode_as(text, Nested)
                    threads += self._threads(file, agent.requests, block_size, nested + 1)
                    continue
                request = decode_as(text, BlockRequest)
                if own and request.t < own[-1].t:
                    raise ValueError("it arrived before the one above")
                if (len(request.hash_ids) - 1) * block_size >= request.length + request.out:
                    blocks = len(request.hash_ids)
                    raise ValueError(f"it has {blocks:,} blocks, which its tokens do not fill")
                self.room.take_bytes(_expanded_bytes(request))
                own.append(request)
            except TraceError:
                raise
            except ValueError as error:
                self.skipped.bad(f"{file}: request {number}: {error}", error)
        return threads

    def _thread(
        self, whole: Conversation, thread: list[BlockRequest], file: Path, start: float
    ) -> Iterator[Request]:
        self._session += 1
        prompts = [self._tokens(whole, request, file) for request in thread]
        for turn in range(len(thread) - 1, -1, -1):  # what continues a prompt is complete by then
            request, blocks = thread[turn], prompts[turn]
            later = self._continuation(thread, prompts, turn)
            rest = request.length - len(blocks)
            if rest > 0:
                tail = later[len(blocks) : request.length]
                fresh = self._fresh.take(rest - len(tail))
                prompts[turn] = np.concatenate([blocks, tail, fresh])
        for turn, (request, prompt) in enumerate(zip(thread, prompts, strict=True)):
            later = self._continuation(thread, prompts, turn)[len(prompt) :][: request.out]
            answer = np.concatenate([later, self._fresh.take(request.out - len(later))])
            arrival = start + request.t
            made = make_request(self._session, turn, arrival, prompt, answer)
            self.room.take_bytes(-_expanded_bytes(request))
            self.room.take(made)
            yield made

    def _continuation(
        self, thread: list[BlockRequest], prompts: list[TokenArray], turn: int
    ) -> TokenArray:
        """The next longer prompt of the thread that starts with this one's blocks, empty if none
        does.
        """
        blocks = thread[turn].hash_ids
        for later in range(turn + 1, min(turn + 4, len(thread))):
            if len(thread[later].hash_ids) > len(blocks):
                same = thread[later].hash_ids[: len(blocks)] == blocks
                return prompts[later] if same else prompts[later][:0]
        return prompts[turn][:0]

    def _tokens(self, whole: Conversation, request: BlockRequest, file: Path) -> TokenArray:
        shared = (whole.tool_tokens + whole.system_tokens) // whole.block_size
        numbers = []
        for index, block in enumerate(request.hash_ids):
            key: tuple[object, ...] = (file, block)
            if whole.hash_id_scope == "global":
                key = (block,)
            elif index < shared:
                key = (whole.tool_tokens, whole.system_tokens, block)
            numbers.append(self._blocks.setdefault(key, len(self._blocks)))
        return block_tokens(numbers, whole.block_size)[: request.length]


def _expanded_bytes(request: BlockRequest) -> int:
    """The bytes of the request's tokens while its conversation is read."""
    return TOKEN_BYTES * (request.length + request.out)


def _position(error: Exception, text: bytes) -> int:
    """The byte that the message names, the end if it names none."""
    _, _, tail = str(error).partition("(byte ")
    return int(tail.rstrip(")")) if tail.rstrip(")").isdigit() else len(text)
