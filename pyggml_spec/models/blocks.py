"""Blocks that several architectures share."""

from dataclasses import dataclass

from ..errors import ModelError
from ..gguf_io import GGUFFile
from ..ggml.graph import Graph
from .weights import Group


@dataclass(frozen=True)
class Rope:
    """Rotary embedding in NEOX pairing: ``n_rot`` rotated values per head, frequency ``base``, positions scaled by ``scale``."""

    n_rot: int
    base: float
    scale: float = 1.0

    @classmethod
    def from_gguf(cls, file: GGUFFile, arch: str, head_size: int) -> "Rope":
        """Reads `rope.dimension_count`, `rope.freq_base` and `rope.scaling.*`.

        Raises:
            ModelError: a scaling type other than none and linear, which would give wrong positions silently.
        """
        kind = file.get(f"{arch}.rope.scaling.type", str, "none")
        factor = file.get(f"{arch}.rope.scaling.factor", float, 1.0)
        if kind not in ("none", "linear"):
            raise ModelError(f"{file.path} uses rope scaling of the type {kind!r}; {arch} files with none or linear are supported")
        n_rot = file.get(f"{arch}.rope.dimension_count", int, head_size)
        if not 0 < n_rot <= head_size or n_rot % 2:
            raise ModelError(f"{file.path}: rope.dimension_count is {n_rot}, which does not fit heads of {head_size}")
        scale = 1.0 / factor if kind == "linear" and factor > 0 else 1.0
        base = file.get(f"{arch}.rope.freq_base", float, 10000.0)
        if base <= 0:
            raise ModelError(f"{file.path}: rope.freq_base is {base}, but it has to be above 0")
        return cls(n_rot, base, scale)

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
        covered = all(i < 3 * counts[i % 3] for i in pairs) if interleaved else sum(counts) >= len(pairs)
        if len(counts) < 3 or not covered:
            raise ModelError(
                f"{file.path}: rope.dimension_sections {[int(n) for n in sections]} do not cover the {self.n_rot // 2} rotated pairs of {arch}; "
                "the file was converted with other hyper-parameters"
            )

    def __call__(self, g: Graph, x, positions):
        return g.rope_neox(x, positions, self.n_rot, self.base, self.scale)


def positive(file: GGUFFile, key: str, default: int | None = None, limit: int = 1 << 24) -> int:
    """An integer hyper-parameter in [1, limit].

    Raises:
        ModelError: out of range (a damaged file would otherwise ask for absurd shapes).
    """
    value = file.get(key, int, default)
    if not 0 < value <= limit:
        raise ModelError(f"{file.path}: {key} is {value}, but it has to be between 1 and {limit}")
    return value


def epsilon(file: GGUFFile, arch: str) -> float:
    """What the RMS norms add to the mean square; ggml asserts that it is not negative."""
    eps = file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)
    if eps < 0:
        raise ModelError(f"{file.path}: attention.layer_norm_rms_epsilon is {eps}, but it cannot be negative")
    return eps


def kv_heads(file: GGUFFile, arch: str, n_head: int) -> int:
    """K/V heads, each of which serves the same number of query heads."""
    n = positive(file, f"{arch}.attention.head_count_kv", n_head)
    if n_head % n:
        raise ModelError(f"{file.path}: {n_head} query heads cannot share {n} K/V heads")
    return n


def project(g: Graph, group: Group, x) -> list:
    """x F32 [n_in, T] times each matrix of the group; F32 [rows_i, T], as views of one product where matrices are fused."""
    out, first = [], 0
    if group.fused is not None:
        joined = g.matmul(group.fused, x)
        for n in group.fused_rows:
            out.append(g.columns(joined, n, first))
            first += n
    return out + [g.matmul(weight, x) for weight in group.rest]


def swiglu_ffn(g: Graph, gate_up: Group, down, x):
    """W_down (silu(W_gate x) * W_up x). With one row, two matmuls and the gate are one kernel of ggml-cuda; from two rows on one matmul is."""
    apart = gate_up.rest if gate_up.fused is None else gate_up.parts if x.ne[1] == 1 else ()
    if apart:
        gate, up = (g.matmul(weight, x) for weight in apart)
        return g.matmul(down, g.swiglu(gate, up))
    return g.matmul(down, g.swiglu_halves(g.matmul(gate_up.fused, x)))


def attend(g: Graph, q, k, v, kv, kv_rows, mask, span: int, n_head_kv: int, scale: float):
    """Writes k, v F32 [D, H_kv, T] into the cache rows and attends with q F32 [D, H, T] over the span. Returns F32 [D * H, T].

    The order of the three expansions keeps rope, view and row write of K next to each other, which ggml-cuda fuses.
    """
    cache_k, cache_v = kv
    g.expand(q)
    g.expand(v)
    g.kv_write_rows(cache_k, k, kv_rows)
    g.kv_write_rows(cache_v, v, kv_rows)
    return g.fa_span(q, cache_k, cache_v, mask, n_head_kv, span, scale)
