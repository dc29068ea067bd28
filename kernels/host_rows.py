"""Parts of rows of host memory, read and written by the device: one Triton launch, by stream.

The host's memory is pinned, so that a device reaches it by itself, over its bus: nothing is
gathered on the host, nothing is staged, and the host thread does not wait. Rows are complete when
the stream has come so far. Where rows are on the CPU, it is plain torch.
"""

# Triton's decorator and its kernels' arguments have no types that mypy reads.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 512
"""Words that one program copies."""

WORD_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def read_rows(host: Tensor, rows: Tensor, span: slice) -> Tensor:
    """Bytes `span` of these rows of the host, on the device of `rows`.

    host: uint8 [slots, bytes], contiguous, pinned if `rows` is on a GPU. rows: int64 [n]. Returns
    uint8 [n, span].
    """
    if rows.device.type == "cpu":
        return host[rows, span]
    content = torch.empty(len(rows), span.stop - span.start, dtype=torch.uint8, device=rows.device)
    _launch(host[:, span], content, rows, to_host=False)
    return content


def write_rows(host: Tensor, rows: Tensor, span: slice, content: Tensor) -> None:
    """Write `content`, uint8 [n, span], contiguous, to bytes `span` of these rows of the host; see
    `read_rows`. A row may appear once.
    """
    if rows.device.type == "cpu":
        host[rows, span] = content
        return
    _launch(host[:, span], content, rows, to_host=True)


def _launch(part: Tensor, content: Tensor, rows: Tensor, *, to_host: bool) -> None:
    """part: uint8 [slots, span], a view of the host's memory."""
    word = word_of(part, content)
    part, content = part.view(word), content.view(word)
    count, length = content.shape
    if not count:
        return
    copy_rows[(count, triton.cdiv(length, WORDS))](
        part, content, rows, part.stride(0), length, WORDS=WORDS, TO_HOST=to_host
    )


def word_of(part: Tensor, content: Tensor) -> torch.dtype:
    """The longest word, of 8 bytes at most, that both consist of: uint8 [slots, span] on the host,
    with rows further apart, and uint8 [n, span].
    """
    numbers = (part.data_ptr(), content.data_ptr(), part.stride(0), part.shape[1])
    return next(word for word in WORD_TYPES if not any(at % word.itemsize for at in numbers))


@triton.jit(do_not_specialize=["stride", "length"])
def copy_rows(
    host,
    content,
    rows,
    stride,
    length,
    WORDS: tl.constexpr,
    TO_HOST: tl.constexpr,
):
    """Row i of `content` [n, length], dense, and row rows[i] of `host`, whose rows are `stride`
    words apart; grid (n, length / WORDS).
    """
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = at < length
    there = host + tl.load(rows + i) * stride + at
    here = content + i * length + at
    if TO_HOST:
        tl.store(there, tl.load(here, mask=inside), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
