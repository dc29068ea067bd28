"""Mistakes in a model directory or a port are one sentence, before anything loads."""

import argparse
import json
import math
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from sglang_hybrid.serving import preflight
from sglang_hybrid.serving.model_directory import check_hub, check_model, weight_bytes
from sglang_hybrid.serving.preflight import (
    check_adapters,
    check_device,
    check_draft,
    check_gpus,
    check_host_room,
    check_keys,
    check_overrides,
    check_pools,
    check_port,
    check_ranges,
    check_ranks,
    check_template,
    check_tenants,
    check_tokenizer,
    check_trace,
)
from sglang_hybrid.serving.startup import StartupError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The least that passes: a config, two weight files with their index, a tokenizer."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (directory / "tokenizer.json").write_text("{}")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in shards:
        save_file({"weight": np.ones((4, 4), np.float32)}, directory / name)
    index = {"weight_map": {"a.weight": shards[0], "b.weight": shards[1]}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def refused(path: Path | str) -> str:
    """The one sentence that `check_model` says about `path`."""
    with pytest.raises(StartupError) as caught:
        check_model(str(path))
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_whole_model_passes(model: Path) -> None:
    check_model(str(model))
    assert weight_bytes(model) == sum(f.stat().st_size for f in model.glob("*.safetensors"))


NAME = "nvidia/Nemotron-H-8B-Base-8K"
NOBODY = "http://127.0.0.1:9"


class Hub(BaseHTTPRequestHandler):
    """A hub's mirror that knows one model."""

    def do_HEAD(self) -> None:
        known = self.path == f"/{NAME}/resolve/main/config.json"
        self.send_response(200 if known else 401 if "gone" in self.path else 404)
        self.send_header("X-Error-Code", "" if known or "bare" in self.path else "RepoNotFound")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the hub's address; its cache is empty."""
    check_hub.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def use(address: str) -> None:
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    yield use
    check_hub.cache_clear()


@pytest.fixture
def mirror(hub: Callable[[str], None]) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        hub(f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.usefixtures("mirror")
def test_a_name_that_a_mirror_of_the_hub_has_passes() -> None:
    check_model(NAME)


@pytest.mark.usefixtures("mirror")
def test_what_a_hub_has_without_a_config_is_left_to_sglang() -> None:
    check_model("nvidia/bare")


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("name", ["nvidia/gone", "nvidia/other"])
def test_a_name_that_the_hub_does_not_have(name: str) -> None:
    said = f"--model-path '{name}' is no directory here, and 127.0.0.1 has none of this name"
    assert said in refused(name)


def test_a_hub_that_cannot_be_asked(hub: Callable[[str], None]) -> None:
    hub(NOBODY)
    for check, flag in {
        check_model: "--model-path",
        check_tokenizer: "--tokenizer-path",
        check_draft: "--speculative-draft-model-path",
        lambda name: check_adapters([f"a={name}"]): "--lora-paths",
    }.items():
        with pytest.raises(StartupError, match=f"^{flag} '{NAME}' is no .* 127.0.0.1 cannot be"):
            check(NAME)


def test_an_address_of_the_hub_that_is_none(hub: Callable[[str], None]) -> None:
    hub("mirror")
    assert "cannot be asked for it" in refused(NAME)


def test_the_hub_is_not_asked_for_what_its_cache_has(
    hub: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "and HF_HUB_OFFLINE is set; give its directory, or unset" in refused(NAME)
    (tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots" / "f00").mkdir(
        parents=True
    )
    check_model(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    check_model(NAME)


def test_urls_and_modelscope_are_left_to_sglang(
    hub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(NOBODY)
    check_model("s3://bucket/model")
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    check_model(NAME)


def test_a_draft_model_that_is_nowhere(model: Path) -> None:
    check_draft(None)
    check_draft(str(model))
    with pytest.raises(StartupError, match="--speculative-draft-model-path '/no/such' does not"):
        check_draft("/no/such")


@pytest.mark.parametrize("path", ["/no/such/model", "nowhere", "a/b/c"])
def test_a_path_that_does_not_exist(path: str) -> None:
    assert f"model path '{path}' does not exist; give a directory" in refused(path)


def test_a_file_instead_of_a_directory(model: Path) -> None:
    assert "is a file; give the model's directory" in refused(model / "config.json")


def test_a_gguf_file_passes(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    check_model(str(file))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "has no config.json"),
        (
            "config.json",
            '{"architectures": ["Llama',
            "config.json is no model's config (Unterminated",
        ),
        ("config.json", "\x00\ud8ff", "config.json is no text in UTF-8"),
        ("config.json", "[]", "config.json is no model's config (Expected `object`"),
        ("config.json", "{}", "config.json names no `architectures`"),
        *((INDEX, text, f"{INDEX} is no index of weights") for text in ("{", "{}", "[]")),
        (INDEX, '{"weight_map": []}', f"{INDEX} is no index of weights"),
        ("model-00002-of-00002.safetensors", None, "lacks 1 of 2 weight files, model-00002-of"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_a_file_that_is_missing_or_broken(
    model: Path, name: str, content: str | None, said: str
) -> None:
    (model / name).unlink()
    if content is not None:
        (model / name).write_text(content, errors="surrogatepass")
    assert said in refused(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", INDEX])
def test_a_pipe_or_a_device_in_a_models_directory(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert f"{name} is no regular file" in refused(model)
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    assert f"{name} is no regular file" in refused(model)


def test_a_template_that_is_no_file(tmp_path: Path) -> None:
    for known in (None, "chatml", __file__):
        check_template(known)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match=r"--chat-template '.*pipe' is no file; give one"):
        check_template(str(tmp_path / "pipe"))


def test_no_weights(model: Path) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert "has no weights" in refused(model)
    assert weight_bytes(model) == 0
    check_model(str(model), weights=False)


@pytest.mark.parametrize("keep", [0, 4, 40, -1], ids=["empty", "no header", "no data", "one short"])
def test_a_truncated_weight_file(model: Path, keep: int) -> None:
    file = model / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is damaged" in refused(model)


def test_a_tokenizer_may_be_elsewhere(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    check_model(str(model), tokenizer=False)


def test_a_linked_model_passes(model: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(model)
    check_model(str(link))
    shutil.rmtree(model)
    assert "does not exist" in refused(link)


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_a_port_that_is_none() -> None:
    with pytest.raises(StartupError, match=r"^--port 65536: give 65535 at most, or leave it out.$"):
        check_port("127.0.0.1", 65_536)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_this_machine(host: str) -> None:
    with pytest.raises(
        StartupError, match=rf"^cannot listen on {host}:30001 \(.*\); give a --host"
    ):
        check_port(host, 30_001)


def test_copies_for_which_the_machine_has_no_memory() -> None:
    check_host_room("--hicache-size 3", 3e9, 3e9)
    with pytest.raises(StartupError, match=r"^--hicache-size 3 asks for 3\.0 GB .* 2\.5 GB can be"):
        check_host_room("--hicache-size 3", 3e9, 2.5e9)
    with pytest.raises(StartupError, match=r"0\.0 GB can be had"):
        check_host_room("--hicache-size 3", 3e9, -1e9)


def test_a_device_that_is_not_there() -> None:
    check_device(None)
    check_device("cpu")
    for device in ("mtia", "xpu", "nowhere"):
        with pytest.raises(StartupError, match=rf"--device {device}: torch .* sees no such device"):
            check_device(device)


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver that is too old for the build of torch, or a build without CUDA: the server would
    load the model into the machine's memory.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "is_ours", lambda: True)
    for name in ("nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    check_gpus(tmp_path)  # of a driver without a GPU
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(preflight, "NVIDIA_DEVICES", tmp_path)
    with pytest.raises(StartupError, match=r"torch .* cannot use it \(.+\); .* --device cpu\.$"):
        check_device(None)
    check_device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_device(None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(preflight, "is_ours", lambda: False)  # torch sees it
    check_device(None)


def test_pools_that_hold_no_request() -> None:
    check_pools(None, None, 3)
    check_pools(16, 3, 3)
    check_pools(16, 0, 0)
    with pytest.raises(StartupError, match=r"--max-total-tokens 1 .* give 16 at least"):
        check_pools(1, None, 3)
    with pytest.raises(StartupError, match=r"--max-mamba-cache-size 0 .* give 3 at least"):
        check_pools(None, 0, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"page_size": 0}, "--page-size 0: give 1 or more, or leave it out."),
        ({"tp_size": -2}, "--tp-size -2: give 1 or more, or leave it out."),
        ({"context_length": 0}, "--context-length 0: give 1 or more, or leave it out."),
        ({"port": 0}, "--port 0: give 1 or more, or leave it out."),
        ({"tp_size": 10**12}, f"--tp-size {10**12}: give 65,536 at most, or leave it out."),
        (
            {"max_total_tokens": 10**100},
            "--max-total-tokens a number of 333 bits: give 1,099,511,627,776 at most, or leave it "
            "out.",
        ),
        (
            {"hicache_ratio": math.inf},
            "--hicache-ratio inf: give a number above 0, or leave it out.",
        ),
        ({"hicache_size": -1}, "--hicache-size -1: give 0 or more, or leave it out."),
        ({"hicache_ratio": 0.0}, "--hicache-ratio 0: give a number above 0, or leave it out."),
        (
            {"mem_fraction_static": 5.0},
            "--mem-fraction-static 5: give a share of the memory between 0 and 1, or leave it out.",
        ),
    ],
)
def test_numbers_that_no_server_can_have(given: dict[str, float], said: str) -> None:
    with pytest.raises(StartupError, match=f"^{re.escape(said)}$"):
        check_ranges(argparse.Namespace(**given))


def test_numbers_that_a_server_can_have() -> None:
    check_ranges(argparse.Namespace())
    check_ranges(argparse.Namespace(page_size=1, hicache_size=0, mem_fraction_static=0.4))
    check_ranges(argparse.Namespace(page_size=None, hicache_ratio=0.5, context_length=None))


@pytest.mark.parametrize(
    "heads",
    [
        {"mamba_num_heads": 8},
        {"num_heads": 8, "state_size": 16},
        {"text_config": {"linear_num_key_heads": 8, "linear_num_value_heads": 16}},
    ],
)
def test_ranks_that_cannot_share_the_heads_of_recurrent_layers(
    tmp_path: Path, heads: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(heads))
    for ranks in (1, 2, 8):
        check_ranks(str(tmp_path), ranks, lambda: False)
    with pytest.raises(StartupError, match=r"^--tp-size 3 cannot share the 8 heads .* 1, 2, 4, 8"):
        check_ranks(str(tmp_path), 3, lambda: True)


def test_ranks_that_cannot_share_the_heads_of_attention(tmp_path: Path) -> None:
    """SGLang's models assert it on a GPU; on a CPU it pads them."""
    config = {"mamba_n_heads": 24, "num_attention_heads": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_ranks(str(tmp_path), 8, lambda: True)
    check_ranks(str(tmp_path), 4, lambda: False)
    with pytest.raises(StartupError, match=r"share the 12 heads .* attention; give 1, 2, 3, 4, 6,"):
        check_ranks(str(tmp_path), 8, lambda: False)


def test_ranks_of_a_model_without_recurrent_layers_or_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_heads": 4}))
    check_ranks(str(tmp_path), 3, lambda: False)
    check_ranks("someone/some-model", 3, lambda: False)


@pytest.mark.usefixtures("mirror")
def test_a_tokenizer_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^--tokenizer-path '.*' has no tokenizer"):
        check_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").touch()
    for path in (None, str(tmp_path), NAME, "s3://bucket/tokenizer"):
        check_tokenizer(path)
    with pytest.raises(StartupError, match=r"^--tokenizer-path '/nowhere' does not exist; give a"):
        check_tokenizer("/nowhere")


@pytest.mark.parametrize("text", ["{bad", "[]", "", '{"a": ' + "[" * 100_000])
def test_what_is_no_json_object(text: str) -> None:
    check_overrides("{}")
    with pytest.raises(StartupError, match=r"^--json-model-override-args .* is no JSON object"):
        check_overrides(text)


@pytest.mark.usefixtures("mirror")
def test_adapters(tmp_path: Path) -> None:
    whole, empty = tmp_path / "whole", tmp_path / "empty"
    for directory in (whole, empty):
        directory.mkdir()
    (whole / "adapter_config.json").write_text("{}")
    check_adapters(None)
    check_adapters([str(whole), f"name={whole}", {"lora_path": str(whole)}, NAME])
    for given in (str(empty), f"name={empty}"):
        with pytest.raises(StartupError, match=r"has no adapter_config\.json"):
            check_adapters([given])
    for given in ("/nowhere", "name=/nowhere", {"lora_name": "a", "lora_path": "/nowhere"}):
        with pytest.raises(StartupError, match="--lora-paths: '/nowhere' does not exist"):
            check_adapters([given])


@pytest.mark.parametrize(
    ("words", "flags", "sentence"),
    [
        ("api-key", {"api_key": "k"}, "all clients send the one --api-key"),
        ("required", {"is_embedding": True}, "keeps the prompts of all its clients together"),
        (
            "required",
            {"grpc_port": 1},
            "over gRPC have no key, and most of them no headers; leave out --grpc-port",
        ),
    ],
)
def test_tenants_that_could_not_be_kept_apart(
    words: str, flags: dict[str, object], sentence: str
) -> None:
    def namespace(**given: object) -> argparse.Namespace:
        return argparse.Namespace(**{"api_key": None, "is_embedding": False, **given})

    with pytest.raises(StartupError, match=sentence):
        check_tenants(namespace(**flags), words)
    check_tenants(namespace(**flags), "")
    check_tenants(namespace(api_key="k"), "api-key,required")
    check_tenants(namespace(), "api-key")


@pytest.mark.parametrize("package", ["nothing_like_it", "nothing_like_it.sdk", "json.nothing"])
def test_traces_without_their_packages(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "TRACE_PACKAGES", ("json.decoder", package))
    with pytest.raises(
        StartupError, match=r"needs OpenTelemetry.*install opentelemetry-sdk and open"
    ):
        check_trace(True)
    check_trace(False)
    monkeypatch.setattr(preflight, "TRACE_PACKAGES", ("json.decoder",))
    check_trace(True)


def test_a_key_can_be_read_and_is_checked(tmp_path: Path) -> None:
    none = dict.fromkeys(("api_key", "admin_api_key", "ssl_keyfile_password"))
    file = tmp_path / "key"
    admin = argparse.Namespace(**{**none, "admin_api_key": f"@{file}", "tokenizer_worker_num": 1})
    with pytest.raises(StartupError, match=r"--admin-api-key: the key's file: .* cannot be read"):
        check_keys(admin)
    file.write_text("key")
    check_keys(admin)
    admin.tokenizer_worker_num = 2
    with pytest.raises(StartupError, match=r"--admin-api-key: SGLang checks no keys with .*-num 2"):
        check_keys(admin)
    check_keys(argparse.Namespace(**none, tokenizer_worker_num=2))
