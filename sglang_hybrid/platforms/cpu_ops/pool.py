"""Look-ups in SGLang's table of slots."""

from torch import Tensor


def last_slots(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """The slot of the last of ``prefix_lens`` [b] tokens of every request, -1 for an empty prefix.

    Shapes: req_to_token [requests, context], req_pool_indices [b]; the result has the type of
    ``prefix_lens``. SGLang has a torch form of its own, which it takes for `torch_native` only
    (mem_cache/allocation.py, get_last_loc).
    """
    last = req_to_token[req_pool_indices, (prefix_lens - 1).clamp_min(0)].to(prefix_lens.dtype)
    return last.masked_fill(prefix_lens == 0, -1)
