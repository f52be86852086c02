"""eagle3: one layer over two inputs, a token and what three layers of the target made of the token before it.

    g = fc [f_a ; f_b ; f_c], the inputs of the target's layers a, b, c (rms-normalised first: together with norm_before_fc, each with enc.aux_norm)
Its row after the token x_p is the pair (x_p, g_{p-1}), at position p - 1: it predicts the token after x_p.
    e = rms(E[x]; attn_norm);  n = rms(g; attn_norm_2)
    x = attention([e ; n]) + g  (+ n instead of g with norm_before_residual);  x += FFN(rms(x; ffn_norm))
    draft = argmax(head rms(x; output_norm)), and x, before that norm (after it with norm_output), is what the next draft reads in place of g
Heads of q and k are rms-normalised before they are rotated where the file has attn_q_norm and attn_k_norm.
K and V depend on the pair alone, so that a committed row needs neither attention nor FFN: llama.cpp computes the whole layer there, which gives
the same ids. There is no row for the first token, whose pair would lack its hidden state; its place in the cache is hidden from all others.
A reduced head maps its outputs to tokens by `d2t`.
Source of the formulae: llama.cpp, src/models/eagle3.cpp and common/speculative.cpp (which rows are paired).
"""

from dataclasses import replace

from ..errors import ModelError, PairError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from ..models.base import KVLayer, KVShape
from ..models.decoder import Decoder
from ..models.hparams import Hparams
from ..models.layers import HEAD as HEAD_NORM
from ..models.layers import Attention, GatedMLP, LayerContext, head_product, product, write_kv
from ..models.weights import MATMUL, ROWS, VECTOR, Spec
from .base import TOKEN_MAP, ChainInputs, ContextInputs, Drafter, check_tokens
from .dflash import F16_MAX, FEATURE_NORMS

EMBEDDING, HEAD, NORM, FEATURE_NORM = "token_embd.weight", "output.weight", "output_norm.weight", "enc.output_norm.weight"
FACTORS, FC, LAYER = "rope_freqs.weight", "fc.weight", "blk.0."
LAST_INPUT = ("gpt-oss",)  # targets whose last layer's output llama.cpp captures before the norm; others after it


