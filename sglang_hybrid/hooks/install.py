"""Installs hooks when their modules are imported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import wrapt

from sglang_hybrid.hooks.hook import Hook, HookError, check, put_around
from sglang_hybrid.hooks.needs import Misfit, Need
from sglang_hybrid.hooks.sources import Sources, file_digest, load_hashes, paths_of
from sglang_hybrid.hooks.table import HOOKS


@cache
def by_module() -> dict[str, tuple[Hook, ...]]:
    """All hooks by the module that their targets are in."""
    modules: defaultdict[str, list[Hook]] = defaultdict(list)
    for hook in HOOKS:
        modules[hook.module].append(hook)
    return {name: tuple(hooks) for name, hooks in modules.items()}


def on_import(lacking: Collection[Need]) -> None:
    """Have hooks put around the functions of a module when it is imported, which raises `HookError`
    if they cannot be. lacking: needs whose hooks are left out.
    """
    sha256 = load_hashes()
    for name, hooks in by_module().items():
        wanted = tuple(hook for hook in hooks if hook.needed_for not in lacking)

        def take(module: ModuleType, hooks: tuple[Hook, ...] = wanted) -> None:
            put_around(module, hooks, sha256)

        wrapt.register_post_import_hook(take, name)


def misfits(root: Path) -> Iterator[Misfit]:
    """Targets that are missing in files, or have another source, without importing them.

    root: the folder that has `sglang/`. Functions are looked for only where a file that was read
    for them is not the released one: to parse all takes seconds.
    """

    def read(path: str) -> str | None:
        file = root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    sources, sha256 = Sources(read), load_hashes()
    known = {path: sha for path, sha in sha256.items() if path.endswith(".py")}
    changed = {path for path, sha in known.items() if file_digest(read(path) or "") != sha}
    own = {hook: paths_of(hook.module) for hook in HOOKS}
    is_imported = not changed <= {path for paths in own.values() for path in paths}
    for hook, paths in own.items():
        if is_imported or not changed.isdisjoint(paths):
            try:
                check(hook.target, sources.source(hook.target), sha256, hook.needed_for)
            except HookError as error:
                yield Misfit(hook.needed_for, hook.target, str(error))
            except SyntaxError as error:
                why = f"{hook.target}, needed for {hook.needed_for.what}, cannot be read: {error}."
                yield Misfit(hook.needed_for, hook.target, why)
