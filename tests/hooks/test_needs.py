"""A start beside an SGLang that lacks a piece: by what the piece is needed for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.extensions import GUARD, OFF
from sglang_hybrid.extensions.cpu.models.tiny import build_tiny_model
from sglang_hybrid.hooks import needs, patching
from sglang_hybrid.hooks.hook import Hook, HookError, check
from sglang_hybrid.hooks.needs import Misfit, Need
from sglang_hybrid.hooks.patching import load_patches
from sglang_hybrid.hooks.sources import Sources, load_hashes, paths_of
from sglang_hybrid.hooks.table import HOOKS
from sglang_hybrid.serving.config import HybridConfig
from sglang_hybrid.serving.flag_values import CodecChoice, FullHit, Ui
from tests.hooks.changed import (
    commented,
    copy_changed,
    everything_changed,
    installed,
    read,
    with_another_body,
    with_another_hunk,
)

HASHES = load_hashes()
PATCHES = load_patches()
FILES = {path for path in HASHES if path.endswith(".py")} | PATCHES.keys()
CHANGES = sorted(
    {(patch.path, one.needed_for) for patch in PATCHES.values() for one in patch.diffs},
    key=lambda change: (change[0], change[1].name),
)


def test_every_need_is_that_of_a_piece() -> None:
    named = {hook.needed_for for hook in HOOKS} | {need for _, need in CHANGES}
    assert named == set(Need)


@pytest.mark.parametrize("path", sorted(FILES))
def test_with_any_comment_changed_nothing_is_lacking(path: str) -> None:
    text = commented(str(read(path)))
    if path in PATCHES:
        assert not list(PATCHES[path].misfits(text.encode(), ()))
    sources = Sources(lambda asked: text if asked == path else read(asked))
    for hook in HOOKS:
        if path in paths_of(hook.module):
            check(hook.target, sources.source(hook.target), HASHES, hook.needed_for)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.name}-{hook.ours.__name__}")
def test_another_body_is_lacking_by_the_row(hook: Hook) -> None:
    path, text = with_another_body(hook, {})
    sources = Sources(lambda asked: text if asked == path else read(asked))
    said = f"{hook.target} of the installed .*, needed for {hook.needed_for.what}, is not the one"
    with pytest.raises(HookError, match=said.replace("(", ".").replace(")", ".")):
        check(hook.target, sources.source(hook.target), HASHES, hook.needed_for)
    others = {other for other in HOOKS if path in paths_of(other.module)}
    for other in others:
        if other.target != hook.target:
            check(other.target, sources.source(other.target), HASHES, other.needed_for)


@pytest.mark.parametrize(("path", "need"), CHANGES)
def test_another_hunk_is_lacking_by_its_patch(path: str, need: Need) -> None:
    patch = PATCHES[path]
    released = str(read(patch.path))
    text = with_another_hunk(patch, need, released, runs=False)
    if text == released:
        pytest.skip("every line of it is expected by others, too")
    first = next(patch.misfits(text.encode(), ()))
    assert (first.need, first.piece) == (need, patch.path)
    assert first.why.startswith(f"{path} of the installed sglang ")
    assert f", needed for {need.what}, is not the file" in first.why


OF_GUARD = {need for need in Need if need.value.of_guard}


def test_without_the_guard_all_but_its_own_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GUARD, OFF)
    assert patching.unwanted() == OF_GUARD
    assert patching.lacking_in(installed()) == {}
    monkeypatch.delenv(GUARD)
    assert patching.unwanted() == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "needs",
    [*({need} for need in Need if need is not Need.CACHE), OF_GUARD],
    ids=lambda needs: "+".join(sorted(need.name for need in needs)),
)
def test_the_rest_goes_without_any_need(needs: set[Need], tmp_path: Path) -> None:
    """The other patches apply, and no name in what they make is defined by one that is left out."""
    left_out = set(needs)
    for patch in [*PATCHES.values()] * 2:
        text = (installed() / patch.path).read_bytes()
        left_out |= {misfit.need for misfit in patch.misfits(text, left_out)}
    assert Need.CACHE not in left_out
    for patch in PATCHES.values():
        if any(one.needed_for in left_out for one in patch.diffs):
            made = patch.apply((installed() / patch.path).read_bytes(), left_out)
            (tmp_path / patch.path.replace("/", ".")).write_text(made)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-q", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_all_may_be_lacking_but_the_cache(tmp_path: Path) -> None:
    texts = everything_changed({Need.CACHE})
    lacking = patching.lacking_in(copy_changed(tmp_path, texts, only=FILES))
    assert lacking.keys() == set(Need) - {Need.CACHE}
    pieces = FILES | {hook.target for hook in HOOKS}
    assert all(misfit.piece in pieces for misfit in lacking.values())


def test_a_file_that_is_gone_is_lacking_by_all_that_is_in_it(tmp_path: Path) -> None:
    gone = "sglang/srt/models/zaya.py"
    lacking = patching.lacking_in(copy_changed(tmp_path, {}, only=FILES - {gone}))
    assert {need: misfit.piece for need, misfit in lacking.items()} == {Need.ZAYA: gone}


MODELS = {
    "nemotron-h": {Need.MAMBA2},
    "granite-hybrid": {Need.MAMBA2},
    "mamba2": {Need.MAMBA2, Need.NO_ATTENTION},
    "falcon-mamba": {Need.MAMBA1, Need.NO_ATTENTION},
    "qwen3.5-vl": {Need.DELTA_RULE},
    "qwen4-exp": {Need.DELTA_RULE, Need.QWEN4_EXP},
    "kimi-linear": {Need.DELTA_RULE, Need.KDA_GATES},
    "glm-5-next": {Need.DELTA_RULE, Need.KDA_GATES},
    "gigachat-3.5": {Need.DELTA_RULE},
    "jet-nemotron": {Need.DELTA_RULE, Need.JET_NEMOTRON},
    "ling-2.5": {Need.LIGHTNING},
    "ling-3": {Need.DELTA_RULE, Need.KDA_GATES},
    "minicpm-sala": {Need.LIGHTNING},
    "lfm2": {Need.SHORT_CONVOLUTIONS, Need.LFM2},
    "zaya": {Need.SHORT_CONVOLUTIONS, Need.ZAYA},
    "transformer": set(),
}
NO_FLAGS = SimpleNamespace(
    radix_cache_backend="hybrid",
    disable_radix_cache=False,
    enable_unified_memory=False,
    enable_hierarchical_cache=False,
    enable_return_hidden_states=False,
    enable_lora=False,
    device="cpu",
    pp_size=1,
    api_key=None,
    admin_api_key=None,
)
"""Resolved arguments of SGLang."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
def test_a_model_needs_the_pieces_of_its_layers(architecture: str, tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    model = ModelConfig(str(build_tiny_model(architecture, tmp_path / "model")))
    needed = {need for need in Need if need.why_refused(NO_FLAGS, HybridConfig(), model)}
    assert needed == MODELS[architecture]


FLAGS: list[tuple[Need, dict[str, Any], dict[str, Any]]] = [
    (Need.UNIFIED_MEMORY, {"enable_unified_memory": True}, {}),
    (Need.HOST_COPIES, {"enable_hierarchical_cache": True}, {}),
    (Need.HIDDEN_STATES, {"enable_return_hidden_states": True}, {}),
    (Need.ADAPTERS, {"enable_lora": True}, {}),
    (Need.STAGES, {"pp_size": 2}, {}),
    (Need.KEYS, {"api_key": "sk"}, {}),
    (Need.KEYS, {"admin_api_key": "adm"}, {}),
    (Need.FULL_HITS, {}, {"hybrid_full_hit": FullHit.ON}),
    (Need.SMALLER_COPIES, {}, {"hybrid_tier_codec": CodecChoice("int8")}),
    (Need.PROMPTS, {}, {"hybrid_prewarm": "file"}),
    (Need.PROMPTS, {}, {"hybrid_ui": Ui.LENGTHS}),
]


def started(
    monkeypatch: pytest.MonkeyPatch,
    lacking: set[Need],
    *,
    sglangs: Mapping[str, Any] = MappingProxyType({}),
    ours: Mapping[str, Any] = MappingProxyType({}),
    family: str = "zaya",
) -> str:
    """Why a start with these arguments is refused where pieces of `lacking` do not fit; "" if it is
    not.
    """
    from sglang.srt.arg_groups import model_override_base, overrides

    config = SimpleNamespace(model_type=family)
    model = SimpleNamespace(hf_config=config, hf_text_config=config)
    monkeypatch.setattr(model_override_base, "model_config_of", lambda _: model)
    monkeypatch.setattr(overrides, "resolving_view", lambda given: given)
    monkeypatch.setattr(HybridConfig, "from_environment", lambda: HybridConfig(**ours))
    misfits = {need: Misfit(need, "piece", f"the piece of {need.name}.") for need in lacking}
    view: Any = SimpleNamespace(**{**vars(NO_FLAGS), **sglangs})
    try:
        needs.refuse(misfits, view)
    except ValueError as error:
        return str(error)
    return ""


WITHOUT_A_MODEL = {need for need in Need if need.value.has is None}


@pytest.mark.parametrize(("need", "sglangs", "ours"), FLAGS)
def test_a_flag_is_refused_without_its_pieces(
    need: Need, sglangs: dict[str, Any], ours: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = started(monkeypatch, WITHOUT_A_MODEL, sglangs=sglangs, ours=ours)
    assert said == f"{need.value.flag} cannot be served here: the piece of {need.name}."
    assert started(monkeypatch, WITHOUT_A_MODEL) == ""
    assert started(monkeypatch, WITHOUT_A_MODEL - {need}, sglangs=sglangs, ours=ours) == ""


def test_a_model_is_refused_without_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the model of type 'zaya' cannot be served here: the piece of ZAYA."
    assert started(monkeypatch, {Need.ZAYA}) == said
    assert started(monkeypatch, {Need.ZAYA}, family="lfm2") == ""
    elsewhere = {"radix_cache_backend": "python"}
    assert started(monkeypatch, {Need.ZAYA}, sglangs=elsewhere) == ""
    assert started(monkeypatch, {Need.ZAYA}, sglangs={"disable_radix_cache": True}) == ""
