"""Building: the same bytes every time, all files or none, and errors in one sentence."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_hybrid.core.costs.cost import CostModel
from sglang_hybrid.extensions.cpu.models import (
    ARCHITECTURES,
    build_tiny_model,
    ensure_tiny_model,
    tiny,
    tiny_model_directory,
)
from sglang_hybrid.extensions.cpu.models.tokenizer import VOCAB_SIZE

SCRIPT = Path(__file__).parents[4] / "scripts" / "make_tiny_model.py"
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
SEEN = ["preprocessor_config.json", "video_preprocessor_config.json"]
"""Files of a model that reads images."""


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_has_all_its_files(name: str, model_dirs: dict[str, Path]) -> None:
    seen = SEEN if name == "qwen3.5-vl" else []
    assert sorted(path.name for path in model_dirs[name].iterdir()) == sorted(FILES + seen)
    config = json.loads((model_dirs[name] / "config.json").read_text())
    assert config["vocab_size"] == VOCAB_SIZE
    assert config["dtype"] == "float32"


def test_the_8b_scale_has_the_layers_of_nemotron_h_8b_and_no_weights(tmp_path: Path) -> None:
    model = build_tiny_model("nemotron-h", tmp_path / "model", scale="8b")
    assert sorted(path.name for path in model.iterdir()) == [
        name for name in FILES if name != "model.safetensors"
    ]
    config = json.loads((model / "config.json").read_text())
    pattern = config["hybrid_override_pattern"]
    assert [pattern.count(kind) for kind in "M*-"] == [24, 4, 24]
    cost = CostModel.from_config(config)
    assert (cost.state_bytes, cost.kv_bytes_per_token) == (102_137_856, 16_384)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_another_seed_gives_other_weights_of_the_same_model(name: str) -> None:
    first, second = (ARCHITECTURES[name](seed, "tiny") for seed in (0, 1))
    assert first.config == second.config
    ours, theirs = first.weights.tensors, second.weights.tensors
    assert ours.keys() == theirs.keys()
    assert all(
        ours[key].shape == theirs[key].shape
        and ((ours[key] != theirs[key]).any() or ours[key].std() == 0 or key.endswith("A_log"))
        for key in ours
    )


def test_two_builds_are_the_same(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    directory = build_tiny_model("nemotron-h", tmp_path / "model")
    assert digests(directory) == digests(model_dirs["nemotron-h"])


@pytest.mark.parametrize("asked", ["qwen3-next", pytest.param("all", marks=pytest.mark.slow)])
def test_another_process_writes_the_same_bytes(
    model_dirs: dict[str, Path], tmp_path: Path, asked: str
) -> None:
    output = tmp_path if asked == "all" else tmp_path / asked
    command = [sys.executable, str(SCRIPT), "--architecture", asked, "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True)
    for name in model_dirs if asked == "all" else [asked]:
        assert digests(tmp_path / name) == digests(model_dirs[name])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--architecture", "hyena"],
            "Unknown architecture 'hyena'; choose one of: trained, nemotron-h",
        ),
        (["--scale", "7b"], "Unknown scale '7b'; choose one of: tiny, 25m, 100m, 8b."),
        (["--architecture", "mamba2", "--scale", "100m"], "'mamba2' has no scale '100m'"),
    ],
)
def test_the_script_complains_in_one_sentence(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "model"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_the_default_model_is_built_once(cache_home: Path) -> None:
    directory = ensure_tiny_model()
    assert directory == tiny_model_directory()
    assert directory.parent == cache_home / "sglang_hybrid" / "models"
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert ensure_tiny_model() == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("part", ["..", ".", "config.json", "model.safetensors"])
def test_a_model_that_another_user_may_write_is_refused(part: str, cache_home: Path) -> None:
    """Models are refused there as native kernels are (test_native_build.py)."""
    before = os.umask(0o002)
    try:
        path = (ensure_tiny_model() / part).resolve()
    finally:
        os.umask(before)
    assert ensure_tiny_model() == tiny_model_directory()
    path.chmod(path.stat().st_mode | 0o022)
    with pytest.raises(PermissionError, match=f"another user may write {path}, so it is not used"):
        ensure_tiny_model()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_model_of_another_user_is_refused(cache_home: Path) -> None:
    planted = ensure_tiny_model()
    os.chown(planted / "config.json", 12_345, -1)
    with pytest.raises(PermissionError, match=r"another user may write .*config\.json"):
        ensure_tiny_model()
    os.chown(planted / "config.json", 0, -1)
    moved = planted.rename(planted.with_name("moved"))
    planted.symlink_to(moved)
    with pytest.raises(PermissionError):
        ensure_tiny_model()


def test_an_interrupted_build_leaves_nothing(
    cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tiny, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ensure_tiny_model()
    assert not tiny_model_directory().exists()
    assert list(tiny_model_directory().parent.iterdir()) == []
    assert sorted(path.name for path in ensure_tiny_model().iterdir()) == FILES


def test_a_killed_build_is_not_used(cache_home: Path) -> None:
    code = (
        "import os\n"
        "from sglang_hybrid.extensions.cpu.models import ensure_tiny_model, tiny\n"
        "tiny.save_file = lambda *_, **__: os._exit(9)\n"
        "ensure_tiny_model()"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert not tiny_model_directory().exists()
    assert sorted(path.name for path in ensure_tiny_model().iterdir()) == FILES


def test_builders_may_race(cache_home: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ensure_tiny_model(), range(4)))
    assert set(found) == {tiny_model_directory()}
    assert list(tiny_model_directory().parent.iterdir()) == [tiny_model_directory()]


def test_an_occupied_directory_is_refused(tmp_path: Path) -> None:
    occupied = build_tiny_model("mamba2", tmp_path / "model")
    before = digests(occupied)
    with pytest.raises(FileExistsError, match="something else is already there"):
        build_tiny_model("mamba2", occupied, seed=1)
    assert digests(occupied) == before
    assert build_tiny_model("mamba2", occupied) == occupied
