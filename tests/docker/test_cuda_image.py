"""docker/Dockerfile is built on a stand-in for SGLang's own image, and its server answers.

The stand-in has SGLang as that image has it: an editable install, which Python finds behind all
folders of its path, and root's cache of what SGLang has compiled. It has no CUDA.
"""

from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_hybrid.serving.server_process import free_port
from tests.docker.conftest import Start
from tests.docker.images import ROOT, Images

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

BASE = "localhost/sglang"
IMAGE = "localhost/sglang-hybrid:cuda"
SITE = "/opt/venv/lib/python3.11/site-packages"
EDITABLE = (
    "import sys, importlib.machinery as m; "
    "F = type('F', (), {}); "
    "F.find_spec = staticmethod(lambda name, *_, m=m: m.PathFinder.find_spec("
    "name, ['/sgl-workspace/sglang/python']) if name == 'sglang' else None); "
    "sys.meta_path.append(F)"
)
"""A line of a .pth file, which does what setuptools' finder of an editable install does."""
STAND_IN = f"""
FROM %s
USER 0
RUN userdel sglang \\
    && pip uninstall -y sglang-hybrid matplotlib rich whatthepatch \\
    && mkdir -p /sgl-workspace/sglang/python /root/.cache/sglang/jit \\
    && touch /root/.cache/sglang/jit/compiled.so \\
    && mv {SITE}/sglang /sgl-workspace/sglang/python/ \\
    && echo "{EDITABLE}" >{SITE}/editable.pth
"""
CHANGED = """
FROM %s
RUN sed -i "s/output = self._request_dispatcher/out = self._request_dispatcher/" \\
    /sgl-workspace/sglang/python/sglang/srt/managers/scheduler.py
"""


@pytest.fixture(scope="module")
def base(images: Images, cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    dockerfile = tmp_path_factory.mktemp("base") / "Dockerfile"
    dockerfile.write_text(STAND_IN % cpu_image)
    images.build(dockerfile, BASE)
    return BASE


def test_it_serves(images: Images, base: str, start: Start) -> None:
    images.build(ROOT / "docker" / "Dockerfile", IMAGE, BASE=base)
    port = str(free_port())
    with start(IMAGE, "--port", port, PORT=port) as container:
        container.wait_until_healthy()
        body: dict[str, Any] = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}
        answer = requests.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=120).json()
        users = {process.uids().effective for process in container.processes()}
    assert "hybrid_cache" in answer["meta_info"]
    assert users == {10001}


def test_another_release_ends_the_build(images: Images, base: str, tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(CHANGED % base)
    images.build(dockerfile, "localhost/changed")
    with pytest.raises(AssertionError, match=r"scheduler.py .* is not the file of sglang"):
        images.build(ROOT / "docker" / "Dockerfile", IMAGE, BASE="localhost/changed")
