"""Checks before a model is loaded; each failure is one sentence."""

import argparse
import errno
import importlib.util
import math
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_hybrid.core.costs.cost import ENDLESS
from sglang_hybrid.core.named_files import decode_json
from sglang_hybrid.core.options import LAST_PORT, MOST, MOST_PROCESSES
from sglang_hybrid.core.sentences import quote
from sglang_hybrid.serving.devices import is_ours
from sglang_hybrid.serving.flag_values import API_KEY, REQUIRED, flag_name
from sglang_hybrid.serving.model_directory import (
    check_hub,
    check_model,
    has_tokenizer,
    is_elsewhere,
    read_config,
)
from sglang_hybrid.serving.requests.secrets import SECRETS, read_key
from sglang_hybrid.serving.startup import StartupError, one_line

HOST_RESERVE = 10 << 30
"""Bytes of the machine's memory that SGLang leaves free beside copies below the device."""

TRACE_PACKAGES = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
)
"""The packages that SGLang imports for traces (observability/trace.py)."""

LEAST_TOKENS = 16
"""KV tokens: with fewer, the request that SGLang sends to itself at the start never runs."""

SLOTS_PER_REQUEST = 3
"""State slots that a running request counts for with a prefix cache, unless that is set
(SGLANG_HYBRID_SLOTS_PER_REQUEST); 1 without."""


NVIDIA_DEVICES = Path("/dev")
"""The folder in which the driver shows each GPU, as a file `nvidia0`."""

MOST_RANKS = 1 << 16

RANGES = {
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "nnodes"), (1, MOST_RANKS)),
    **dict.fromkeys(("tokenizer_worker_num", "detokenizer_worker_num"), (1, MOST_PROCESSES)),
    **dict.fromkeys(("port", "stream_interval", "max_running_requests"), (1, MOST)),
    **dict.fromkeys(("context_length", "page_size", "max_prefill_tokens"), (1, MOST)),
    **dict.fromkeys(("hicache_size", "max_mamba_cache_size"), (0, MOST)),
    "max_total_tokens": (0, ENDLESS),
}
"""SGLang's flags that are whole numbers, the smallest and the largest that each may be."""

ABOVE_ZERO = {
    "mem_fraction_static": (1.0, "a share of the memory between 0 and 1"),
    "mamba_full_memory_ratio": (1e9, "a number above 0"),
    "hicache_ratio": (1e9, "a number above 0"),
}
"""Flags that are numbers above 0: the largest, and what is accepted in words."""


