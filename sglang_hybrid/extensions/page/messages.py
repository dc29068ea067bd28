"""Messages of the page to a scheduler, and its answers; of SGLang's own kind."""

from typing import Any, ClassVar

import msgspec
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class WatchReq(BaseReq):
    """A question for the changes since `reader` asked last. leave: the reader asks no more."""

    only_reads: ClassVar[bool] = True  # failures.py
    reader: str = ""
    leave: bool = False


class WatchReqOutput(BaseReq):
    """Changes of one cache.

    start: what the reader knew before is void. nodes: rows as `follower.Row` lists them. gone: ids
    of nodes that left the tree. more: not all changes are told yet. counts: totals and what is
    held. events: what was decided, and requests that began, the oldest first. running: request id,
    id of the node that it holds, tokens of its prompt and answer. error: why there is nothing.
    """

    start: bool = False
    nodes: list[list[Any]] = msgspec.field(default_factory=list)
    gone: list[int] = msgspec.field(default_factory=list)
    more: bool = False
    counts: dict[str, Any] = msgspec.field(default_factory=dict)
    events: list[dict[str, Any]] = msgspec.field(default_factory=list)
    running: list[tuple[str, int, int, int]] = msgspec.field(default_factory=list)
    error: str = ""


class NodeReq(BaseReq):
    """About one node of the tree, by its id. text: its tokens are wanted, too."""

    only_reads: ClassVar[bool] = True
    node: int = 0
    text: bool = False


class NodeReqOutput(BaseReq):
    """The facts about a node, None if it is gone; and the tokens of its edge."""

    node: dict[str, Any] | None = None
    tokens: list[int] = msgspec.field(default_factory=list)


class AskReq(BaseReq):
    """Explain a prompt, or a recent request of the tenant that the page calls `tenant`, and say
    which nodes its path has. text: its tokens are wanted, too.
    """

    only_reads: ClassVar[bool] = True
    input_ids: list[int] | None = None
    request_id: str | None = None
    tenant: str = ""
    extra_key: str | None = None
    cache_salt: str | None = None
    text: bool = False


class AskReqOutput(BaseReq):
    """A `MissReport` as plain values, ids of the nodes on the prompt's path, and its tokens; or the
    sentence that says why there is none.
    """

    report: dict[str, Any] | None = None
    path: list[int] = msgspec.field(default_factory=list)
    tokens: list[int] = msgspec.field(default_factory=list)
    error: str | None = None


class WhatIfReq(BaseReq):
    """Begin to replay recent requests under other policies and memory sizes, unless that is under
    way; and say how far it is.
    """

    only_reads: ClassVar[bool] = True
    begin: bool = False


class WhatIfReqOutput(BaseReq):
    """state: idle, running, done or failed. rows: policy, times of the
    memory, bytes of it, share of the prompt tokens that are hit. told: a sentence.
    """

    state: str = "idle"
    rows: list[tuple[str, float, float, float]] = msgspec.field(default_factory=list)
    told: str = ""


hook_custom_types(
    *(WatchReq, WatchReqOutput, NodeReq, NodeReqOutput),
    *(AskReq, AskReqOutput, WhatIfReq, WhatIfReqOutput),
)
