"""Rotary position embeddings (RoPE) and their context scaling."""

from dataclasses import dataclass

import numpy as np

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .keys import positive

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
    ``n_ctx_orig``.
    """

    n_rot: int
    base: float
    scale: float = 1.0
    neox: bool = True
    yarn: tuple[float, float, float, float] = (0.0, 1.0, 32.0, 1.0)
    n_ctx_orig: int = 0

    @classmethod
    def from_gguf(
        cls,
        file: GGUFFile,
        arch: str,
        head_size: int,
        neox: bool = True,
        yarn: bool = False,
        overridable: bool = True,
        own_yarn: bool = False,
    ) -> "Rope":
        """Reads `rope.dimension_count`, `rope.freq_base` and `rope.scaling.*`; ``yarn``: whether yarn is supported; ``overridable`` False: RoPE options
        are refused, because llama.cpp scales sliding layers differently; ``own_yarn``: `yarn_beta_*` and `yarn_log_multiplier` are read.

        Raises:
            ModelError: another scaling type.
        """
        kinds = KINDS if yarn else KINDS[:2]
        if file.rope is not None and not overridable:
            raise ModelError(
                f"{arch} models take no rope options: they have sliding layers, which would keep other positions; leave them out"
            )
        overrides = file.rope or RopeOptions()
        # a factor without a type is linear scaling, as in llama.cpp
        kind = overrides.scaling or file.get(f"{arch}.rope.scaling.type", str, "linear")
        kind = "linear" if kind == "longrope" else kind  # which divides frequencies by tables of the file, and is no other scaling
        factor = file.get(f"{arch}.rope.scaling.factor", float, file.get(f"{arch}.rope.scale_linear", float, 0.0))
        if kind not in kinds or (not yarn and overrides.ext_factor):
            raise ModelError(f"{file.path} uses rope scaling of the type {kind!r}; {arch} files with {', '.join(kinds)} are supported")
        if factor < 0:
            raise ModelError(f"{file.path}: rope.scaling.factor is {factor}, but it cannot be negative")
        n_rot, base = cls._rotated(file, arch, head_size)
        base = overrides.freq_base or base
        scale = overrides.freq_scale or (float(np.float32(1) / np.float32(factor)) if factor > 0 else 1.0)
        scale = scale if kind != "none" else 1.0
        magnitude = file.get(f"{arch}.rope.scaling.attn_factor", float, 1.0)
        betas = cls._beta(file, arch, overrides, "beta_fast", 32.0, own_yarn), cls._beta(file, arch, overrides, "beta_slow", 1.0, own_yarn)
        multiplier = file.get(f"{arch}.rope.scaling.yarn_log_multiplier", float, 0.0) if own_yarn else 0.0
        extrapolation = (1.0 if kind == "yarn" else 0.0) if overrides.ext_factor is None else overrides.ext_factor
        if not extrapolation:
            magnitude *= 1.0 if overrides.attn_factor is None else overrides.attn_factor
            return cls(n_rot, base, scale, neox, (0.0, magnitude, *betas))
        if base <= 1 or not 0 < scale <= 1:
            raise ModelError(
                f"{file.path}: yarn scaling needs rope.freq_base {base} above 1 and rope.scaling.factor {1 / scale:g} of 1 or more"
            )
        trained = file.get(f"{arch}.context_length", int)
        n_ctx_orig = overrides.orig_ctx or positive(file, f"{arch}.rope.scaling.original_context_length", trained, (1 << 31) - 1)
        return cls(
            n_rot, base, scale, neox, (extrapolation, float(cls.magnitude(scale, multiplier) * np.float32(magnitude)), *betas), n_ctx_orig
        )

    @staticmethod
    def _beta(file: GGUFFile, arch: str, overrides: RopeOptions, name: str, default: float, own: bool) -> float:
        option: float | None = getattr(overrides, name)
        if option is not None:
            return option
        return file.get(f"{arch}.rope.scaling.yarn_{name}", float, default) if own else default

    @staticmethod
    def _rotated(file: GGUFFile, arch: str, head_size: int, suffix: str = "", default: tuple = (None, 10000.0)) -> tuple[int, float]:
        """Rotated values per head and frequency base; ``suffix`` selects a kind of layers, ``default`` applies without the keys."""
        n_rot = file.get(f"{arch}.rope.dimension_count{suffix}", int, default[0] or head_size)
        if not 0 < n_rot <= head_size or n_rot % 2:
            raise ModelError(f"{file.path}: rope.dimension_count{suffix} is {n_rot}, which does not fit heads of {head_size}")
        base = file.get(f"{arch}.rope.freq_base{suffix}", float, default[1])
        if base <= 0:
            raise ModelError(f"{file.path}: rope.freq_base{suffix} is {base}, but it has to be above 0")
        return n_rot, base

    @staticmethod
    def magnitude(scale: float, multiplier: float) -> np.float32:
        """Cancels ggml's yarn magnitude and reapplies it in single precision, over that of ``multiplier`` unless 0, as llama.cpp does."""
        one, tenth = np.float32(1), np.float32(0.1)
        factor = one / np.float32(scale)
        grown, other = (tenth * np.float32(m) * np.log(factor) + one if factor > 1 else one for m in (1, multiplier))
        return grown / other * (one / (one + tenth * np.log(factor)))

    def swa(self, file: GGUFFile, arch: str, head_size: int, base: float | None = None) -> "Rope":
        """RoPE of sliding layers: keys with `_swa`, no scaling; defaults are these values, or ``base``."""
        return Rope(*self._rotated(file, arch, head_size, "_swa", (self.n_rot, base or self.base)), neox=self.neox)

    def check_sections(self, file: GGUFFile, arch: str, interleaved: bool) -> None:
        """Multi-axis RoPE over text equals NEOX only if every pair belongs to one of the first three axes; the fourth has position 0 for text.

        Raises:
            ModelError: `rope.dimension_sections` leaves other pairs.
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

    def __str__(self) -> str:
        how = f"stretched {1 / self.scale:.4g} times" if self.scale != 1 else "as they are"
        yarn = f" with yarn ({self.yarn[0]:.4g}) from {self.n_ctx_orig} tokens" if self.yarn[0] else ""
        return f"{how}{yarn} (frequency base {self.base:.6g}, factor {self.yarn[1]:.4g})"

    def __call__(self, g: Graph, x: Tensor, positions: Tensor, factors: Tensor | None = None) -> Tensor:
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
