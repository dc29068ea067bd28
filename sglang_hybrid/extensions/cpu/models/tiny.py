"""Writes a tiny model as a directory that transformers and SGLang load.

Weights are computed from a seed, or lie in this package: no download, the same bytes in every
process.
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from safetensors.numpy import save_file

from sglang_hybrid.core.own_files import check_owner, own_caches
from sglang_hybrid.extensions.cpu.models.architectures import (
    ARCHITECTURES,
    Architecture,
    Model,
    Scale,
)
from sglang_hybrid.extensions.cpu.models.architectures.base import MAX_LENGTH
from sglang_hybrid.extensions.cpu.models.tokenizer import (
    EOS,
    PAD,
    SPECIAL_TOKENS,
    TURN_END,
    write_tokenizer,
)
from sglang_hybrid.extensions.cpu.models.trained import WEIGHTS, trained
from sglang_hybrid.serving.flag_values import TRAINED

__all__ = ["ARCHITECTURES", "build_tiny_model", "ensure_tiny_model", "tiny_model_directory"]

MODELS: dict[str, Architecture] = {TRAINED: trained, **ARCHITECTURES}
"""Every embedded model by its name; those of `ARCHITECTURES` have random weights."""
DEFAULT_ARCHITECTURE = "nemotron-h"
SCALES: tuple[Scale, ...] = ("tiny", "25m", "100m", "8b")


def build_tiny_model(
    architecture: str, directory: Path, *, seed: int = 0, scale: str = "tiny"
) -> Path:
    """Write a model to ``directory``, which must not exist yet or be empty, and return it.

    The files appear together: they are written to a sibling directory that is renamed at the end,
    so an interrupted build leaves nothing that looks like a model. Of several processes that build
    the same model in the same place one wins and the others accept its result.

    Raises:
        ValueError: unknown architecture or scale, or a scale that the architecture lacks.
        FileExistsError: ``directory`` holds anything but this very model.
    """
    model = _make(architecture, seed, scale)
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _sibling(directory) as unfinished:
        _write(model, unfinished)
        try:
            os.replace(unfinished, directory)
        except OSError as error:
            if not _same_files(unfinished, directory):
                raise FileExistsError(
                    f"Cannot put the model at {directory}, because something else is already there;"
                    " remove it or choose another directory."
                ) from error
    return directory


def tiny_model_directory(architecture: str = DEFAULT_ARCHITECTURE) -> Path:
    """The directory of ``architecture`` in the user's cache; see :func:`ensure_tiny_model`.

    The name ends in a version of the content, so a change of the builder never meets an old model.
    """
    return own_caches() / "models" / f"{architecture}-{content_version()}"


def ensure_tiny_model(architecture: str = DEFAULT_ARCHITECTURE) -> Path:
    """The directory of ``architecture`` in the cache, built first if it is not there.

    Raises PermissionError where another user could have written it.
    """
    directory = tiny_model_directory(architecture)
    if not (directory / "config.json").is_file():
        build_tiny_model(architecture, directory)
    check_owner(directory.parent.resolve(), stat.S_IWOTH)
    for path in (directory, *directory.iterdir()):
        check_owner(path)
    return directory


@cache
def content_version() -> str:
    """Ten hex digits that change with any source file of this package, and with the weights."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for source in [*sorted(root.rglob("*.py")), WEIGHTS]:
        digest.update(source.relative_to(root).as_posix().encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:10]


def _make(architecture: str, seed: int, scale: str) -> Model:
    if architecture not in MODELS:
        known = ", ".join(MODELS)
        raise ValueError(f"Unknown architecture {architecture!r}; choose one of: {known}.")
    for known_scale in SCALES:
        if scale == known_scale:
            return MODELS[architecture](seed, known_scale)
    raise ValueError(f"Unknown scale {scale!r}; choose one of: {', '.join(SCALES)}.")


@contextlib.contextmanager
def _sibling(directory: Path) -> Iterator[Path]:
    """A temporary directory beside ``directory``, removed at the end if it is still there."""
    path = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _same_files(expected: Path, found: Path) -> bool:
    """True if ``found`` holds all files of ``expected``, byte for byte."""
    names = [path.name for path in expected.iterdir()]
    return found.is_dir() and filecmp.cmpfiles(expected, found, names, shallow=False)[0] == names


def _write(model: Model, directory: Path) -> None:
    write_tokenizer(directory, MAX_LENGTH, vision="image_token_id" in model.config)
    generation = {
        "bos_token_id": model.config["bos_token_id"],
        "eos_token_id": [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(TURN_END)],
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "do_sample": False,
    }
    _write_json(directory / "generation_config.json", generation)
    if model.weights is not None:
        weights = directory / "model.safetensors"
        save_file(model.weights.tensors, str(weights), metadata={"format": "pt"})
    for name, content in model.files.items():
        _write_json(directory / name, content)
    _write_json(directory / "config.json", model.config)
    for path in directory.iterdir():  # whatever the umask; safetensors lets nobody else read
        path.chmod(0o644)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
