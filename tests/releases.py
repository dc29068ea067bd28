"""Marks for tests of what only some releases of SGLang can do."""

from importlib.metadata import version

import pytest

needs_disk = pytest.mark.skipif(
    version("sglang") == "0.5.22", reason="the disk needs SGLang 0.5.23"
)

waits_listed = pytest.mark.skipif(
    version("sglang") == "0.5.22", reason="SGLang 0.5.22 waits for a GPU in more places of its own"
)

smaller_copies = pytest.mark.skipif(
    version("sglang") == "0.5.22", reason="smaller copies need SGLang 0.5.23"
)

drafts_on_cpu = pytest.mark.skipif(
    version("sglang") == "0.5.22", reason="speculative decoding on a CPU needs SGLang 0.5.23"
)

sglangs_pool = pytest.mark.skipif(
    version("sglang") == "0.5.22", reason="SGLang's unified pool on a CPU needs SGLang 0.5.23"
)
