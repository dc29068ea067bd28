"""Rows of host memory that the device reads and writes itself. test_checkpoint_states.py runs the
kernel in the interpreter.
"""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_hybrid.kernels import host_rows
from tests.kernels.test_checkpoint_states import run
from tests.kernels.test_checkpoint_states_compiled import TARGETS

WORDS = {torch.int64: "*i64", torch.int32: "*i32", torch.int16: "*i16", torch.uint8: "*u8"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_on_a_gpu() -> None:
    run(["launched_host_rows.py"], "not slow", 1, 120, gpu=True)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("word", host_rows.WORD_TYPES)
@pytest.mark.parametrize("to_host", [False, True])
def test_the_kernel_is_compiled_for(target: int, word: torch.dtype, *, to_host: bool) -> None:
    """A GPU of this capability."""
    constants = {"WORDS": host_rows.WORDS, "TO_HOST": to_host}
    signature = {
        **{"host": WORDS[word], "content": WORDS[word], "rows": "*i64"},
        **{"stride": "i32", "length": "i32"},
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(host_rows.copy_rows, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", target, 32)).asm["cubin"]


def test_on_a_cpu_it_is_plain_torch() -> None:
    host = torch.randint(0, 256, (12, 20), dtype=torch.uint8)
    before, rows, span = host.clone(), torch.tensor([7, 2]), slice(3, 9)
    content = torch.arange(12, dtype=torch.uint8).view(2, 6)
    host_rows.write_rows(host, rows, span, content)
    before[rows, span] = content
    assert torch.equal(host, before)
    assert torch.equal(host_rows.read_rows(host, rows, span), content)
