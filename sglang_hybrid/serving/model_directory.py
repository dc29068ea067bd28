"""The directory of a model: its config, its weights and its tokenizer, before anything is loaded.

Each check raises `StartupError` with one sentence.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from safetensors import SafetensorError, safe_open

from sglang_hybrid.core.named_files import FileError, read_json
from sglang_hybrid.serving.startup import StartupError, one_line

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NO = ("", "0", "false", "no", "n")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class _WeightIndex(msgspec.Struct):
    weight_map: dict[str, str]


def check_model(model_path: str, *, weights: bool = True, tokenizer: bool = True) -> None:
    """Raise `StartupError` if `model_path` is a directory that SGLang cannot load.

    Of a name on the Hugging Face hub (`owner/name`) only `check_hub` is asked; a URL is left to
    SGLang.
    """
    path = Path(model_path).expanduser()
    if not path.exists():
        if is_elsewhere(model_path):
            check_hub(model_path, "--model-path")
            return
        raise StartupError(
            f"model path {model_path!r} does not exist; give a directory, a name on the Hugging "
            "Face hub, or no --model-path at all for the embedded default model."
        )
    if path.is_file():
        if path.suffix == ".gguf":
            return
        raise StartupError(f"model path {model_path!r} is a file; give the model's directory.")
    for file in path.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise StartupError(f"{file} is no regular file; copy the model again.")
    config = read_config(path)
    if not config.get("architectures"):
        raise StartupError(f"{path / 'config.json'} names no `architectures`; is it a model's?")
    if weights:
        _check_weights(path)
    if tokenizer and not has_tokenizer(path):
        raise StartupError(
            f"model directory {model_path!r} has no tokenizer (tokenizer.json or tokenizer.model); "
            "copy it there or give --tokenizer-path."
        )


def is_elsewhere(path: str) -> bool:
    """True if a path is a name on the Hugging Face hub or a URL, which SGLang resolves."""
    return bool(_HUB_NAME.fullmatch(path)) or "://" in path


@cache
def check_hub(name: str, flag: str) -> None:
    """Raise `StartupError` if the Hugging Face hub, or the mirror that HF_ENDPOINT names, cannot be
    asked for `name`, or has none that this user may read. SGLang would ask it for a minute or more.
    What the hub's cache has of the model is left to SGLang, and so are URLs and ModelScope.
    """
    if "://" in name or os.environ.get("SGLANG_USE_MODELSCOPE", "0").lower() not in _NO:
        return
    import httpx
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    cached = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    if cached.is_dir() and any(cached.iterdir()):
        return
    what = f"{flag} {name!r} is no directory here"
    nor = f"{what}, not in the cache ({constants.HF_HUB_CACHE}),"
    if constants.HF_HUB_OFFLINE:
        raise StartupError(
            f"{nor} and HF_HUB_OFFLINE is set; give its directory, or unset HF_HUB_OFFLINE."
        )
    url = hf_hub_url(name, "config.json")
    host = urlsplit(url).hostname or constants.ENDPOINT
    try:
        get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        raise StartupError(
            f"{what}, and {host} has none of this name that you may read; give another name, or "
            "set HF_TOKEN to a token that may read it."
        ) from None
    except errors.HfHubHTTPError:  # it answers: SGLang may need other files, or try again
        return
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise StartupError(
            f"{nor} and {host} cannot be asked for it ({one_line(error)}); give its directory, or "
            "set HF_ENDPOINT to a mirror that can be reached."
        ) from None


def has_tokenizer(directory: Path) -> bool:
    """True if a directory has a tokenizer's files."""
    return any((directory / name).exists() for name in _TOKENIZERS)


def read_config(model_directory: Path) -> dict[str, Any]:
    """The model's config.json; raises `StartupError` if it is missing or broken."""
    file = model_directory / "config.json"
    try:
        return read_json(file, dict[str, Any], "model's config")
    except FileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise StartupError(
                f"model directory {str(model_directory)!r} has no config.json; is it a model's?"
            ) from None
        raise StartupError(f"{error}; copy the model again.") from None


def weight_bytes(model_directory: Path) -> int:
    """Size of the weight files in a model directory, in bytes; 0 if there are none."""
    return sum(file.stat().st_size for file in _weight_files(model_directory))


def _weight_files(directory: Path) -> list[Path]:
    """The files of the first format that there are files of."""
    found = ([*directory.glob(pattern)] for pattern in _WEIGHTS)
    return next(filter(None, found), [])


def _check_weights(path: Path) -> None:
    if not _weight_files(path):
        raise StartupError(
            f"model directory {str(path)!r} has no weights (*.safetensors); copy them there, or "
            "give --load-format dummy to serve random ones."
        )
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            found = read_json(index, _WeightIndex, "index of weights")
        except FileError as error:
            raise StartupError(f"{error}; copy the model again.") from None
        wanted = set(found.weight_map.values())
        missing = sorted(name for name in wanted if not (path / name).exists())
        if missing:
            raise StartupError(
                f"model directory {str(path)!r} lacks {len(missing)} of {len(wanted)} weight "
                f"files, {missing[0]} among them; copy the model again."
            )
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(str(file), framework="numpy"):
                pass
        except (SafetensorError, OSError, MemoryError) as error:
            raise StartupError(f"{file} is damaged ({error}); copy the model again.") from None
