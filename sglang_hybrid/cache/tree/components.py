"""The components and the tree that SGLang builds the cache from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.tree import tree_core  # noqa: F401, it registers BACKEND with SGLang
from sglang_hybrid.cache.tree.kv_components import CountedFull
from sglang_hybrid.cache.tree.shadowed_components import ShadowedFull, ShadowedMamba
from sglang_hybrid.cache.tree.state_components import RobustMamba
from sglang_hybrid.serving.config import BACKEND

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components.base import TreeComponent

    from sglang_hybrid.cache.parts import Parts


def kept_components(
    params: CacheInitParams, *, states_arrive: bool
) -> tuple[ComponentType, ...] | None:
    """The components of a tree: SGLang's, but no states where each request brings its own."""
    kept: tuple[ComponentType, ...] | None = params.tree_components
    if kept is None or params.disable or not states_arrive:
        return kept
    return tuple(kind for kind in kept if kind is not ComponentType.MAMBA)


def with_our_components(params: CacheInitParams, parts: Parts) -> CacheInitParams:
    """`params` with SGLang's components replaced by ours, which find their parts at the cache;
    without a shadow tree it is SGLang's own Python tree.
    """
    registry: dict[ComponentType, type[TreeComponent]]
    registry = dict(params.component_registry_override or {})
    is_shadowed = parts.shadow_tree is not None
    if not params.disable:
        registry[ComponentType.FULL] = ShadowedFull if is_shadowed else CountedFull
    if ComponentType.MAMBA in (params.tree_components or ()):
        registry[ComponentType.MAMBA] = ShadowedMamba if is_shadowed else RobustMamba
    backend = BACKEND if is_shadowed else "python"
    return replace(params, tree_core_backend=backend, component_registry_override=registry)
