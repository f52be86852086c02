"""Multi-head latent attention (DeepSeek V2), in its absorbed form: one latent row per token serves all heads.

    q = W_qb rms(W_qa h; attn_q_a_norm), or W_q h;  [c ; p] = W_kva h, c the latent part
    c = rms(c; attn_kv_a_norm);  each head of q is [n ; r], r and p are rotated (adjacent pairs)
    K row = [c ; p], V row = c, one for all heads;  head i of q attends as [W_kb,i n ; r] and gives W_vb,i sum_j a_j c_j
W_kb and W_vb, halves of the K/V up-projection, are absorbed into q and into the output, so that rows stay compressed.
"""

from dataclasses import dataclass

from ..ggml.library import Tensor
from .base import KVShape
from .hparams import Hparams
from .layers import LayerContext, Part, specs
from .rope import Rope
from .weights import HEADS, Spec


@dataclass(frozen=True)
class MLA(Part):
    """Latent attention with ``heads`` heads.

    Attributes:
        lora_q: rank of q's projection; 0 for a direct one.
        latent: values of a latent row.
        size, size_v: values per head of q, and of its result; ``rope.n_rot`` of the former are rotated.
        scale: of the scores.
        rotated: whether the ``rope.n_rot`` values are rotated.
    """

    heads: int
    lora_q: int
    latent: int
    size: int
    size_v: int
    rope: Rope
    scale: float
    rotated: bool = True
    narrow = True

    @property
    def kv(self) -> KVShape:  # type: ignore[override]
        return KVShape(1, self.latent + self.rope.n_rot, latent=self.latent)

    def tensors(self, f: Hparams, prefix: str) -> list[Spec]:
        n, wide = f.n_embd, self.heads * self.size
        of_q = {"attn_q_a": (n, self.lora_q), "attn_q_b": (self.lora_q, wide)} if self.lora_q else {"attn_q": (n, wide)}
        norms = {"attn_kv_a_norm": self.latent} | ({"attn_q_a_norm": self.lora_q} if self.lora_q else {})
        shapes = of_q | {"attn_kv_a_mqa": (n, self.latent + self.rope.n_rot), "attn_output": (self.heads * self.size_v, n)}
        plain = self.size - self.rope.n_rot
        heads = {"attn_k_b": (plain, self.latent, self.heads), "attn_v_b": (self.latent, self.size_v, self.heads)}
        return specs(prefix, shapes, norms) + [Spec(f"{prefix}{name}.weight", shape, HEADS) for name, shape in heads.items()]

    def groups(self, f: Hparams, prefix: str) -> dict[str, tuple[str, ...]]:
        return {"mixer": ("attn_q_a" if self.lora_q else "attn_q", "attn_kv_a_mqa")}

    def __call__(self, c: LayerContext, x: Tensor) -> Tensor:
        assert c.attention is not None
        return self.attend(c, *self.projected(c, x), c.attention.mask)

    def _rotate(self, c: LayerContext, x: Tensor) -> Tensor:
        return self.rope(c.g, x, c.positions) if self.rotated else x

    def projected(self, c: LayerContext, x: Tensor) -> tuple[Tensor, Tensor]:
        """(q or its low-rank input, [c ; p])."""
        q, row = c.project("mixer", x)
        return c.rms_norm(q, "attn_q_a_norm") if self.lora_q else q, row

    def stored(self, c: LayerContext, row: Tensor) -> Tensor:
        """[c ; p] F32 [latent + n_rot, T] -> the K rows, F32 [latent + n_rot, 1, T]."""
        g = c.g
        latent = c.rms_norm(g.slice(row, 0, 0, self.latent), "attn_kv_a_norm")
        if not self.rope.n_rot:
            return g.reshape(latent, self.latent, 1, latent.ne[1])
        key = self._rotate(c, g.heads(row, self.rope.n_rot, 1, first=self.latent))
        return g.concat([g.reshape(latent, self.latent, 1, latent.ne[1]), key])

    def attend(self, c: LayerContext, q: Tensor, row: Tensor, mask: Tensor) -> Tensor:
        """Attention output F32 [n_embd, T] from ``projected``, over the rows that ``mask`` shows."""
        return c.product("attn_output", self.attended(c, q, row, mask))

    def attended(self, c: LayerContext, q: Tensor, row: Tensor, mask: Tensor) -> Tensor:
        """The same before the output matrix, F32 [size_v * heads, T]."""
        g, kv, n_rot, attention = c.g, c.kv, self.rope.n_rot, c.attention
        assert attention is not None
        q = c.product("attn_q_b", q) if self.lora_q else q
        plain = g.heads(q, self.size - n_rot, self.heads, self.size)
        absorbed = g.permute(g.matmul(c["attn_k_b"], g.permute(plain, 0, 2, 1, 3)), 0, 2, 1, 3)
        turned = [self._rotate(c, g.heads(q, n_rot, self.heads, self.size, self.size - n_rot))] if n_rot else []
        q = g.concat([absorbed, *turned]) if turned else g.cont(absorbed)
        q = q if c.q_scale is None else g.mul(q, c.q_scale)
        stored = self.stored(c, row)
        g.expand(q)
        g.kv_write_rows(kv.k, stored, attention.kv_rows)
        out = g.reshape(g.flash_attention(q, kv.k, kv.v, mask, 1, attention.kv_bucket, self.scale), self.latent, self.heads, row.ne[1])
        out = g.permute(g.matmul(c["attn_v_b"], g.permute(out, 0, 2, 1, 3)), 0, 2, 1, 3)
        return g.cont_flat(out)
