"""Weights that differ have another fingerprint, and large checkpoints are not read whole."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sglang_hybrid.extensions.disk import fingerprint as module
from sglang_hybrid.extensions.disk.fingerprint import fingerprint


def checkpoint(folder: Path, seed: int = 0, changed: int | None = None) -> Path:
    """Eight tensors of 40,000 bytes; tensor number `changed` has other values in each row."""
    folder.mkdir()
    tensors = {}
    for number in range(8):
        source = np.random.default_rng([seed, number])
        tensors[f"w{number}"] = source.normal(size=(100, 100)).astype(np.float32)
        if number == changed:
            tensors[f"w{number}"] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(params=["whole", "blocks"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blocks":
        monkeypatch.setattr(module, "WHOLE_BYTES", 0)


@pytest.mark.usefixtures("size")
class TestFingerprint:
    def test_a_copy_has_the_same(self, tmp_path: Path) -> None:
        assert fingerprint(checkpoint(tmp_path / "a")) == fingerprint(checkpoint(tmp_path / "b"))

    @pytest.mark.parametrize("changed", range(8))
    def test_each_tensor_counts(self, tmp_path: Path, changed: int) -> None:
        one = checkpoint(tmp_path / "a")
        assert fingerprint(one) != fingerprint(checkpoint(tmp_path / "b", changed=changed))

    def test_the_configuration_counts(self, tmp_path: Path) -> None:
        one, two = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
        (two / "config.json").write_text('{"rope_theta": 1}')
        assert fingerprint(one) != fingerprint(two)

    def test_the_code_of_a_model_counts(self, tmp_path: Path) -> None:
        """The code computes the KV with `--trust-remote-code`."""
        one, two = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
        for folder in (one, two):
            (folder / "modeling_own.py").write_text("SCALE = 1\n")
        assert fingerprint(one) == fingerprint(two)
        (two / "modeling_own.py").write_text("SCALE = 2\n")
        assert fingerprint(one) != fingerprint(two)

    def test_files_of_other_formats_count(self, tmp_path: Path) -> None:
        found = set()
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "model.bin").write_bytes(bytes([number]) * 3_000_000)
            found.add(fingerprint(folder))
        assert len(found) == 3


def test_a_large_checkpoint_is_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 1 << 20)
    save_file({"w": np.zeros(4 << 20, np.uint8)}, tmp_path / "model.safetensors")
    read = []
    monkeypatch.setattr(module, "_add", lambda total, file, start, length: read.append(length))
    fingerprint(tmp_path)
    assert 0 < sum(read) < 1 << 16


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        fingerprint(tmp_path)
