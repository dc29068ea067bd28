"""Hooks on a made-up module: each kind, and what keeps one from taking hold."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_hybrid import SGLANG_VERSION as VERSION
from sglang_hybrid.hooks import hook as hooks
from sglang_hybrid.hooks import install
from sglang_hybrid.hooks.hook import Hook, HookError, HookKind, is_in_place, put_around
from sglang_hybrid.hooks.needs import Need
from sglang_hybrid.hooks.sources import Sources, digest, file_digest, load_hashes, loaded_source
from sglang_hybrid.hooks.table import HOOKS

OTHER = """
def imported(n):
    return n + 100
"""
SOURCE = '''
from toyhooks.other import imported


def plain(n, *, more=0):
    """Doubled."""
    return 2 * n + more

# not part of it


def calls(n):
    return imported(n)


async def waits(n):
    return plain(n)


class Base:
    def inherited(self):
        return "base"


class Thing(Base):
    def method(self, n):
        return n + 1

    @classmethod
    def made(cls, n):
        return cls, n

    @staticmethod
    def apart(n):
        return n - 1


class Part(Thing):
    pass
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "toyhooks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text(OTHER)
    (package / "module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "toyhooks"]:
        del sys.modules[name]


def sources(folder: Path) -> Sources:
    def read(path: str) -> str | None:
        return (folder / path).read_text() if (folder / path).is_file() else None

    return Sources(read)


def hooked(folder: Path, *rows: tuple[str, HookKind, Callable[..., Any]]) -> ModuleType:
    """The module with hooks on it, whose hashes come from its file."""
    all_hooks = [Hook(f"toyhooks.module:{name}", kind, ours) for name, kind, ours in rows]
    files = sources(folder)
    sha256 = {one.target: digest(str(files.source(one.target))) for one in all_hooks}
    module = importlib.import_module("toyhooks.module")
    put_around(module, all_hooks, sha256)
    return module


def test_before_may_change_what_a_function_is_called_with(folder: Path) -> None:
    module = hooked(folder, ("plain", HookKind.BEFORE, lambda n, **named: ((n + 1,), named)))
    assert module.plain(3, more=10) == 18
    assert module.plain.__name__ == "plain" and module.plain.__doc__ == "Doubled."


def test_after_may_change_the_result(folder: Path) -> None:
    module = hooked(folder, ("plain", HookKind.AFTER, lambda result, n: -result if n else None))
    assert (module.plain(3), module.plain(0)) == (-6, 0)
    assert is_in_place("toyhooks.module:plain") and not is_in_place("toyhooks.module:calls")


def test_around_decides_whether_the_function_runs(folder: Path) -> None:
    module = hooked(
        folder, ("plain", HookKind.AROUND, lambda plain, n: plain(n) if n else "nothing")
    )
    assert (module.plain(3), module.plain(0)) == (6, "nothing")


def test_around_what_is_awaited(folder: Path) -> None:
    async def ours(waits: Callable[[int], Any], n: int) -> int:
        return -(await waits(n))

    module = hooked(folder, ("waits", HookKind.AROUND, ours))
    assert asyncio.run(module.waits(2)) == -4


def test_a_class_is_replaced_by_one_of_its_kind(folder: Path) -> None:
    def ours(thing: type) -> type:
        return type("Ours", (thing,), {"method": lambda self, n: super(type(self), self).method(n)})

    module = hooked(folder, ("Thing", HookKind.REPLACE, ours))
    assert module.Thing.__name__ == "Ours" and module.Thing().method(1) == 2


def test_members_of_a_class_keep_their_kind(folder: Path) -> None:
    def more(result: Any, *_: Any) -> Any:
        return (result, "more")

    rows = [(f"Thing.{name}", HookKind.AFTER, more) for name in ("method", "made", "apart")]
    module = hooked(folder, *rows)
    assert module.Part().method(1) == (2, "more")
    assert module.Part.made(1) == ((module.Part, 1), "more")
    assert module.Part.apart(1) == (0, "more")


def test_the_last_of_several_is_the_outermost(folder: Path) -> None:
    rows = [("plain", HookKind.AFTER, lambda result, n, k=k: f"{result}{k}") for k in "ab"]
    assert hooked(folder, *rows).plain(1) == "2ab"


def test_an_imported_name_is_changed_in_one_module_only(folder: Path) -> None:
    module = hooked(folder, ("imported", HookKind.AROUND, lambda imported, n: -imported(n)))
    assert module.calls(1) == -101
    assert importlib.import_module("toyhooks.other").imported(1) == 101


def test_a_target_that_is_not_there_is_named(folder: Path) -> None:
    module = importlib.import_module("toyhooks.module")
    for name in ("gone", "Gone.method", "Thing.gone", "Thing.inherited"):
        target = f"toyhooks.module:{name}"
        here = [Hook(target, HookKind.AFTER, print)]
        with pytest.raises(
            HookError, match=rf"{target}, needed for the cache, .*not in .*=={VERSION}"
        ):
            put_around(module, here, {target: "0"})


def test_another_source_than_the_released_one_is_refused_before_anything_is_changed(
    folder: Path,
) -> None:
    module = importlib.import_module("toyhooks.module")
    both = [Hook(f"toyhooks.module:{name}", HookKind.AFTER, print) for name in ("calls", "plain")]
    sha256 = {one.target: digest(str(sources(folder).source(one.target))) for one in both}
    sha256[both[1].target] = digest("another")
    with pytest.raises(HookError, match=rf"toyhooks\.module:plain of .*sglang=={VERSION}"):
        put_around(module, both, sha256)
    assert not is_in_place(both[0].target) and not hasattr(module.calls, "__wrapped__")


def test_a_hook_without_a_hash_is_refused(folder: Path) -> None:
    module = importlib.import_module("toyhooks.module")
    with pytest.raises(HookError, match="has no hash"):
        put_around(module, [Hook("toyhooks.module:plain", HookKind.AFTER, print)], {})


def test_it_happens_when_the_module_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "toyhooks.module:plain"
    table = {"toyhooks.module": (Hook(target, HookKind.AFTER, lambda result, n: -result),)}
    monkeypatch.setattr(install, "by_module", lambda: table)
    monkeypatch.setattr(install, "load_hashes", lambda: {target: digest("another")})
    install.on_import(())
    with pytest.raises(HookError, match=target):
        importlib.import_module("toyhooks.module")
    assert "toyhooks.module" not in sys.modules


def test_what_is_left_out_is_not_put_around(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("plain", Need.SPEEDS), ("calls", Need.CACHE)]
    table = [
        Hook(f"toyhooks.module:{name}", HookKind.AFTER, lambda result, n: -result, need)
        for name, need in rows
    ]
    known = {one.target: digest(str(sources(folder).source(one.target))) for one in table}
    monkeypatch.setattr(install, "by_module", lambda: {"toyhooks.module": tuple(table)})
    monkeypatch.setattr(install, "load_hashes", lambda: known)
    install.on_import({Need.SPEEDS})
    module = importlib.import_module("toyhooks.module")
    assert (module.plain(1), module.calls(1)) == (2, -101)


def test_only_a_file_that_differs_is_parsed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, file = "toyhooks.module:plain", folder / "toyhooks" / "module.py"
    known = {target: digest(str(sources(folder).source(target)))}
    known["toyhooks/module.py"] = file_digest(SOURCE)
    parsed = []

    class Noted(Sources):
        def source(self, target: str) -> str | None:
            parsed.append(target)
            return super().source(target)

    monkeypatch.setattr(install, "HOOKS", (Hook(target, HookKind.AFTER, print, Need.SPEEDS),))
    monkeypatch.setattr(install, "load_hashes", lambda: known)
    monkeypatch.setattr(install, "Sources", Noted)
    assert not list(install.misfits(folder)) and parsed == []
    file.write_text("OTHER = 'another file with the same function'\n" + SOURCE)
    assert not list(install.misfits(folder)) and parsed == [target]
    for changed in (SOURCE.replace("2 * n", "3 * n"), "no Python", ""):
        file.write_text(changed)
        (misfit,) = install.misfits(folder)
        assert (misfit.need, misfit.piece) == (Need.SPEEDS, target)


def test_a_digest_is_of_the_syntax_tree() -> None:
    one = 'def f(a, *, b: int = 1):\n    """What."""\n    return f"{a}" + str(b)\n'
    same = (
        "  def f(\n      a, *, b: int = 1,  # both\n  ):\n"
        '    """What."""\n\n    # why\n    return (f"{a}"\n+ str(b))\n'
    )
    assert digest(one) == digest(same)
    assert digest(one) != digest(one.replace("= 1", "= 2"))
    assert digest(one) != digest("@cached\n" + one)


@pytest.mark.parametrize("name", ["plain", "waits", "calls", "Thing", "Thing.made", "imported"])
def test_a_file_and_a_process_say_the_same_source(folder: Path, name: str) -> None:
    module = importlib.import_module("toyhooks.module")
    target = f"toyhooks.module:{name}"
    found = hooks._function(hooks._find(module, target))
    text = sources(folder).source(target)
    assert text == loaded_source(found) and "not part of it" not in str(text)
    assert str(text).strip().splitlines()[-1].strip() == str(text).splitlines()[-1].strip()


def test_every_function_and_its_file_has_a_hash() -> None:
    functions = sorted({hook.target for hook in HOOKS})
    known = list(load_hashes())
    assert known[: len(functions)] == functions
    files = known[len(functions) :]
    modules = {target.partition(":")[0].replace(".", "/") for target in functions}
    assert files == sorted(files) and {path.removesuffix(".py") for path in files} >= modules


def test_the_page_has_every_hook() -> None:
    page = (Path(__file__).parents[2] / "patches" / "README.md").read_text()
    of_table = {(hook.ours.__module__.rpartition(".")[2], hook.ours.__name__) for hook in HOOKS}
    missing = {
        f"{module}.{name}"
        for module, name in of_table
        if f"`{module}.{name}`" not in page and f"`{name}`" not in page
    }
    assert missing == set()
