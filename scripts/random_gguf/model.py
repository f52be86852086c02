"""Random-weight GGUFs of any shape, for tests and for benchmarks of real shapes without a download.

Norms, gates, biases and decays are random too: constants would hide wrong formulas.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyggml_spec.ggml.library import ffi, lib, text
from pyggml_spec.tools import quants
from pyggml_spec.tools.quants import type_id


@dataclass(frozen=True)
class Shape:
    """Sizes of a random target and of the dflash drafter that fits it; each architecture takes the fields that it has."""

    n_layer: int = 4
    n_embd: int = 256
    n_ff: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_size: int = 64
    n_rot: int = 32
    delta_head: int = 32
    delta_k: int = 2
    delta_v: int = 4
    n_vocab: int = 320
    n_ctx: int = 4096
    every: int = 4
    draft_layers: int = 2
    draft_heads: int = 4
    draft_heads_kv: int = 2
    draft_head_size: int = 64
    draft_ff: int = 256
    target_layers: tuple[int, ...] = (1, 2, 3)
    window: int = 0
    rope_base: float = 1e6
    n_expert: int = 8
    n_used: int = 3
    n_ff_expert: int = 256
    n_ff_shared: int = 256
    target_window: int = 24
    embedding_scale: float = 0.0
    tied: bool = False  # the head is the embedding
    full_every: int = 2  # gemma4: one full layer in so many
    n_head_kv_full: int = 1  # gemma4: K/V heads of the full layers
    n_head_sliding: int = 0  # laguna: heads of the sliding layers, 0 for twice those of the full ones
    n_rot_full: int = 0  # laguna: rotated values of the full layers, 0 for all
    n_rot_sliding: int = 0  # laguna: rotated values of the sliding layers, 0 for half
    n_lora_q: int = 96  # deepseek2: what q is projected through, 0 for directly
    n_latent: int = 64  # deepseek2: values of a latent row without those that are rotated
    head_size_v: int = 96  # deepseek2: of a head of V
    n_dense: int = 1  # deepseek2: leading layers without experts
    index_heads: int = 3  # glm-dsa: heads of the indexer
    index_size: int = 64  # glm-dsa: values of each of them
    top_k: int = 32  # glm-dsa: positions that attention sees
    control: tuple[str, ...] = ()  # further control tokens, in place of filler tokens


@dataclass(frozen=True)
class Tiled:
    """``n_rows`` rows that repeat those of ``block``, which starts ``shift`` rows late."""

    block: np.ndarray
    n_rows: int
    shift: int

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.block.strides[0]

    def values(self) -> np.ndarray:
        copies = -(-self.n_rows // self.block.shape[0])
        return np.tile(np.roll(self.block, self.shift, 0), (copies, 1))[: self.n_rows]


@dataclass(frozen=True)
class Mix:
    """Types of a mixed file: most matrices, head, attn_qkv, and attn_v and ffn_down of layers with more bits."""

    most: str
    head: str
    qkv: str
    more: str

    def of(self, name: str, n_layer: int) -> str:
        """The type of a matrix by llama-quantize's rules (llama.cpp, src/llama-quant.cpp) for a model with few K/V heads."""
        part, layer = name.removesuffix(".weight").rsplit(".", 1)[-1], int(name.split(".")[1]) if name.startswith("blk.") else 0
        if part == "output":
            return self.head
        if part == "attn_qkv":
            return self.qkv
        ends = layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2
        return self.more if part in ("attn_v", "ffn_down") and ends else self.most


MIXES = {"Q4_K_M": Mix("q4_K", "q6_K", "q5_K", "q6_K"), "Q5_K_M": Mix("q5_K", "q6_K", "q6_K", "q6_K"),
         "UD-IQ3_XXS": Mix("iq3_xxs", "q6_K", "q5_K", "iq4_xs")}  # fmt: skip


def quantise(values: np.ndarray, kind: int) -> np.ndarray:
    """F32 [rows, n] to U8 [rows, row bytes]; types that want an importance matrix get one that finds all values alike."""
    if text(lib.ggml_type_name(kind)) in quants.TYPES:
        return quants.quantise(values, kind)
    values, alike = np.ascontiguousarray(values, np.float32), np.ones(values.shape[1], np.float32)
    out = np.empty((len(values), lib.ggml_row_size(kind, values.shape[1])), np.uint8)
    source, importance = (ffi.cast("float *", ffi.from_buffer(array)) for array in (values, alike))
    lib.ggml_quantize_chunk(kind, source, ffi.from_buffer(out), 0, *values.shape, importance)
    return out


