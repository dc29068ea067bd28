"""Servers beside an SGLang that is not quite the released one: other pieces, other metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from sglang_hybrid import SGLANG_VERSION
from sglang_hybrid.hooks.needs import Need
from sglang_hybrid.hooks.patching import load_patches
from sglang_hybrid.hooks.sources import paths_of
from sglang_hybrid.hooks.table import HOOKS
from tests.hooks.changed import (
    commented,
    copy_changed,
    everything_changed,
    read,
    with_another_hunk,
)
from tests.server.client import Serve, cached, random_prompt
from tests.server.engine_hits import HITS, REQUESTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spawned")]
HERE = {Need.CACHE, Need.NO_TORCHVISION, Need.MAMBA2}
"""Pieces that a server of Nemotron-H cannot be without in this environment."""
SGLANGS = (sys.executable, "-m", "sglang.launch_server")
NEXT = "0.5.24"
STAND_IN = """
import importlib.abc, importlib.machinery, sys, types
from unittest.mock import MagicMock

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module

    def exec_module(self, module):
        pass

__path__ = []
__version__ = "0.28.0"
sys.meta_path.append(Finder())
"""
LINE = "sglang_hybrid: not available beside this SGLang: "


def pretend_release(version: str, folder: Path) -> None:
    """A folder that, on PYTHONPATH, lets SGLang seem to be of this version."""
    metadata = folder / f"sglang-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")


def hits(url: str) -> list[int]:
    return [cached(requests.post(url + "/generate", json=body).json()) for body in REQUESTS]


def test_the_cache_serves_alone(serve: Serve, tmp_path: Path) -> None:
    """A piece of everything but the cache is another one."""
    changed = copy_changed(tmp_path, everything_changed(HERE))
    with serve(environment={"PYTHONPATH": str(changed)}) as server:
        assert hits(server.url) == HITS
        log = server.log.read_text()
    (line,) = (line for line in log.splitlines() if LINE in line)
    assert all(f"{need.what} (" in line for need in set(Need) - HERE)
    assert "Traceback" not in log


def test_with_comments_in_all_its_files_nothing_is_lacking(serve: Serve, tmp_path: Path) -> None:
    files = {*load_patches(), *(path for hook in HOOKS for path in paths_of(hook.module))}
    texts = {path: commented(text) for path in files if (text := read(path)) is not None}
    assert len(texts) > 60
    changed = copy_changed(tmp_path, texts)
    with serve(environment={"PYTHONPATH": str(changed)}) as server:
        assert hits(server.url) == HITS
        log = server.log.read_text()
    assert LINE not in log and "Traceback" not in log


def test_one_model_is_refused_and_others_serve(
    model_directory: Callable[[str], Path], serve: Serve, tmp_path: Path
) -> None:
    path = "sglang/srt/models/zaya.py"
    text = with_another_hunk(load_patches()[path], Need.ZAYA, str(read(path)))
    environment = {"PYTHONPATH": str(copy_changed(tmp_path, {path: text}))}
    flags = ("--model-path", str(model_directory("zaya")), "--port", "1")
    command = [sys.executable, "-m", "sglang_hybrid.launch_server", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}
    )
    said = f"cannot start: the model of type 'zaya' cannot be served here: {path} of the installed"
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert said in done.stderr, done.stderr[-2000:]
    with serve(environment=environment) as server:
        assert hits(server.url) == HITS


def test_a_post_release_serves_with_our_cache(serve: Serve, tmp_path: Path) -> None:
    """SGLang's own program, with metadata of a post-release."""
    pretend_release(f"{SGLANG_VERSION}.post1", tmp_path)
    flags = ("--radix-cache-backend", "hybrid", "--device", "cpu")
    with serve(*flags, program=SGLANGS, environment={"PYTHONPATH": str(tmp_path)}) as server:
        assert hits(server.url) == HITS


def test_another_release_serves_as_if_we_were_not_there(serve: Serve, tmp_path: Path) -> None:
    """SGLang's own program under the metadata of the next release, on its own kind of CPU server.
    That one imports torchvision and vllm, whose CPU builds are on no index; stand-ins serve here,
    for a text model computes nothing with either.
    """
    pretend_release(NEXT, tmp_path)
    (tmp_path / "torchvision.py").write_text(STAND_IN)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_custom_ops.py").write_text("rotary_embedding = None\n")
    flags = ("--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192")
    environment = {"PYTHONPATH": str(tmp_path)}
    prompt = random_prompt(200, seed=1)
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with serve(*flags, of="transformer", program=SGLANGS, environment=environment) as server:
        answers = [requests.post(server.url + "/generate", json=body).json() for _ in range(2)]
        log = server.log.read_text()
    assert answers[0]["output_ids"] == answers[1]["output_ids"]
    assert cached(answers[1]) == len(prompt) - 1
    assert "hybrid_cache" not in answers[1]["meta_info"]
    lines = [line for line in log.splitlines() if "sglang_hybrid" in line]
    (line,) = (line for line in lines if "server_args" not in line)
    assert f"sglang_hybrid does nothing here: sglang {NEXT} is installed" in line
