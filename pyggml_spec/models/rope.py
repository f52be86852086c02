"""Rotary position embeddings (RoPE) and their context scaling."""

from dataclasses import dataclass

import numpy as np

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile

KINDS = ("none", "linear", "yarn")


@dataclass(frozen=True)
class RopeOptions:
    """Overrides of a model file's RoPE parameters; None keeps the file's value. Names and meanings are llama.cpp's.

    Attributes:
        scaling: "none", "linear" or "yarn".
        freq_scale: factor of positions: 0.25 for four times the context.
        freq_base: base of the frequencies.
        orig_ctx: yarn: training context in tokens.
        ext_factor: yarn: 1 extrapolates fully, 0 interpolates only.
        attn_factor: factor of rotated rows if ``ext_factor`` is 0; otherwise llama.cpp computes its own.
        beta_slow, beta_fast: yarn: rotations between which frequencies blend from interpolated to extrapolated.

    Raises:
        ModelError: a value out of range.
    """

    scaling: str | None = None
    freq_scale: float | None = None
    freq_base: float | None = None
    orig_ctx: int | None = None
    ext_factor: float | None = None
    attn_factor: float | None = None
    beta_slow: float | None = None
    beta_fast: float | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None and self.scaling not in KINDS:
            raise ModelError(f"the rope scaling {self.scaling!r} is none of {', '.join(KINDS)}")
        for name, value in vars(self).items():
            if name != "scaling" and value is not None and not 0 <= value < 1 << 31:
                raise ModelError(f"the rope option `{name}` is {value:g}; it has to be 0 or more, and below {1 << 31}")


@dataclass(frozen=True)
class Rope:
    """RoPE on ``n_rot`` values per head, frequency ``base``, positions scaled by ``scale``.

    ``neox`` pairs (i, i + n_rot / 2), otherwise (2 i, 2 i + 1). ``yarn``: (extrapolation, magnitude, beta_fast, beta_slow), for a training context of
    ``n_ctx_orig``. ``sections``: pairs of each axis of a picture, in turns if ``interleaved``.
    """

    n_rot: int
    base: float
    scale: float = 1.0
    neox: bool = True
    yarn: tuple[float, float, float, float] = (0.0, 1.0, 32.0, 1.0)
    n_ctx_orig: int = 0
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    @staticmethod
    def magnitude(scale: float, multiplier: float) -> np.float32:
        """Cancels ggml's yarn magnitude and reapplies it in single precision, over that of ``multiplier`` unless 0, as llama.cpp does."""
        one, tenth = np.float32(1), np.float32(0.1)
        factor = one / np.float32(scale)
        grown, other = (tenth * np.float32(m) * np.log(factor) + one if factor > 1 else one for m in (1, multiplier))
        return grown / other * (one / (one + tenth * np.log(factor)))

    def __str__(self) -> str:
        how = f"stretched {1 / self.scale:.4g} times" if self.scale != 1 else "as they are"
        yarn = f" with yarn ({self.yarn[0]:.4g}) from {self.n_ctx_orig} tokens" if self.yarn[0] else ""
        return f"{how}{yarn} (frequency base {self.base:.6g}, factor {self.yarn[1]:.4g})"

    def __call__(self, g: Graph, x: Tensor, positions: Tensor, factors: Tensor | None = None) -> Tensor:
        axes = positions.ne[0] // x.ne[2]
        if axes > 1 and self.sections:
            return g.rope_by_axis(
                x, positions, self.n_rot, self.sections, self.interleaved, self.base, self.scale, factors, self.n_ctx_orig, self.yarn
            )
        if axes > 1:  # the first axis is time
            positions = g.slice(positions, 0, 0, x.ne[2])
        return g.rope(x, positions, self.n_rot, self.neox, self.base, self.scale, factors, self.n_ctx_orig, self.yarn)


def ignored_yarn(file: GGUFFile, arch: str, used: Rope | None) -> list[str]:
    """Sentences about yarn keys of the file that llama.cpp ignores, and so this engine: it uses 1 + 0.1 ln(factor), times `attn_factor`."""
    if file.get(f"{arch}.rope.scaling.type", str, "none") != "yarn":
        return []
    stretch = 1 + 0.1 * np.log(max(1.0, file.get(f"{arch}.rope.scaling.factor", float, 1.0)))
    applied = {
        "yarn_attn_factor": stretch * file.get(f"{arch}.rope.scaling.attn_factor", float, 1.0),
        "yarn_beta_fast": used.yarn[2] if used else 32.0,
        "yarn_beta_slow": used.yarn[3] if used else 1.0,
    }
    overrides = {name: file.get(f"{arch}.rope.scaling.{name}", float, value) for name, value in applied.items()}
    return [
        f"{file.path.name} says {arch}.rope.scaling.{name} {overrides[name]:.4g}, which llama.cpp does not read for {arch}: {value:.4g} is used, as there"
        for name, value in applied.items()
        if abs(overrides[name] - value) > 1e-3 * value
    ]
