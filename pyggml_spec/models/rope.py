"""Rotary embeddings: which values of a head are rotated, how they are paired, and how positions are stretched."""

from dataclasses import dataclass

import numpy as np

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .hparams import positive


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: ``n_rot`` rotated values per head, frequency ``base``, positions scaled by ``scale``.

    ``neox`` pairs (i, i + n_rot / 2), otherwise (2 i, 2 i + 1). ``yarn`` is (extrapolation, magnitude, beta_fast, beta_slow) for a model
    trained on ``n_ctx_orig`` positions.
    """

    n_rot: int
    base: float
    scale: float = 1.0
    neox: bool = True
    yarn: tuple[float, float, float, float] = (0.0, 1.0, 32.0, 1.0)
    n_ctx_orig: int = 0

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str, head_size: int, neox: bool = True, yarn: bool = False) -> "Rope":
        """Reads `rope.dimension_count`, `rope.freq_base` and `rope.scaling.*`; ``yarn`` says whether that scaling is supported too.

        Raises:
            ModelError: another scaling type, which would give wrong positions silently.
        """
        kinds = ("none", "linear", "yarn") if yarn else ("none", "linear")
        # a factor without a type is linear scaling, as in llama.cpp
        kind = file.get(f"{arch}.rope.scaling.type", str, "linear")
        factor = file.get(f"{arch}.rope.scaling.factor", float, file.get(f"{arch}.rope.scale_linear", float, 0.0))
        if kind not in kinds:
            raise ModelError(f"{file.path} uses rope scaling of the type {kind!r}; {arch} files with {', '.join(kinds)} are supported")
        if factor < 0:
            raise ModelError(f"{file.path}: rope.scaling.factor is {factor}, but it cannot be negative")
        n_rot, base = cls._rotated(file, arch, head_size)
        scale = float(np.float32(1) / np.float32(factor)) if kind != "none" and factor > 0 else 1.0
        magnitude = file.get(f"{arch}.rope.scaling.attn_factor", float, 1.0)
        if kind != "yarn":
            return cls(n_rot, base, scale, neox, (0.0, magnitude, 32.0, 1.0))
        if base <= 1 or not 0 < scale <= 1:
            raise ModelError(f"{file.path}: yarn scaling needs rope.freq_base {base} above 1 and rope.scaling.factor {factor} of 1 or more")
        n_ctx_orig = positive(file, f"{arch}.rope.scaling.original_context_length", file.get(f"{arch}.context_length", int), (1 << 31) - 1)
        return cls(n_rot, base, scale, neox, (1.0, float(cls._magnitude(scale) * np.float32(magnitude)), 32.0, 1.0), n_ctx_orig)

    @staticmethod
    def _rotated(file: GGUFFile, arch: str, head_size: int, suffix: str = "", default: tuple = (None, 10000.0)) -> tuple[int, float]:
        """Rotated values per head and frequency base; ``suffix`` names a kind of layers, ``default`` what holds without the keys."""
        n_rot = file.get(f"{arch}.rope.dimension_count{suffix}", int, default[0] or head_size)
        if not 0 < n_rot <= head_size or n_rot % 2:
            raise ModelError(f"{file.path}: rope.dimension_count{suffix} is {n_rot}, which does not fit heads of {head_size}")
        base = file.get(f"{arch}.rope.freq_base{suffix}", float, default[1])
        if base <= 0:
            raise ModelError(f"{file.path}: rope.freq_base{suffix} is {base}, but it has to be above 0")
        return n_rot, base

    @staticmethod
    def _magnitude(scale: float) -> np.float32:
        """What ggml multiplies yarn rows with is cancelled and put back in single precision, as llama.cpp does it."""
        one, tenth = np.float32(1), np.float32(0.1)
        factor = one / np.float32(scale)
        grown = tenth * one * np.log(factor) + one if factor > 1 else one
        return grown * (one / (one + tenth * np.log(factor)))

    def swa(self, file: GGUFFile, arch: str, head_size: int, base: float | None = None) -> "Rope":
        """The rope of the sliding-window layers: keys with `_swa`, no scaling; these values, or ``base``, where the keys are absent."""
        return Rope(*self._rotated(file, arch, head_size, "_swa", (self.n_rot, base or self.base)), neox=self.neox)

    def check_sections(self, file: GGUFFile, arch: str, interleaved: bool) -> None:
        """Multi-axis rope over text is plain NEOX only if every pair belongs to one of the axes that carry the text position.

        Pairs outside the sections of the first three axes would be rotated by the fourth one, whose position is 0 for text.

        Raises:
            ModelError: `rope.dimension_sections` leaves such pairs.
        """
        sections = file.array(f"{arch}.rope.dimension_sections")
        if sections is None:
            return
        pairs = range(self.n_rot // 2)
        counts = [int(n) for n in sections][:3]
        if len(counts) < 3 or not (all(i < 3 * counts[i % 3] for i in pairs) if interleaved else sum(counts) >= len(pairs)):
            raise ModelError(
                f"{file.path}: rope.dimension_sections {[int(n) for n in sections]} do not cover the {self.n_rot // 2} rotated pairs of {arch}; "
                "the file was converted with other hyper-parameters"
            )

    def __call__(self, g: Graph, x: Tensor, positions: Tensor, factors: Tensor | None = None) -> Tensor:
        return g.rope(x, positions, self.n_rot, self.neox, self.base, self.scale, factors, self.n_ctx_orig, self.yarn)


def ignored_yarn(file: GGUFFile, arch: str) -> list[str]:
    """Sentences about yarn keys of the file that are not followed because llama.cpp, whose logits these are to equal, does not read them.

    Its converter writes `attention_factor` of a checkpoint as `yarn_attn_factor`: what rotated rows are multiplied with. The engine takes
    1 + 0.1 ln(factor) instead, times `attn_factor`. (Laguna XS.2: 1 in the checkpoint, 1.416 here and in llama.cpp.)
    """
    if file.get(f"{arch}.rope.scaling.type", str, "none") != "yarn":
        return []
    stretch = 1 + 0.1 * np.log(max(1.0, file.get(f"{arch}.rope.scaling.factor", float, 1.0)))
    used = {
        "yarn_attn_factor": stretch * file.get(f"{arch}.rope.scaling.attn_factor", float, 1.0),
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
    }
    asked = {name: file.get(f"{arch}.rope.scaling.{name}", float, value) for name, value in used.items()}
    return [
        f"{file.path.name} says {arch}.rope.scaling.{name} {asked[name]:.4g}, which llama.cpp does not read for {arch}: {value:.4g} is used, as there"
        for name, value in used.items()
        if abs(asked[name] - value) > 1e-3 * value
    ]
