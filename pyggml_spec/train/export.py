"""A trained drafter as a GGUF, with a card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..api import Progress
from ..drafters.base import Drafter
from ..gguf_io import GGUFFile
from ..models.weights import INDEX
from ..tools.checkpoint import Layout, Source
from ..tools.convert import write_layout

SUMMARY = "general.description"


class _Trained:
    """Tensors as a source of ``write_layout``."""

    def __init__(self, path: Path, values: Mapping[str, Tensor]) -> None:
        self.path, self._values = path, values

    def rows(self, name: str, first: int, count: int) -> np.ndarray:
        value = self._values[name].detach()
        value = value[None] if value.dim() == 1 else value.flatten(0, -2)
        return np.ascontiguousarray(value[first : first + count].float().cpu().numpy())


def export(
    out: Path, drafter: Drafter, values: Mapping[str, Tensor], target: GGUFFile, kind: str, summary: str, *, replace: bool,
    progress: Progress = lambda what, done, total: None,
) -> list[str]:  # fmt: skip
    """Writes ``out``: metadata of the drafter's file, its trained tensors ``values``, and others of its file as they are. Returns notes.

    Raises:
        ConvertError: ``out`` exists, or cannot be written.
    """
    file, arch = drafter.file, drafter.arch
    metadata = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items() if not key.startswith("general.")}
    metadata = {key: value for key, value in metadata.items() if not hasattr(value, "__len__") or len(value)}
    metadata |= {key: value for key, value in target.metadata.items() if key == "general.license"} | {SUMMARY: summary}
    metadata.pop("tokenizer.chat_template", None)
    trained = {spec.name: spec for spec in drafter.specs() if spec.use != INDEX}
    tensors = {name: Source(name, tuple(spec.shape[::-1])) for name, spec in trained.items()}
    at_hand = {spec.source or spec.name for spec in trained.values()}
    copied: dict[str, Any] = {name: (file, info) for name, info in file.tensors.items() if name not in at_hand and info.offset}
    notes: list[str] = []
    layout = Layout(arch, metadata, tensors, {}, notes, copied)
    source = _Trained(out, values)
    write_layout(
        layout,
        dict.fromkeys(tensors, source),
        out,
        kind,
        name=f"drafter for {target.path.stem}",
        notes=notes,
        replace=replace,
        progress=progress,
    )
    return notes
