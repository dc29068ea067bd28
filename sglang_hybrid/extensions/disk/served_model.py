"""The facts that KV and states of the running server depend on, for the disk tier's manifest."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sglang_hybrid import __version__
from sglang_hybrid.extensions.disk.fingerprint import fingerprint

_SETTINGS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "json_model_override_args",
    "model_config_parser",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "quantize_and_serve",
    "weight_version",
    "load_format",
    "kt_method",
    "kt_num_gpu_experts",
    "forward_hooks",
    "enable_precise_embedding_interpolation",
)
"""Server arguments that change what KV and states of the same tokens are."""

_FILES = ("quantization_param_path", "decrypted_config_file", "rl_quant_profile")
"""Server arguments that name a file whose content identifies the model."""

_FROM_ELSEWHERE = ("remote_instance", "rdma", "private", "ipc_cache")
"""Load formats whose weights are not those of --model-path: another server's, say."""

_PACKAGES = ("sglang", "torch")


class Unidentified(Exception):
    """KV of this server cannot be told from another one's; the sentence says why."""


def served_model() -> dict[str, Any]:
    """Facts about weights, settings and versions, as JSON.

    Raises Unidentified where weights are random or come from elsewhere, or files are not found.
    """
    from sglang.srt.runtime_context import get_server_args

    arguments: Any = get_server_args()
    if arguments.load_format == "dummy":
        raise Unidentified("weights of --load-format dummy have no identity")
    if elsewhere := next(_flags_of_other_weights(arguments), ""):
        raise Unidentified(f"weights of {elsewhere} may be others than those of --model-path")
    adapters = [_adapter(adapter) for adapter in arguments.lora_paths or ()]
    return {
        "sglang_hybrid": __version__,
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "weights": _fingerprint(arguments.model_path, arguments.revision),
        "adapters": sorted(adapters),
        "experts": arguments.kt_weight_path and _fingerprint(arguments.kt_weight_path),
        **{name: str(getattr(arguments, name, None)) for name in _SETTINGS},
        **{name: _content(getattr(arguments, name, None)) for name in _FILES},
    }


def _flags_of_other_weights(arguments: Any) -> Iterator[str]:
    """Flags by which weights come from elsewhere than the model's folder."""
    if arguments.load_format in _FROM_ELSEWHERE:
        yield f"--load-format {arguments.load_format}"
    if arguments.weight_cache_mode == "client":
        yield "--weight-cache-mode client"
    if arguments.download_dir and not os.path.isdir(arguments.model_path):
        yield f"--download-dir {arguments.download_dir}"  # the configuration is elsewhere
    if restored := arguments.modelopt_checkpoint_restore_path:
        yield f"--modelopt-checkpoint-restore-path {restored}"


def _content(path: str | None) -> str | None:
    """A hash of a file."""
    if not path:
        return None
    try:
        return blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise Unidentified(f"{path} cannot be read: {error.strerror}") from error


def _adapter(adapter: Any) -> list[str]:
    """An adapter's name and a hash of its weights: SGLang tells adapters apart by name and path."""
    name, path = getattr(adapter, "lora_name", None), getattr(adapter, "lora_path", None)
    if not path:
        raise Unidentified(f"the files of the adapter {adapter!r} are not known")
    return [str(name), str(path), _fingerprint(path)]


def _fingerprint(model: str, revision: str | None = None) -> str:
    try:
        return fingerprint(_folder_of(model, revision))
    except OSError as error:
        raise Unidentified(f"the weights of {model} cannot be identified: {error}") from error


def _folder_of(model: str, revision: str | None) -> Path:
    """A folder, or the one to which a name on the Hugging Face hub was downloaded."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:  # of many kinds: not cached, or no name at all
        raise OSError(f"{type(error).__name__}: {error}") from error
