"""Which components and which tree SGLang builds the cache from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_cache.components import ComponentType

from sglang_hybrid.cache.tree import tree_core  # noqa: F401, it registers BACKEND with SGLang
from sglang_hybrid.cache.tree.kv_components import CountedFull
from sglang_hybrid.cache.tree.shadowed_components import ShadowedFull, ShadowedMamba
from sglang_hybrid.cache.tree.state_components import RobustMamba
from sglang_hybrid.serving.config import BACKEND

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

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
    """`params` with SGLang's components replaced by ours; without a shadow tree it is SGLang's own
    Python tree.
    """
    registry: dict[ComponentType, Any] = dict(params.component_registry_override or {})
    kv: Any
    states: Any
    shadow_tree = parts.shadow_tree
    if shadow_tree is None:
        backend, kv, states = "python", CountedFull, RobustMamba
        more = {}
    else:
        backend, kv, states = BACKEND, ShadowedFull, ShadowedMamba
        more = {"shadow_tree": shadow_tree}
    if not params.disable:
        registry[ComponentType.FULL] = partial(kv, parts=parts, **more)
    if ComponentType.MAMBA in (params.tree_components or ()):
        registry[ComponentType.MAMBA] = partial(states, parts=parts, **more)
    return replace(params, tree_core_backend=backend, component_registry_override=registry)
