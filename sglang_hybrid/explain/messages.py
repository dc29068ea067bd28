"""What /hybrid_cache/explain asks a scheduler, and its answer; SGLang's own kind of messages."""

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class ExplainReq(BaseReq):
    """Explain the prompt `input_ids`, or the recent request `request_id` if that is given. The
    extra key is the one that it is stored under (`tenants.stored_under`).
    """

    input_ids: list[int] | None = None
    request_id: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


class ExplainReqOutput(BaseReq):
    """An `MissReport` as plain values, or the sentence that says why there is none."""

    report: dict[str, Any] | None = None
    error: str | None = None


hook_custom_types(ExplainReq, ExplainReqOutput)
