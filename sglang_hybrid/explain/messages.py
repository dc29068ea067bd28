"""Messages of /hybrid_cache/explain and /v1/prompt_schemas to a scheduler, and its answers; of
SGLang's own kind.
"""

from typing import Any, ClassVar

import msgspec
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class ExplainReq(BaseReq):
    """Explain the prompt `input_ids`, or the recent request `request_id` if that is given. The
    extra key is the one that it is stored under (`tenants.stored_under`).
    """

    only_reads: ClassVar[bool] = True  # failures.py
    input_ids: list[int] | None = None
    request_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class ExplainReqOutput(BaseReq):
    """An `MissReport` as plain values, or the sentence that says why there is none. before: tokens
    of the prompt before a text that changes with each request; None where there is none.
    """

    report: dict[str, Any] | None = None
    before: list[int] | None = None
    error: str | None = None


class ResidencyReq(BaseReq):
    """A question for the tiers of prefixes of a tenant. Each is the index of an earlier one that it
    continues, -1 for none, and its tokens behind that.
    """

    only_reads: ClassVar[bool] = True
    prefixes: list[tuple[int, list[int]]] = msgspec.field(default_factory=list)
    extra_key: str | None = None
    cache_salt: str | None = None


class ResidencyReqOutput(BaseReq):
    """The tier of each prefix's KV, and of the state at its end, if the model has states."""

    places: list[tuple[str, str | None]] = msgspec.field(default_factory=list)


class ResumableReq(BaseReq):
    """The next page of the snapshot `cursor` of where prompts can be resumed, which begins now with
    `begin`; no page of any without a cursor.
    """

    only_reads: ClassVar[bool] = True
    cursor: str | None = None
    begin: bool = False


class ResumableReqOutput(BaseReq):
    """One page of one cache.

    epoch: of this scheduler's process. seq: how many batches of events had been published before
    the page was made, which is what it is true of. more: there is another page. events: as they
    are published. prefill_tokens_per_second: of prompts of 1,024 tokens. waiting: requests. room:
    tokens of a prompt that could be computed and kept before anything is evicted. loads: for each
    medium below the device, seconds to load a state and seconds for each token of KV. error: why
    there is nothing.
    """

    epoch: str = ""
    seq: int = 0
    block_size: int = 1
    more: bool = False
    events: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prefill_tokens_per_second: float | None = None
    waiting: int = 0
    room: int = 0
    loads: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    error: str = ""


hook_custom_types(
    *(ExplainReq, ExplainReqOutput, ResidencyReq, ResidencyReqOutput),
    *(ResumableReq, ResumableReqOutput),
)
