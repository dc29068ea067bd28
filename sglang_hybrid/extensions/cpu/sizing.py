"""Sizes of weights and pools on a CPU, and their defaults there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.serving.host_memory import memory_available, memory_limit
from sglang_hybrid.serving.startup import StartupError

MEMORY_FRACTION = 0.4
"""Share of the machine's memory for weights and pools, unless --mem-fraction-static says other."""

MAX_TOTAL_TOKENS = 131_072
"""KV tokens unless --max-total-tokens says other: a tiny model would otherwise get millions."""

MAX_MAMBA_CACHE_SIZE = 512
"""State slots unless --max-mamba-cache-size says other, or if they would take too much memory."""

STATES_SHARE = 0.15
"""Largest share of the machine's memory for the default number of state slots."""

PACKED_SHARE = 0.1
"""Largest share of the machine's memory for second copies of weights in oneDNN's layout."""

MAX_RUNNING_REQUESTS = 16
"""Requests in one decode batch unless --max-running-requests says other."""

DTYPES = {
    "auto": "float32",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
"""The dtype that a --dtype means on the CPU."""

_VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights, of one KV token and of one state, as it is served."""

    weights: int
    kv_token: int
    state: int

    @property
    def default_slots(self) -> int:
        """State slots to allocate when the user asked for no number."""
        if self.state == 0:
            return MAX_MAMBA_CACHE_SIZE
        fit = int(STATES_SHARE * memory_limit()) // self.state
        return max(1, min(MAX_MAMBA_CACHE_SIZE, fit))


def packed_limit() -> int:
    """Bytes that packed copies of weights may take (`ops/linear.py`)."""
    return int(PACKED_SHARE * memory_limit())


def model_sizes(model_path: str, dtype: str) -> Sizes | None:
    """Sizes of a model in a local directory; None if it is elsewhere or its config is unknown."""
    from sglang_hybrid.serving.model_directory import read_config, weight_bytes

    directory = Path(model_path).expanduser()
    if not directory.is_dir():
        return None
    config = read_config(directory)
    value_bytes = _VALUE_BYTES[DTYPES[dtype]]
    try:
        # The platform has SGLang keep the windows of convolutions in the model's type, too.
        cost = CostModel.from_config(
            config, kv_value_bytes=value_bytes, conv_value_bytes=value_bytes
        )
    except ValueError:
        return None
    return Sizes(
        weights=weight_bytes(directory) * value_bytes // _stored_bytes(config),
        kv_token=cost.kv_bytes_per_token,
        state=cost.state_bytes,
    )


def check_memory(model_path: str, dtype: str, total_tokens: int | None, slots: int | None) -> None:
    """Raise `StartupError` if weights and pools cannot fit into the memory that is free.

    `total_tokens` and `slots` are what the user asked for, or None. Weights count twice as far as
    they may be kept in oneDNN's layout, too. SGLang shrinks a KV pool of its own choice to the
    memory there is, so only the states of a default count.
    """
    sizes = model_sizes(model_path, dtype)
    if sizes is None:
        return
    states = sizes.state * (sizes.default_slots if slots is None else slots)
    kv = sizes.kv_token * (total_tokens or 0)
    weights = sizes.weights + min(sizes.weights, packed_limit())
    needed, free = weights + states + kv, memory_available()
    if needed <= free:
        return
    raise StartupError(
        f"the model needs {_gb(needed)} of memory (weights {_gb(weights)}, KV of "
        f"{total_tokens or 0:,} tokens {_gb(kv)}, states {_gb(states)}) but {_gb(free)} are free; "
        "lower --max-total-tokens or --max-mamba-cache-size, or serve a smaller model."
    )


def _stored_bytes(config: dict[str, Any]) -> int:
    text = config.get("text_config")
    if not isinstance(text, dict):
        text = config
    return _VALUE_BYTES.get(str(text.get("dtype") or text.get("torch_dtype")), 2)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
