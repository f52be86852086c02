"""eagle3: layers over two inputs, a token and what layers of the target, mostly three, made of the token before it.

    g = fc [f_a ; f_b ; f_c], the inputs of the target's layers a, b, c (rms-normalised first: together with norm_before_fc, each with enc.aux_norm)
Its row after the token x_p is the pair (x_p, g_{p-1}), at position p - 1: it predicts the token after x_p.
    e = rms(E[x]; attn_norm);  n = rms(g; attn_norm_2)
    x = attention([e ; n]) + g  (+ n instead of g with norm_before_residual);  x += FFN(rms(x; ffn_norm))
    further layers, which drafters of the speculators library may have: x += attention(rms(x; attn_norm));  x += FFN(rms(x; ffn_norm))
    draft = argmax(head rms(x; output_norm)), and x, before that norm (after it with norm_output), is what the next draft reads in place of g
P-EAGLE (`parallel_drafting`) makes all drafts in one causal pass: the rows after the first are the pair (mask_token_id, g of mask_hidden), at the next
positions, and the converter stores that g as `enc.mask_hidden`. Committed tokens have ordinary rows.
Heads of q and k are rms-normalised before they are rotated where the file has attn_q_norm and attn_k_norm.
K and V of the first layer depend on the pair alone, so that a committed row needs neither attention nor FFN of the last layer: llama.cpp computes all
of its one layer there, which gives the same ids. There is no row for the first token, whose pair would lack its hidden state; its place in the cache
is hidden from all others. A reduced head maps its outputs to tokens by `d2t`.
Sources of the formulae: llama.cpp, src/models/eagle3.cpp and common/speculative.cpp (which rows are paired); vllm-project/speculators, models/eagle3
and models/peagle; vLLM, v1/spec_decode (mask rows).
"""

from dataclasses import replace

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.base import KVLayer, KVShape, PictureInputs
from ..models.decoder import Decoder
from ..models.hparams import Hparams
from ..models.layers import HEAD as HEAD_NORM
from ..models.layers import Attention, GatedMLP, LayerContext, head_product, product, write_kv
from ..models.weights import MATMUL, ROWS, VECTOR, Spec
from .base import TOKEN_MAP, ChainInputs, ContextInputs, Drafter, check_tokens
from .dflash import F16_MAX, FEATURE_NORMS

EMBEDDING, HEAD, NORM, FEATURE_NORM = "token_embd.weight", "output.weight", "output_norm.weight", "enc.output_norm.weight"
FACTORS, FC, LAYER = "rope_freqs.weight", "fc.weight", "blk.0."
MASK_HIDDEN = "enc.mask_hidden.weight"
LAST_INPUT = ("gpt-oss",)  # targets whose last layer's output llama.cpp captures before the norm; others after it


