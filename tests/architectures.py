"""Architectures of the registry by what their layers keep, and which of them stand for the others in the fast tests."""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from gguf_io.build import SMALL
from random_gguf.archs import WRITERS as TARGETS

from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.registry import open_target

TINY = replace(SMALL, n_expert=4, n_used=2, n_ff_expert=32, n_ff_shared=32, target_window=8)
SHAPES = {
    "gemma4": replace(TINY, n_layer=4),
    "deepseek2": replace(TINY, n_expert=8, head_size=24, n_rot=8, n_latent=32, n_lora_q=16, head_size_v=16),
    "deepseek32": replace(TINY, head_size=24, n_rot=8, n_latent=32, n_lora_q=16, head_size_v=16, top_k=1),
    "mistral4": replace(TINY, n_expert=8, head_size=24, n_rot=8, n_latent=32, n_lora_q=16, head_size_v=16),
    "glm-dsa": replace(TINY, head_size=24, n_rot=8, n_latent=32, n_lora_q=16, head_size_v=16, top_k=1),
}
OPTIONS = {"qwen3": {"yarn": 4.0}, "gemma4": {"routed": True}, "deepseek2": {"groups": 4}, "glm-dsa": {"full": (True, True)}}
FAST = ("qwen3", "gemma4", "qwen35moe", "deepseek2")  # rows alone; rings; recurrent states and experts; one latent row


def write_tiny(arch: str, path: Path) -> Path:
    """A random target as small as the architecture allows, with routed experts where it can have some."""
    return TARGETS[arch](path, SHAPES.get(arch, TINY), **OPTIONS.get(arch, {}))


@cache
def _facts() -> dict[str, dict[str, Any]]:
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch in TARGETS:
            with GGUFFile(write_tiny(arch, Path(folder) / f"{arch}.gguf")) as file:
                target = open_target(file)
                out[arch] = {
                    "windowed": target.window > 0,
                    "recurrent": target.recurrent_shape() is not None,
                    "routed": any("_exps." in spec.name for spec in target.specs()),
                    "latent": any(shape.latent for shape in target.kv_shapes()),
                    "layers": (frozenset(type(part) for layer in target.layers for part in (layer.mixer, layer.ffn)), target.softcap > 0),
                }
    return out


def having(fact: str) -> list[str]:
    """The architectures that are "windowed", "recurrent", "routed" or "latent"."""
    return [arch for arch, facts in _facts().items() if facts[fact]]


def kinds() -> list[str]:
    """One architecture for each combination of facts and layers, one with a writer of its own where there is one."""
    found: dict[tuple, str] = {}
    for arch in sorted(TARGETS, key=lambda arch: isinstance(TARGETS[arch], partial)):
        found.setdefault(tuple(_facts()[arch].values()), arch)
    return list(found.values())


def thorough() -> list[str]:
    """``kinds``, and every architecture with a writer of its own: what takes long is tested with these."""
    return [arch for arch in TARGETS if arch in kinds() or not isinstance(TARGETS[arch], partial)]


def others(tested: Iterable[str]) -> list[str]:
    """``kinds`` with more than dense layers of plain rows that are not among ``tested``."""
    special = {arch for fact in ("windowed", "recurrent", "routed", "latent") for arch in having(fact)}
    return [arch for arch in kinds() if arch in special and arch not in tested]


def params(cases: Iterable[Any], fast: Callable[[Any], bool] | Iterable[Any] = FAST) -> list[Any]:
    """``cases`` for parametrize, all but the ``fast`` ones marked slow."""
    chosen = fast if callable(fast) else (lambda case, names=tuple(fast): case in names)
    return [
        case if chosen(case) else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases
    ]