class Eagle3(Drafter):
    """The drafter, a chain. Embedding and head are the target's if the file has none."""

    arch, method = "eagle3", "draft-eagle3"
    chained, position_lag = True, 1
    block_size, n_layer = 16, 1
    scaled = ()  # as in llama.cpp

    def __init__(self, file: GGUFFile) -> None:
        f = Hparams(file, self.arch)
        self.file, self.n_embd, self.eps, size = file, f.n_embd, f.eps, f.head_dim()
        rope = f.rope(size, neox=False)
        self._f, self._n_rot, self._ffn = f, rope.n_rot, GatedMLP(f.ff)
        norms = [f"{LAYER}{name}.weight" in file.tensors for name in ("attn_q_norm", "attn_k_norm")]
        if len({*norms}) > 1:
            raise ModelError(f"{file.path} has a norm of q or of k alone; convert the drafter again")
        self._attention = Attention(f.heads, f.kv_heads, size, rope, factors=True, norm=HEAD_NORM if all(norms) else "")
        if f.n_layer != 1:
            raise ModelError(f"{file.path} has {f.n_layer} layers; {self.arch} drafters have one")
        if f.get("expert_count", int, 0):
            raise ModelError(f"{file.path} has routed experts, which {self.arch} drafters here do not have")
        layers = file.array(f"{self.arch}.target_layers", "iu")
        if layers is None or len(layers) != 3:
            count = "no" if layers is None else len(layers)
            raise ModelError(f"{file.path} has {count} {self.arch}.target_layers; a drafter of this kind reads the inputs of three")
        self.captures = tuple(int(v) for v in layers)
        self.n_embd_target = f.positive("target_hidden_size")
        self.norm_before_residual = file.get(f"{self.arch}.norm_before_residual", bool, False)
        self.norm_before_fc = file.get(f"{self.arch}.norm_before_fc", bool, False)
        self.norm_output = file.get(f"{self.arch}.norm_output", bool, False)

    # -- tensors

    def tensors(self) -> list[Spec]:
        n, wide = self.n_embd, 3 * self.n_embd_target
        tensors, out = self.file.tensors, [Spec(FC, (wide, n)), Spec(NORM, (n,), VECTOR)]
        out += [
            spec if spec.use == VECTOR else replace(spec, shape=(2 * n, spec.shape[1]))
            for spec in self._attention.tensors(self._f, LAYER)
            if "output" not in spec.name
        ]
        out += [Spec(f"{LAYER}attn_output.weight", (self._attention.size * self._attention.heads, n)), *self._ffn.tensors(self._f, LAYER)]
        out += [Spec(f"{LAYER}{name}.weight", (n,), VECTOR) for name in ("attn_norm", "attn_norm_2", "ffn_norm")]
        if self.norm_before_fc:
            out.append(Spec(FEATURE_NORM, (wide,), VECTOR))
        if FEATURE_NORMS in tensors:
            out.append(Spec(FEATURE_NORMS, (self.n_embd_target, 3), VECTOR))
        if EMBEDDING in tensors:
            out.append(Spec(EMBEDDING, (n, tensors[EMBEDDING].shape[-1]), ROWS))
        if HEAD in tensors:
            out.append(Spec(HEAD, (n, tensors[HEAD].shape[-1]), MATMUL))
        if FACTORS in tensors:
            out.append(Spec(FACTORS, (self._n_rot // 2,), VECTOR))
        return out + self.token_map_specs()

    def groups(self) -> dict[str, tuple[str, ...]]:
        """k and v without q, because context rows need no q."""
        return {
            f"{LAYER}kv": tuple(f"{LAYER}{name}.weight" for name in ("attn_k", "attn_v")),
            f"{LAYER}ffn": tuple(f"{LAYER}{name}.weight" for name in ("ffn_gate", "ffn_up")),
        }

    def kv_shapes(self) -> list[KVShape]:
        return [self._attention.kv]

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
        check_tokens(self.file, target.n_vocab)

    # -- graphs

    def carry_size(self, target: Decoder) -> int:
        return self.n_embd

    def carry(self, g: Graph, hidden: Tensor, features: list[Tensor], target: Decoder) -> Tensor:
        """g of the rows, F32 [n_embd, T]."""
        f = g.concat(features)
        if FEATURE_NORMS in self.weights:
            f = g.flat(g.rms_norm(g.heads(f, self.n_embd_target, 3), self.weights[FEATURE_NORMS], self.eps))
        # some targets have activations beyond F16; Inf would spread to all later drafts
        f = g.rms_norm(f, self.weights[FEATURE_NORM], self.eps) if self.norm_before_fc else g.clamp(f, -F16_MAX, F16_MAX)
        return product(g, self.weights.matrix(FC), f)

    def context_rows(self, g: Graph, rows: ContextInputs, kv: tuple[KVLayer, ...], target: Decoder) -> None:
        assert rows.tokens is not None and rows.prev_hidden is not None
        joined, _ = self._pair(g, rows.tokens, rows.prev_hidden, target)
        c = LayerContext(g, self.weights, 0, self.eps, rows.positions, None, {0: kv[0]}, factors=self.weights.get(FACTORS))
        write_kv(g, *self._attention.keys_values(c, *c.project("kv", joined)), kv[0], rows.kv_rows)

    def step(self, g: Graph, rows: ChainInputs, target: Decoder) -> tuple[Tensor, Tensor]:
        """The head reads the normalised state, the next draft the state before the norm."""
        c = LayerContext(g, self.weights, 0, self.eps, rows.positions, rows.attention, {0: rows.kv[0]}, factors=self.weights.get(FACTORS))
        joined, normed = self._pair(g, rows.tokens, rows.prev_hidden, target)
        out = self._attention.attend(c, c.product("attn_q", joined), *c.project("kv", joined))
        x = g.add(out, normed if self.norm_before_residual else rows.prev_hidden)
        x = g.add(self._ffn(c, c.rms_norm(x, "ffn_norm")), x)
        normed = g.rms_norm(x, self.weights[NORM], self.eps)
        return normed, normed if self.norm_output else x

    def logits(self, g: Graph, hidden: Tensor, target: Decoder) -> Tensor:
        """From the drafter's head or the target's."""
        if HEAD in self.weights:
            return head_product(g, self.weights.matrix(HEAD), hidden, self.draft_tokens)
        return target.logits(g, hidden, self.draft_tokens)

    def _pair(self, g: Graph, tokens: Tensor, before: Tensor, target: Decoder) -> tuple[Tensor, Tensor]:
        """[e ; n] of tokens I32 [T] and their previous carries, F32 [.., T]: F32 [2 n_embd, T], and n."""
        w, eps = self.weights, self.eps
        e = g.rows(w[EMBEDDING], tokens) if EMBEDDING in w else target.embed(g, tokens)
        n = g.rms_norm(before, w[f"{LAYER}attn_norm_2.weight"], eps)
        n = g.reshape(n, e.ne[0], e.ne[1])
        return g.concat([g.rms_norm(e, w[f"{LAYER}attn_norm.weight"], eps), n]), n
