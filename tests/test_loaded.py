"""Processes of a server load of this package what they were asked for, and no more."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from scripts.loaded import ROOT, by_room, loaded, product
from sglang_hybrid.core.extensions import extension

IMPORTS = """
import sys

def tell():
    print(*(name for name in sys.modules if name.startswith("sglang_hybrid")))

from sglang_hybrid import plugin
plugin.activate()
plugin.register()
tell()
import sglang.srt.managers.scheduler, sglang_hybrid.cache.factory
tell()
"""

ON_A_GPU = """
from sglang_hybrid.serving import devices
devices.accelerator_available = lambda: True
"""

LENDING = """
from sglang_hybrid.cache.state_slots import parked_kv, spilled_states
tell()
"""
"""Pools lend each other room there."""

LATER = {
    f"sglang_hybrid.{name}"
    for name in (
        *("cache.queue.served_queue", "cache.request.full_hits", "cache.request.segments"),
        *("cache.split_watch", "cache.tiers.codec_choice", "cache.tuning"),
        *("core.programs", "core.traffic.recorder", "core.victims.coding", "storage.codecs.codecs"),
        *("explain.changing_text", "explain.explanation", "explain.miss_report"),
        "explain.prefix_tiers",
        *("serving.http_tenants", "serving.telemetry.metrics", "serving.warm_up"),
    )
}
"""Modules that a flag, a question or a request of a kind asks for, or another process."""

MOST_LINES = 20_000
"""Lines of the product that the scheduler of a default server has loaded."""

PROGRAMS = tuple(
    f"sglang_hybrid.{name}" for name in ("launch_server", "prompts", "replay", "replicas")
)
"""Modules that no process of a server but the first one loads."""


def test_what_is_not_asked_for_is_not_loaded() -> None:
    """A new process is begun as by SGLang, with the plugin; then a scheduler is."""
    plugin, scheduler = imported(IMPORTS)
    without_cache = {
        "sglang_hybrid.cache.factory",
        "sglang_hybrid.storage",
        "sglang_hybrid.explain",
    }
    assert not plugin & without_cache
    assert "sglang_hybrid.cache.factory" in scheduler
    assert not [name for name in scheduler if name.startswith(PROGRAMS)]
    assert extensions(scheduler) == {"cpu", "guard"}
    assert not scheduler & LATER


def test_on_a_gpu_a_scheduler_has_loaded_no_more() -> None:
    """The GPU is pretended: a platform of SGLang's own loads no other module of ours."""
    *_, scheduler = imported(ON_A_GPU + IMPORTS + LENDING)
    assert extensions(scheduler) == {"guard"}
    assert not scheduler & LATER
    names = (ROOT / name.replace(".", "/") for name in scheduler)
    files = {name / "__init__.py" if name.is_dir() else name.with_suffix(".py") for name in names}
    assert product(by_room({file for file in files if file.exists()})) <= MOST_LINES


def imported(program: str) -> list[set[str]]:
    """Our modules, each time that the program prints them, run in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    told = subprocess.run(command, check=True, text=True, capture_output=True).stdout
    return [set(line.split()) for line in told.splitlines()]


def extensions(modules: set[str]) -> set[str]:
    """Names of the extensions that have a module among `modules`."""
    parts = [name.split(".") for name in modules]
    return {part[2] for part in parts if part[1:2] == ["extensions"] and len(part) > 2}


def test_the_product_names_extensions_that_exist() -> None:
    """The arguments of `extension("...")` and `guard("...")`, and the names that are taken from
    them at once.
    """
    taken = set()
    for file in (ROOT / "sglang_hybrid").rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if name := named_extension(node):
                taken.add((name, ""))
            if isinstance(node, ast.Attribute) and (name := named_extension(node.value)):
                taken.add((name, node.attr))
    assert len(taken) > 20
    for name, attribute in sorted(taken):
        module = extension(name)
        assert not attribute or hasattr(module, attribute), (name, attribute)


def named_extension(node: ast.AST) -> str:
    """The extension that a call asks for by name; "" of anything else."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if called not in ("extension", "guard"):
        return ""
    assert isinstance(node, ast.Call)
    (name,) = node.args
    if isinstance(name, ast.JoinedStr):  # of `guard` itself
        return ""
    assert isinstance(name, ast.Constant) and isinstance(name.value, str), ast.unparse(node)
    return name.value if called == "extension" else f"guard.{name.value}"


@pytest.mark.slow
def test_a_default_server_has_loaded_no_more() -> None:
    (files,) = (files for title, (files, _) in loaded().items() if title == "sglang::scheduler")
    rooms = by_room(files).keys()
    below = {room for room in rooms if room.startswith("extensions/")}
    assert below - {"extensions/__init__.py"} == {"extensions/cpu", "extensions/guard"}
    assert not rooms & {"prompts", "replay.py", "replicas.py", "launcher.py"}
    assert product(by_room(files)) <= MOST_LINES
