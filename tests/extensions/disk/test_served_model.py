"""Whatever changes KV and states of the same tokens is another identity on disk."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_hybrid.core.own_files import identity_of
from sglang_hybrid.extensions.disk import served_model as module
from sglang_hybrid.extensions.disk.served_model import Unidentified, served_model
from tests.extensions.disk.test_fingerprint import checkpoint

Identity = Callable[..., str]


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identity:
    """The identity of a server with these arguments, and SGLang's own for all others."""
    model = str(checkpoint(tmp_path / "model"))

    def identity(**changed: Any) -> str:
        arguments = ServerArgs(model_path=model)
        for name, value in changed.items():
            assert hasattr(arguments, name), f"SGLang has no {name}"
            setattr(arguments, name, value)
        monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: arguments)
        return identity_of(served_model())

    return identity


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"),
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("json_model_override_args", '{"rope_theta": 1}'),
        ("model_config_parser", "another"),
        ("model_loader_extra_config", '{"a": 1}'),
        ("modelopt_quant", "fp8"),
        ("quantize_and_serve", True),
        ("model_impl", "transformers"),
        ("weight_version", "another"),
        ("load_format", "safetensors"),
        ("kt_method", "BF16"),
        ("kt_num_gpu_experts", 4),
        ("forward_hooks", [{"name": "steer", "config": {"by": 2}}]),
        ("enable_precise_embedding_interpolation", True),
    ],
)
def test_each_setting_counts(identity: Identity, name: str, value: object) -> None:
    assert identity(**{name: value}) != identity()
    assert identity(**{name: value}) == identity(**{name: value})


@pytest.mark.parametrize(
    "name", ["quantization_param_path", "decrypted_config_file", "rl_quant_profile"]
)
def test_the_content_of_each_file_counts(identity: Identity, tmp_path: Path, name: str) -> None:
    """The path of a file does not count."""
    file, copy = tmp_path / "a.json", tmp_path / "b.json"
    file.write_text("{}")
    copy.write_text("{}")
    before = identity(**{name: str(file)})
    assert before == identity(**{name: str(copy)}) != identity()
    file.write_text('{"scale": 2}')
    assert identity(**{name: str(file)}) != before
    with pytest.raises(Unidentified, match="cannot be read: No such file"):
        identity(**{name: str(tmp_path / "gone")})


def test_what_changes_no_kv_does_not_count(identity: Identity) -> None:
    assert identity(port=1, max_total_tokens=5, log_level="debug") == identity()


@pytest.mark.parametrize("package", ["sglang", "torch"])
def test_each_version_counts(
    identity: Identity, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    before, version = identity(), importlib.metadata.version

    def other(name: str) -> str:
        return "99" if name == package else version(name)

    monkeypatch.setattr(importlib.metadata, "version", other)
    assert identity() != before


def test_our_own_version_counts(identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity()
    monkeypatch.setattr(module, "__version__", "99")
    assert identity() != before


def test_weights_count_and_where_they_lie_does_not(identity: Identity, tmp_path: Path) -> None:
    copy, other = checkpoint(tmp_path / "copy"), checkpoint(tmp_path / "other", changed=3)
    assert identity(model_path=str(copy)) == identity() != identity(model_path=str(other))


def test_the_experts_of_a_folder_of_their_own_count(identity: Identity, tmp_path: Path) -> None:
    one, two = (str(checkpoint(tmp_path / name, seed)) for seed, name in enumerate("ab"))
    assert len({identity(), identity(kt_weight_path=one), identity(kt_weight_path=two)}) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("load_format", each) for each in ("remote_instance", "rdma", "private", "ipc_cache")),
        ("weight_cache_mode", "client"),
        ("modelopt_checkpoint_restore_path", "/quantized"),
    ],
)
def test_weights_from_elsewhere_have_no_identity(identity: Identity, name: str, value: str) -> None:
    """The weights in the model's folder may be others."""
    with pytest.raises(Unidentified, match=f"{value} may be others than those of --model-path"):
        identity(**{name: value})


def test_of_a_name_on_the_hub_only_the_usual_downloads_are_looked_at(
    identity: Identity, tmp_path: Path
) -> None:
    """An older snapshot may lie there, and the one that is served in another folder."""
    with pytest.raises(Unidentified, match="weights of --download-dir"):
        identity(model_path="some/model", download_dir=str(tmp_path))
    assert identity(download_dir=str(tmp_path)) == identity(), "a folder is not downloaded"


def test_adapters_count_by_name_place_and_weights(identity: Identity, tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]

    def adapter(name: str, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_path=str(folder))

    one, two = adapter("one", folders[0]), adapter("two", folders[0])
    found = {
        identity(lora_paths=adapters)
        for adapters in ([], [one], [two], [adapter("one", folders[1])], [one, two])
    }
    assert len(found) == 5
    assert identity(lora_paths=[one, two]) == identity(lora_paths=[two, one])
    before = identity(lora_paths=[adapter("one", folders[2])])
    (folders[2] / "model.safetensors").write_bytes(b"trained further")
    assert identity(lora_paths=[adapter("one", folders[2])]) != before


def test_what_has_no_weights_has_no_identity(identity: Identity, tmp_path: Path) -> None:
    with pytest.raises(Unidentified, match="dummy"):
        identity(load_format="dummy")
    with pytest.raises(Unidentified, match="cannot be identified"):
        identity(model_path=str(tmp_path))
    with pytest.raises(Unidentified, match="are not known"):
        identity(lora_paths=[SimpleNamespace(lora_name="one", lora_path=None)])