RECURRENT_HEADS = (
    *("mamba_num_heads", "mamba_n_heads"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
"""Fields of models' configs: heads that ranks share, of Mamba2 layers and of gated delta nets."""


def check(flags: argparse.Namespace) -> None:
    """Raise `StartupError` for SGLang's flags that are known to fail whatever ours say."""
    check_ranges(flags)
    check_overrides(flags.json_model_override_args)
    check_trace(flags.enable_trace)
    check_port(flags.host, flags.port)
    check_device(flags.device)
    check_adapters(flags.lora_paths)
    check_keys(flags)
    check_tokenizer(flags.tokenizer_path)
    check_draft(flags.speculative_draft_model_path)
    check_template(flags.chat_template)
    check_model(
        flags.model_path,
        weights=flags.load_format != "dummy",
        tokenizer=flags.tokenizer_path is None and not flags.skip_tokenizer_init,
    )
    ranks = 1 if flags.enable_dp_attention else flags.tp_size
    check_ranks(flags.model_path, ranks, is_ours)


def check_port(host: str, port: int) -> None:
    """Raise `StartupError` if nothing can listen on `host:port`."""
    if port > LAST_PORT:
        raise StartupError(f"--port {port}: give {LAST_PORT} at most, or leave it out.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StartupError(
                f"cannot listen on {host}:{port} ({error.strerror}); {_other_address(error)}."
            ) from None


def _other_address(error: OSError) -> str:
    """The remedy where a server cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return "stop the program that uses it or choose another --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "choose a --port of 1024 or more"
    return "give a --host that is an address of this machine, or leave it out"


def check_keys(flags: argparse.Namespace) -> None:
    """Raise `StartupError` for a key that cannot be read, and for one that nobody would check."""
    for name in SECRETS:
        try:
            read_key(getattr(flags, name))
        except ValueError as error:
            raise StartupError(f"{flag_name(name)}: {error}") from None
    given = [name for name in ("api_key", "admin_api_key") if getattr(flags, name)]
    if given and flags.tokenizer_worker_num > 1:
        raise StartupError(
            f"{flag_name(given[0])}: SGLang checks no keys with --tokenizer-worker-num "
            f"{flags.tokenizer_worker_num}, so every route would be open; leave out one of the two."
        )


def check_trace(enabled: bool) -> None:
    """Raise `StartupError` if traces (`--enable-trace`) lack a package that writes them."""
    try:
        missing = enabled and not all(map(importlib.util.find_spec, TRACE_PACKAGES))
    except ModuleNotFoundError:  # the package around one of them
        missing = True
    if missing:
        raise StartupError(
            "--enable-trace needs OpenTelemetry, which is not installed; install opentelemetry-sdk "
            "and opentelemetry-exporter-otlp, or leave the flag out."
        )


def check_device(device: str | None) -> None:
    """Raise `StartupError` if torch sees no device of this kind; None: if it cannot use the GPUs
    that this machine has, and would serve on the CPU.
    """
    if device is None:
        check_gpus(NVIDIA_DEVICES)
    if device in (None, "cpu") or not re.fullmatch(r"\w+", str(device)):
        return
    import torch

    module = getattr(torch, str(device), None)
    if module is None or not module.is_available():
        raise StartupError(
            f"--device {device}: torch {torch.__version__} sees no such device here; leave out "
            "--device, or give --device cpu."
        )


def check_gpus(folder: Path) -> None:
    """Raise `StartupError` if `folder` has an NVIDIA GPU that torch cannot use, and nobody hides it
    (CUDA_VISIBLE_DEVICES).
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    if hidden or not any(folder.glob("nvidia[0-9]*")) or not is_ours():
        return
    import torch

    try:
        torch.zeros(0, device="cuda")
        why = "it says no reason"
    except Exception as error:  # AssertionError of a build for CPUs, RuntimeError of CUDA's
        why = one_line(error).rstrip(".")
    raise StartupError(
        f"this machine has an NVIDIA GPU, and torch {torch.__version__} cannot use it ({why}); "
        "mend that, or give --device cpu."
    )


def check_ranges(flags: argparse.Namespace) -> None:
    """Raise `StartupError` for a number that no server can have; None is SGLang's own."""
    for name, (least, most) in RANGES.items():
        value = getattr(flags, name, None)
        if value is not None and not least <= value <= most:
            bound = f"{least} or more" if value < least else f"{most:,} at most"
            raise StartupError(f"{flag_name(name)} {quote(value)}: give {bound}, or leave it out.")
    for name, (highest, what) in ABOVE_ZERO.items():
        value = getattr(flags, name, None)
        if value is not None and not 0 < value <= highest:
            raise StartupError(f"{flag_name(name)} {value:g}: give {what}, or leave it out.")


def check_pools(tokens: int | None, slots: int | None, counted: int) -> None:
    """Raise `StartupError` if no request could run on pools of these sizes.

    tokens: of KV, slots: of states; None is as many as there is room for. counted: slots that a
    running request counts for, 0 for a model without recurrent state.
    """
    if tokens is not None and tokens < LEAST_TOKENS:
        raise StartupError(
            f"--max-total-tokens {tokens} is too small for any request; give {LEAST_TOKENS} at "
            "least, or leave it out."
        )
    if slots is not None and slots < counted:
        raise StartupError(
            f"--max-mamba-cache-size {slots} is too small for any request, which counts for "
            f"{counted} state slots; give {counted} at least, or leave it out."
        )


def check_tenants(flags: argparse.Namespace, words: str) -> None:
    """Raise `StartupError` where `--hybrid-tenants` could not keep what it promises. Whether a
    router stands before the server cannot be known; each request shows what came through.

    words: the flag's value.
    """
    asked = f"--hybrid-tenants {words}"
    if not words:
        return
    if flags.is_embedding:
        raise StartupError(
            f"{asked}: an embedding server keeps the prompts of all its clients together; leave it "
            "out, and use a server for each tenant."
        )
    for name in ("grpc_port", "grpc_mode", "smg_grpc_mode"):
        if getattr(flags, name, None):
            raise StartupError(
                f"{asked}: requests over gRPC have no key, and most of them no headers; leave out "
                f"{flag_name(name)} or --hybrid-tenants."
            )
    if flags.api_key and REQUIRED not in words.split(","):
        raise StartupError(
            f"{asked}: all clients send the one --api-key, which tells no tenants apart; leave out "
            "--api-key and have a gateway check keys, or give --hybrid-tenants "
            f"{API_KEY},{REQUIRED} and have each client send its own key in x-api-key beside it."
        )


def check_host_room(given: str, asked: float, free: float) -> None:
    """Raise `StartupError` if copies below the device, which take `asked` bytes of the machine's
    memory for what was `given`, do not fit into the `free` ones.
    """
    if asked > free:
        raise StartupError(
            f"{given} asks for {asked / 1e9:,.1f} GB of the machine's memory, and "
            f"{max(0.0, free) / 1e9:,.1f} GB can be had beside the 10 GiB that SGLang leaves free; "
            "give less."
        )


def check_ranks(model_path: str, ranks: int, pads_attention: Callable[[], bool]) -> None:
    """Raise `StartupError` if so many ranks (`--tp-size`) cannot share the heads of the model's
    recurrent layers, or those of its attention.

    pads_attention: says if SGLang pads the latter, as on a CPU; asked only where it matters, since
    it imports torch.
    """
    directory = Path(model_path).expanduser()
    if ranks == 1 or not directory.is_dir():
        return
    config = read_config(directory)
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    names = (*RECURRENT_HEADS, "num_heads") if "state_size" in config else RECURRENT_HEADS
    heads = [config[name] for name in names if isinstance(config.get(name), int)]
    recurrent, attention = math.gcd(*heads), config.get("num_attention_heads")
    if not recurrent or not isinstance(attention, int):
        attention = 0
    if recurrent % ranks == attention % ranks == 0:
        return
    if pads_attention():
        attention = 0
    for shared, layers in ((recurrent, "recurrent layers"), (attention, "attention")):
        if shared % ranks:
            both = math.gcd(recurrent, attention)
            sizes = [str(size) for size in range(1, both + 1) if both % size == 0]
            raise StartupError(
                f"--tp-size {ranks} cannot share the {shared} heads of the model's {layers}; "
                f"give {', '.join(sizes)}."
            )


def check_adapters(given: Sequence[object] | None) -> None:
    """Raise `StartupError` for a LoRA adapter (`--lora-paths`) that is no directory of one.

    given: entries as `path`, `name=path` or an object with `lora_path`.
    """
    for entry in given or ():
        path = entry.get("lora_path") if isinstance(entry, dict) else str(entry).split("=", 1)[-1]
        where = Path(str(path)).expanduser()
        if where.is_dir():
            if not (where / "adapter_config.json").exists():
                raise StartupError(
                    f"--lora-paths: directory {str(path)!r} has no adapter_config.json; is it an "
                    "adapter's?"
                )
        elif not is_elsewhere(str(path)):
            raise StartupError(
                f"--lora-paths: {str(path)!r} does not exist; give an adapter's directory, or a "
                "name on the Hugging Face hub."
            )
        else:
            check_hub(str(path), "--lora-paths")


def check_tokenizer(path: str | None) -> None:
    """Raise `StartupError` for a --tokenizer-path that is nowhere, or a directory without one; None
    is the model's.
    """
    if path is None:
        return
    there = Path(path).expanduser()
    if there.is_dir() and not has_tokenizer(there):
        raise StartupError(
            f"--tokenizer-path {path!r} has no tokenizer (tokenizer.json or tokenizer.model); give "
            "another directory, or leave it out."
        )
    if there.is_dir() or there.is_file():
        return
    if not is_elsewhere(path):
        raise StartupError(
            f"--tokenizer-path {path!r} does not exist; give a directory, or a name on the Hugging "
            "Face hub, or leave it out."
        )
    check_hub(path, "--tokenizer-path")


def check_draft(path: str | None) -> None:
    """Raise `StartupError` for a --speculative-draft-model-path that is nowhere; None is none."""
    if path is None or Path(path).expanduser().exists():
        return
    if not is_elsewhere(path):
        raise StartupError(
            f"--speculative-draft-model-path {path!r} does not exist; give a directory, or a name "
            "on the Hugging Face hub."
        )
    check_hub(path, "--speculative-draft-model-path")


def check_template(path: str | None) -> None:
    """Raise `StartupError` for a --chat-template that is there and no file. Otherwise it is a file
    or the name of a template that SGLang knows.
    """
    there = Path(path or "")
    if path is not None and there.exists() and not there.is_file():
        raise StartupError(f"--chat-template {quote(path)} is no file; give one, or leave it out.")


def check_overrides(text: str) -> None:
    """Raise `StartupError` if --json-model-override-args is no JSON object."""
    try:
        known = isinstance(decode_json(text), dict)
    except ValueError:
        known = False
    if not known:
        raise StartupError(
            f"--json-model-override-args {quote(text)} is no JSON object; give one, or leave it "
            "out."
        )
