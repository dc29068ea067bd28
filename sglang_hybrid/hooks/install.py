"""Hooks take hold when their modules are imported."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from types import ModuleType

import wrapt

from sglang_hybrid.hooks.hook import Hook, check, put_around
from sglang_hybrid.hooks.sources import Sources, digest, load_hashes
from sglang_hybrid.hooks.table import HOOKS


@cache
def by_module() -> dict[str, tuple[Hook, ...]]:
    """All hooks by the module that their targets are in."""
    modules: defaultdict[str, list[Hook]] = defaultdict(list)
    for hook in HOOKS:
        modules[hook.module].append(hook)
    return {name: tuple(hooks) for name, hooks in modules.items()}


def on_import() -> None:
    """From now on, hooks are put around the functions of a module when it is imported, which raises
    `HookError` if they cannot be.
    """
    sha256 = load_hashes()
    for name, hooks in by_module().items():

        def take(module: ModuleType, hooks: tuple[Hook, ...] = hooks) -> None:
            put_around(module, hooks, sha256)

        wrapt.register_post_import_hook(take, name)


def verify(root: Path) -> None:
    """Check all targets in files without importing them; raises `HookError`.

    root: the folder that has `sglang/`. The functions are looked for only where a whole file is not
    the released one: to parse all takes a second.
    """

    def read(path: str) -> str | None:
        file = root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    sources, sha256 = Sources(read), load_hashes()
    files = {path: known for path, known in sha256.items() if path.endswith(".py")}
    if all(digest(read(path) or "") == known for path, known in files.items()):
        return
    for target in dict.fromkeys(hook.target for hook in HOOKS):
        check(target, sources.source(target), sha256)