class Eagle3(Drafter):
    """The drafter, a chain. Embedding and head are the target's if the file has none."""

    arch, method = "eagle3", "draft-eagle3"
    chained, position_lag = True, 1
    block_size = 16
    scaled = ()  # as in llama.cpp

    def __init__(self, file: GGUFFile) -> None:
        f = Hparams(file, self.arch)
        self.file, self.n_embd, self.eps, size = file, f.n_embd, f.eps, f.head_dim()
        rope = f.rope(size, neox=False)
        self._f, self._n_rot, self._ffn = f, rope.n_rot, GatedMLP(f.ff)
        self.n_layer, self.rows_read_rows = f.n_layer, f.n_layer > 1
        norms = [f"blk.{i}.{name}.weight" in file.tensors for i in range(f.n_layer) for name in ("attn_q_norm", "attn_k_norm")]
        if len({*norms}) > 1:
            raise ModelError(f"{file.path} has norms of q and k in part; convert the drafter again")
        self._attention = Attention(f.heads, f.kv_heads, size, rope, factors=True, norm=HEAD_NORM if all(norms) else "")
        if f.get("expert_count", int, 0):
            raise ModelError(f"{file.path} has routed experts, which {self.arch} drafters here do not have")
        layers = file.array(f"{self.arch}.target_layers", "iu")
        if layers is None or not 1 <= len(layers) <= 64:
            count = "no" if layers is None else len(layers)
            raise ModelError(
                f"{file.path} has {count} {self.arch}.target_layers; a drafter of this kind reads the inputs of some, mostly three"
            )
        self.captures = tuple(int(v) for v in layers)
        self.n_embd_target = f.positive("target_hidden_size")
        self.norm_before_residual = file.get(f"{self.arch}.norm_before_residual", bool, False)
        self.norm_before_fc = file.get(f"{self.arch}.norm_before_fc", bool, False)
        self.norm_output = file.get(f"{self.arch}.norm_output", bool, False)
        self.parallel = file.get(f"{self.arch}.parallel_drafting", bool, False)
        self.mask_token = file.get(f"{self.arch}.mask_token_id", int) if self.parallel else -1

    # -- tensors

    def tensors(self) -> list[Spec]:
        n, wide = self.n_embd, len(self.captures) * self.n_embd_target
        tensors, out = self.file.tensors, [Spec(FC, (wide, n)), Spec(NORM, (n,), VECTOR)]
        for i in range(self.n_layer):
            layer = f"blk.{i}."
            for spec in self._attention.tensors(self._f, layer):
                pairs = not i and spec.use != VECTOR and "output" not in spec.name
                out.append(replace(spec, shape=(2 * n, spec.shape[1])) if pairs else spec)
            out += self._ffn.tensors(self._f, layer)
            out += [Spec(f"{layer}{name}.weight", (n,), VECTOR) for name in ("attn_norm", *(() if i else ("attn_norm_2",)), "ffn_norm")]
        if self.parallel:
            out.append(Spec(MASK_HIDDEN, (n,), VECTOR))
        if self.norm_before_fc:
            out.append(Spec(FEATURE_NORM, (wide,), VECTOR))
        if FEATURE_NORMS in tensors:
            out.append(Spec(FEATURE_NORMS, (self.n_embd_target, len(self.captures)), VECTOR))
        if EMBEDDING in tensors:
            out.append(Spec(EMBEDDING, (n, tensors[EMBEDDING].shape[-1]), ROWS))
        if HEAD in tensors:
            out.append(Spec(HEAD, (n, tensors[HEAD].shape[-1]), MATMUL))
        if FACTORS in tensors:
            out.append(Spec(FACTORS, (self._n_rot // 2,), VECTOR))
        return out + self.token_map_specs()

    def groups(self) -> dict[str, tuple[str, ...]]:
        """k and v without q, because context rows need no q."""
        groups = {"kv": ("attn_k", "attn_v"), "ffn": ("ffn_gate", "ffn_up")}
        layers = [f"blk.{i}." for i in range(self.n_layer)]
        return {f"{layer}{group}": tuple(f"{layer}{name}.weight" for name in names) for layer in layers for group, names in groups.items()}

    def kv_shapes(self) -> list[KVShape]:
        return [self._attention.kv] * self.n_layer

    def check_pair(self, target: Decoder) -> None:
        pair, tensors, n = f"{self.file.path.name} cannot draft for {target.file.path.name}", self.file.tensors, self.n_embd
        if self.n_embd_target != target.n_embd:
            raise PairError(f"{pair}: it was made for hidden states of {self.n_embd_target} values, the target's have {target.n_embd}")
        last = target.n_layer if target.arch in LAST_INPUT else target.n_layer - 1
        bad = [v for v in self.captures if not 0 <= v <= last]
        if bad:
            raise PairError(
                f"{pair}: it reads the input of layer {bad[0]}, but of {target.arch} targets those of layers 0 to {last} can be read"
            )
        missing = [name for name in (EMBEDDING, HEAD) if name not in tensors]
        if missing and n != target.n_embd:
            raise PairError(
                f"{pair}: it has no {missing[0]} of its own, and its hidden states of {n} values do not fit the target's {target.n_embd}"
            )
        if EMBEDDING in tensors and tensors[EMBEDDING].shape[-1] != target.n_vocab:
            raise PairError(f"{pair}: its {EMBEDDING} has {tensors[EMBEDDING].shape[-1]} tokens, the target has {target.n_vocab}")
        chosen = tensors[HEAD].shape[-1] if HEAD in tensors else target.n_vocab
        known = tensors[TOKEN_MAP].shape[0] if TOKEN_MAP in tensors else target.n_vocab
        if chosen != known:
            raise PairError(f"{pair}: its head has {chosen} tokens, but {TOKEN_MAP if TOKEN_MAP in tensors else 'the target'} has {known}")
        if self.parallel and not 0 <= self.mask_token < target.n_vocab:
            raise PairError(f"{pair}: its mask token is {self.mask_token}, but the target has {target.n_vocab} tokens")
        check_tokens(self.file, target.n_vocab)

    # -- graphs

    def carry_size(self, target: Decoder) -> int:
        return self.n_embd

    def carry(self, g: Graph, hidden: Tensor, features: list[Tensor], target: Decoder) -> Tensor:
        """g of the rows, F32 [n_embd, T]."""
        f = g.concat(features)
        if FEATURE_NORMS in self.weights:
            f = g.flat(g.rms_norm(g.heads(f, self.n_embd_target, len(self.captures)), self.weights[FEATURE_NORMS], self.eps))
        # some targets have activations beyond F16; Inf would spread to all later drafts
        f = g.rms_norm(f, self.weights[FEATURE_NORM], self.eps) if self.norm_before_fc else g.clamp(f, -F16_MAX, F16_MAX)
        return product(g, self.weights.matrix(FC), f)

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        assert rows.tokens is not None and rows.prev_hidden is not None
        before = g.reshape(g.cont(rows.prev_hidden), self.n_embd, rows.tokens.ne[0]) if self.rows_read_rows else rows.prev_hidden
        x, normed = self._pair(g, rows.tokens, before, target, rows.pictures)
        residual = normed if self.norm_before_residual else before
        for i in range(self.n_layer):
            c = LayerContext(g, self.weights, i, self.eps, rows.positions, rows.attention, {i: kv[i]}, factors=self.weights.get(FACTORS))
            if i == self.n_layer - 1:
                write_kv(g, *self._attention.keys_values(c, *c.project("kv", c.rms_norm(x, "attn_norm") if i else x)), kv[i], rows.kv_rows)
            else:
                x = self._layer(c, x, residual)

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        """The head reads the normalised state, the next draft the state before the norm."""
        x, normed = self._pair(g, rows.tokens, rows.prev_hidden, target)
        residual = normed if self.norm_before_residual else rows.prev_hidden
        for i in range(self.n_layer):
            c = LayerContext(
                g, self.weights, i, self.eps, rows.positions, rows.attention, {i: rows.kv[i]}, factors=self.weights.get(FACTORS)
            )
            x = self._layer(c, x, residual)
        normed = g.rms_norm(x, self.weights[NORM], self.eps)
        return normed, normed if self.norm_output else x

    def _layer(self, c: LayerContext, x: Tensor, residual: Tensor) -> Tensor:
        """``x``: of the first layer the pair, whose ``residual`` is added."""
        read = c.rms_norm(x, "attn_norm") if c.i else x
        out = self._attention.attend(c, c.product("attn_q", read), *c.project("kv", read))
        x = c.g.add(out, x if c.i else residual)
        return c.g.add(self._ffn(c, c.rms_norm(x, "ffn_norm")), x)

    def masked(self) -> tuple[int, Tensor]:
        return self.mask_token, self.weights[MASK_HIDDEN]

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        """From the drafter's head or the target's."""
        if HEAD in self.weights:
            return head_product(g, self.weights.matrix(HEAD), hidden, self.draft_tokens)
        return target.logits(g, hidden, self.draft_tokens)

    def _pair(
        self, g: Graph, tokens: Tensor, before: Tensor, target: Decoder, pictures: PictureInputs | None = None
    ) -> tuple[Tensor, Tensor]:
        """[e ; n] of tokens I32 [T] and their previous carries, F32 [.., T]: F32 [2 n_embd, T], and n."""
        w, eps = self.weights, self.eps
        e = g.rows(w[EMBEDDING], tokens) if EMBEDDING in w else target.embed(g, tokens)
        e = e if pictures is None else pictures.mixed(g, e)
        n = g.rms_norm(before, w[f"{LAYER}attn_norm_2.weight"], eps)
        n = g.reshape(n, e.ne[0], e.ne[1])
        return g.concat([g.rms_norm(e, w[f"{LAYER}attn_norm.weight"], eps), n]), n
