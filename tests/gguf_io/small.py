"""The smallest pair that runs."""

from random_gguf.model import Shape

SMALL = Shape(
    n_layer=2, every=2, n_embd=32, n_ff=32, n_head=2, n_head_kv=1, head_size=16, n_rot=16, delta_head=16, delta_k=1, delta_v=2, n_vocab=260,
    draft_layers=2, draft_heads=2, draft_heads_kv=1, draft_head_size=16, draft_ff=32, target_layers=(1, 2),
)  # fmt: skip