class Drawn(dict[tuple, tuple[np.ndarray, Any]]):
    """Blocks drawn from a state of a generator, with its state afterwards: writing models of few seeds again and again is a third of
    what tests of models take. The oldest go first."""

    def __init__(self, most_bytes: int) -> None:
        self.free = most_bytes

    def put(self, key: tuple, block: np.ndarray, state: Any) -> None:
        self[key] = block, state
        self.free -= block.nbytes
        while self.free < 0 and len(self) > 1:
            self.free += self.pop(next(iter(self)))[0].nbytes


_drawn = Drawn(1 << 27)


class Writer:
    """GGUF writer that quantises matrices and keeps vectors in F32. ``quant``: a tensor type or one of MIXES."""

    def __init__(self, path: Path, arch: str, quant: str, seed: int, n_layer: int = 0):
        self.out = gguf.GGUFWriter(str(path), arch)
        self.mix, self.n_layer = MIXES.get(quant), n_layer
        self.arch, self.kind = arch, type_id(self.mix.most if self.mix else quant)
        self.rng = np.random.default_rng(seed)
        self._blocks: dict[tuple, np.ndarray] = {}
        self._tiled: dict[str, Tiled] = {}

    def matrix(self, name: str, n_in: int, n_out: int, gain: float = 1.0, kind: int | None = None) -> None:
        self._add(name, n_in, n_out, (n_out,), gain, kind, n_out)

    def experts(self, name: str, n_in: int, n_out: int, count: int, kind: int | None = None) -> None:
        """``count`` matrices as one 3-D tensor: one is random, the others permute its rows."""
        self._add(name, n_in, n_out * count, (count, n_out), 1.0, kind, n_out)

    def heads(self, name: str, n_in: int, n_out: int, count: int, kind: int | None = None) -> None:
        """One matrix per head, as one 3-D tensor."""
        self._add(name, n_in, n_out * count, (count, n_out), 1.0, kind, n_out * count)

    def _add(self, name: str, n_in: int, n_out: int, shape: tuple[int, ...], gain: float, kind: int | None, drawn: int) -> None:
        if kind is None:
            kind = type_id(self.mix.of(name, self.n_layer)) if self.mix else self.kind
        if n_in % lib.ggml_blck_size(kind):
            kind = type_id("q8_0") if n_in % 32 == 0 else type_id("f16")
        # fresh numbers for small matrices; large ones are turned copies of one block per width: quantising 27 billion takes an hour. An odd
        # number of rows, so that no two experts get the same ones
        rows = min(n_out, max(64, min(drawn, (1 << 20) // n_in)) | 1)
        if rows == n_out:
            tiled = Tiled(self._block(n_in, rows, gain, kind), n_out, 0)
        else:
            tiled = Tiled(self._large(n_in, rows, gain, kind), n_out, int(self.rng.integers(rows)))
        raw = None if kind == lib.GGML_TYPE_F32 else gguf.GGMLQuantizationType(kind)
        self.out.add_tensor_info(name, (*shape, tiled.block.shape[1]), tiled.block.dtype, tiled.nbytes, raw)
        self._tiled[name] = tiled

    def _block(self, n_in: int, rows: int, gain: float, kind: int) -> np.ndarray:
        key = (repr(self.rng.bit_generator.state), n_in, rows, gain, kind)
        if key not in _drawn:
            values = self.rng.standard_normal((rows, n_in), np.float32) * (gain / n_in**0.5)
            block = values if kind == lib.GGML_TYPE_F32 else quantise(values, kind)
            _drawn.put(key, block, self.rng.bit_generator.state)
        block, self.rng.bit_generator.state = _drawn[key]
        return block

    def _large(self, n_in: int, rows: int, gain: float, kind: int) -> np.ndarray:
        key = (n_in, rows, gain, kind)
        if key not in self._blocks:
            self._blocks[key] = self._block(*key)
        return self._blocks[key]

    def vector(self, name: str, n: int, low: float, high: float) -> None:
        self.out.add_tensor(name, self.rng.uniform(low, high, n).astype(np.float32))

    def rows(self, name: str, n: int, count: int, most: float) -> None:
        """``count`` rows of n F32 numbers within -most to most."""
        self.out.add_tensor(name, self.rng.uniform(-most, most, (count, n)).astype(np.float32))

    def sizes(self, s: Shape, heads: list[int] | None = None, heads_kv: list[int] | None = None, n_mtp: int = 0, size_v: int = 0) -> None:
        """Keys of every target; ``heads`` and ``heads_kv`` per layer where layers differ; ``n_mtp``: MTP layers; ``size_v``: of heads of V,
        where it is another."""
        out, self.n_layer = self.out, s.n_layer
        out.add_block_count(s.n_layer + n_mtp)
        out.add_context_length(s.n_ctx)
        out.add_embedding_length(s.n_embd)
        out.add_feed_forward_length(s.n_ff)
        out.add_head_count(heads or s.n_head)
        out.add_head_count_kv(heads_kv or s.n_head_kv)
        out.add_key_length(s.head_size)
        out.add_value_length(size_v or s.head_size)
        out.add_layer_norm_rms_eps(1e-6)

    def embedding_and_head(self, s: Shape, norm: str = "output_norm.weight") -> None:
        """Tokenizer, embedding, head and last norm, if it has a name."""
        self.tokenizer(s.n_vocab, s.control)
        self.matrix("token_embd.weight", s.n_embd, s.n_vocab, gain=1.0 if s.tied else s.n_embd**0.5)
        if not s.tied:
            self.matrix("output.weight", s.n_embd, s.n_vocab)
        if norm:
            self.vector(norm, s.n_embd, 0.5, 1.5)

    def matrices(self, prefix: str, shapes: dict[str, tuple[int, int]], kinds: dict[str, int] | None = None) -> None:
        """``prefix``name.weight of (n_in, n_out) each; ``kinds`` gives some of them another type."""
        for name, (n_in, n_out) in shapes.items():
            self.matrix(f"{prefix}{name}.weight", n_in, n_out, kind=(kinds or {}).get(name))

    def norms(self, prefix: str, sizes: dict[str, int]) -> None:
        for name, n in sizes.items():
            self.vector(f"{prefix}{name}.weight", n, 0.5, 1.5)

    def tokenizer(self, n_vocab: int, control: tuple[str, ...] = ()) -> None:
        """A byte-level BPE with one merge: 256 bytes, two spaces, filler tokens, ``control`` tokens and others, and an end token and a mask token at the end."""
        table = _byte_table()
        space = table[32]
        tokens = [
            *(table[b] for b in range(256)),
            2 * space,
            *(f"<filler_{i}>" for i in range(n_vocab - 259 - len(control))),
            *control,
            "<|end|>",
            "<|mask|>",
        ]
        types = [
            gguf.TokenType.CONTROL if i >= n_vocab - 2 - len(control) and name.startswith("<") else gguf.TokenType.NORMAL
            for i, name in enumerate(tokens)
        ]
        self.out.add_tokenizer_model("gpt2")
        self.out.add_tokenizer_pre("qwen2")
        self.out.add_token_list(tokens)
        self.out.add_token_types(types)
        self.out.add_token_merges([f"{space} {space}"])
        self.out.add_eos_token_id(n_vocab - 2)
        self.out.add_uint32("tokenizer.ggml.mask_token_id", n_vocab - 1)

    def close(self) -> None:
        self.out.write_header_to_file()
        self.out.write_kv_data_to_file()
        self.out.write_ti_data_to_file()
        for name, info in [*self.out.tensors[0].items()]:  # one tensor in memory at a time
            tensor: Any = info.tensor if name not in self._tiled else self._tiled[name].values()
            self.out.write_tensor_data(tensor)
        self.out.close()


def _byte_table() -> dict[int, str]:
    """The printable characters that byte-level BPE writes bytes as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in plain}
    extra = 0
    for b in range(256):
        if b not in table:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def write_qwen35(path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 1, mixed: bool = False) -> Path:
    """Writes a random qwen35 target. ``mixed`` gives attn_v and ffn_down another type, as real k-quant files do."""

    def ffn(w: Writer, prefix: str, other: int | None) -> None:
        w.matrix(prefix + "ffn_gate.weight", shape.n_embd, shape.n_ff)
        w.matrix(prefix + "ffn_up.weight", shape.n_embd, shape.n_ff)
        w.matrix(prefix + "ffn_down.weight", shape.n_ff, shape.n_embd, kind=other)

    return write_hybrid(path, "qwen35", shape, quant, seed, mixed, ffn)


def hybrid_keys(w: Writer, a: str, s: Shape, n_mtp: int = 0) -> None:
    """The keys of a target with delta-net layers; ``n_mtp``: MTP layers."""
    out = w.out
    w.sizes(s, n_mtp=n_mtp)
    out.add_rope_dimension_count(s.n_rot)
    out.add_rope_freq_base(s.rope_base)
    if a != "qwen3next":
        out.add_rope_dimension_sections([(s.n_rot // 2 + 2 - axis) // 3 for axis in range(3)] + [0])
    out.add_uint32(f"{a}.ssm.conv_kernel", 4)
    out.add_uint32(f"{a}.ssm.inner_size", s.delta_head * s.delta_v)
    out.add_uint32(f"{a}.ssm.state_size", s.delta_head)
    out.add_uint32(f"{a}.ssm.time_step_rank", s.delta_v)
    out.add_uint32(f"{a}.ssm.group_count", s.delta_k)
    out.add_uint32(f"{a}.full_attention_interval", s.every)


def write_attention(w: Writer, b: str, s: Shape, other: int | None) -> None:
    """One gated attention layer without its norms; ``other`` is the type of attn_v."""
    w.matrix(b + "attn_q.weight", s.n_embd, 2 * s.n_head * s.head_size)
    w.matrix(b + "attn_k.weight", s.n_embd, s.n_head_kv * s.head_size)
    w.matrix(b + "attn_v.weight", s.n_embd, s.n_head_kv * s.head_size, kind=other)
    w.matrix(b + "attn_output.weight", s.n_head * s.head_size, s.n_embd)
    w.vector(b + "attn_q_norm.weight", s.head_size, 0.5, 1.5)
    w.vector(b + "attn_k_norm.weight", s.head_size, 0.5, 1.5)


def write_hybrid(
    path: str | Path, a: str, s: Shape, quant: str, seed: int, mixed: bool, ffn: Callable, joined: bool = False, mtp: Callable | None = None
) -> Path:
    """Writes a random target with delta-net layers; ``ffn(writer, prefix, other type)`` writes the FFN tensors of a layer,
    ``mtp(writer, other type)`` an additional MTP layer.

    qwen3next has beta and alpha in one matrix, and with ``joined`` q, k, v and z in one too, both with the parts of each k-head side by side.
    """
    path = Path(path)
    w = Writer(path, a, quant, seed)
    out = w.out
    hybrid_keys(w, a, s, n_mtp=1 if mtp is not None else 0)
    w.embedding_and_head(s)
    other = type_id("q6_K") if mixed else None
    channels, inner = s.delta_head * (2 * s.delta_k + s.delta_v), s.delta_head * s.delta_v
    for i in range(s.n_layer):
        b = f"blk.{i}."
        w.vector(b + "attn_norm.weight", s.n_embd, 0.5, 1.5)
        w.vector(b + "post_attention_norm.weight", s.n_embd, 0.5, 1.5)
        if (i + 1) % s.every:
            projections = {"ssm_in": channels + inner} if joined else {"attn_qkv": channels, "attn_gate": inner}
            projections |= {"ssm_ba": 2 * s.delta_v} if a == "qwen3next" else dict.fromkeys(("ssm_beta", "ssm_alpha"), s.delta_v)
            w.matrices(b, {name: (s.n_embd, n_out) for name, n_out in projections.items()})
            out.add_tensor(b + "ssm_conv1d.weight", (w.rng.standard_normal((channels, 4)) * 0.5).astype(np.float32))
            w.vector(b + "ssm_dt.bias", s.delta_v, -4.0, 1.0)
            out.add_tensor(b + "ssm_a", -w.rng.uniform(0.1, 4.0, s.delta_v).astype(np.float32))
            w.vector(b + "ssm_norm.weight", s.delta_head, 0.5, 1.5)
            w.matrix(b + "ssm_out.weight", inner, s.n_embd)
        else:
            write_attention(w, b, s, other)
        ffn(w, b, other)
    if mtp is not None:
        mtp(w, other)
    w.close()
    return path


def write_dflash(
    path: str | Path, shape: Shape = Shape(), quant: str = "F32", seed: int = 2, *,
    gelu: bool = False, value_scale: float = 0.0, softcap: float = 0.0, post_norms: bool = False, shared_kv: bool = False,
    factors: bool = False, own: tuple[str, ...] = (), causal: bool = False, gate: str = "", feature_norms: bool = False,
    sinks: bool = False, block: int = 16, tokens: int = 0, more: Callable[[Writer], None] = lambda w: None
) -> Path:  # fmt: skip
    """Writes a random dflash drafter for a target of the same shape; embedding and head are the target's, unless ``own`` names them.

    ``tokens``: of the target's vocabulary, so many that a head of its own chooses among (d2t); ``more`` writes what other drafters have besides.

    ``post_norms`` adds norms after attention and FFN and a scale per layer, ``shared_kv`` leaves attn_v out, ``factors`` adds rope_freqs, ``sinks`` attn_sinks.
    As drafters of Laguna targets: ``feature_norms`` adds enc.aux_norm, ``gate`` adds attn_gate per "head" or per "output".
    """
    s, path = shape, Path(path)
    w = Writer(path, "dflash", quant, seed, s.draft_layers)
    out = w.out
    out.add_block_count(s.draft_layers)
    out.add_context_length(s.n_ctx)
    out.add_embedding_length(s.n_embd)
    out.add_feed_forward_length(s.draft_ff)
    out.add_head_count(s.draft_heads)
    out.add_head_count_kv(s.draft_heads_kv)
    out.add_key_length(s.draft_head_size)
    out.add_value_length(s.draft_head_size)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_freq_base(s.rope_base)
    out.add_rope_dimension_count(s.draft_head_size)
    if factors:
        out.add_tensor("rope_freqs.weight", w.rng.uniform(1.0, 8.0, s.draft_head_size // 2).astype(np.float32))
    else:
        out.add_rope_dimension_sections([s.draft_head_size // 2, 0, 0, 0])
    out.add_causal_attention(causal)
    if gelu:
        out.add_string("dflash.hidden_activation", "gelu_pytorch_tanh")
    if value_scale:
        out.add_float32("dflash.attention.value_scale", value_scale)
    if softcap:
        out.add_final_logit_softcapping(softcap)
    if s.embedding_scale:
        out.add_float32("dflash.embedding_scale", s.embedding_scale)
    out.add_uint32("dflash.block_size", block)
    out.add_array("dflash.target_layers", list(s.target_layers))
    if s.window:
        out.add_sliding_window(s.window)
        out.add_array("dflash.attention.sliding_window_pattern", [i + 1 < s.draft_layers for i in range(s.draft_layers)])
    w.tokenizer(s.n_vocab)
    if "embedding" in own:
        w.matrix("token_embd.weight", s.n_embd, s.n_vocab, gain=s.n_embd**0.5)
    if "head" in own:
        w.matrix("output.weight", s.n_embd, tokens or s.n_vocab)
    if tokens:
        out.add_tensor("d2t", np.sort(w.rng.permutation(s.n_vocab)[:tokens]).astype(np.int64))
    w.matrix("fc.weight", s.n_embd * len(s.target_layers), s.n_embd)
    w.vector("enc.output_norm.weight", s.n_embd, 0.5, 1.5)
    w.vector("output_norm.weight", s.n_embd, 0.5, 1.5)
    if feature_norms:
        norms = w.rng.uniform(0.5, 1.5, (len(s.target_layers), s.n_embd))
        out.add_tensor("enc.aux_norm.weight", norms.astype(np.float32))
    wide, wide_kv = s.draft_heads * s.draft_head_size, s.draft_heads_kv * s.draft_head_size
    for i in range(s.draft_layers):
        b = f"blk.{i}."
        for name, n_in, n_out in (
            ("attn_q", s.n_embd, wide),
            ("attn_k", s.n_embd, wide_kv),
            *(() if shared_kv else (("attn_v", s.n_embd, wide_kv),)),
            ("attn_output", wide, s.n_embd),
            *((("attn_gate", s.n_embd, wide if gate == "output" else s.draft_heads),) if gate else ()),
            ("ffn_gate", s.n_embd, s.draft_ff),
            ("ffn_up", s.n_embd, s.draft_ff),
            ("ffn_down", s.draft_ff, s.n_embd),
        ):
            w.matrix(f"{b}{name}.weight", n_in, n_out)
        for name, n in (
            ("attn_norm", s.n_embd),
            ("ffn_norm", s.n_embd),
            ("attn_q_norm", s.draft_head_size),
            ("attn_k_norm", s.draft_head_size),
        ):
            w.vector(f"{b}{name}.weight", n, 0.5, 1.5)
        if post_norms:
            w.norms(b, {"post_attention_norm": s.n_embd, "post_ffw_norm": s.n_embd, "layer_output_scale": 1})
        if sinks:
            w.vector(f"{b}attn_sinks.weight", s.draft_heads, -1.0, 3.0)
    more(w)
    w.close()
    return path
