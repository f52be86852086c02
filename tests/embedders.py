"""Random models that embed and rank: encoders as bge and nomic have them, and a reranker of qwen3."""

from pathlib import Path

import gguf
import numpy as np
from architectures import write_tiny
from gguf_io.build import ARR, STR, Model

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *(f"\u2581{w}" for w in ["the", "cat", "sat", "on", "a", "mat", "while", "dog", "ran", ".", ","]),
    *"abcdefghijklmnopqrstuvwxyz",
]
N_EMBD, N_FF, N_HEAD, N_LAYER = 64, 96, 4, 2


def write_encoder(path: Path, arch: str, n_ctx: int = 128) -> Path:
    """``arch``: "bert" (pooling of the first token) or "nomic-bert" (mean)."""
    rng, w, nomic = np.random.default_rng(3), gguf.GGUFWriter(path, arch), arch == "nomic-bert"
    w.add_context_length(n_ctx)
    w.add_embedding_length(N_EMBD)
    w.add_block_count(N_LAYER)
    w.add_feed_forward_length(N_FF)
    w.add_head_count(N_HEAD)
    w.add_layer_norm_eps(1e-6)
    w.add_causal_attention(False)
    w.add_pooling_type(gguf.PoolingType.MEAN if nomic else gguf.PoolingType.CLS)
    if nomic:
        w.add_rope_freq_base(1000.0)
    w.add_tokenizer_model("bert")
    w.add_tokenizer_pre("bert")
    w.add_token_list(WORDS)
    w.add_token_types([3] * 5 + [1] * (len(WORDS) - 5))
    w.add_token_type_count(2)
    names = {"padding": 0, "unknown": 1, "bos": 2, "cls": 2, "eos": 3, "seperator": 3, "mask": 4}  # so spelt by llama.cpp
    for name, token in names.items():
        w.add_uint32(f"tokenizer.ggml.{name}_token_id", token)

    def tensor(name: str, *shape: int) -> None:
        w.add_tensor(name, rng.normal(0, 0.3, shape).astype(np.float32))

    def norm(name: str) -> None:
        w.add_tensor(f"{name}.weight", rng.normal(1, 0.1, N_EMBD).astype(np.float32))
        tensor(f"{name}.bias", N_EMBD)

    tensor("token_embd.weight", len(WORDS), N_EMBD)
    tensor("token_types.weight", 2, N_EMBD)
    norm("token_embd_norm")
    if not nomic:
        tensor("position_embd.weight", n_ctx, N_EMBD)
    for i in range(N_LAYER):
        shapes = {"attn_output": (N_EMBD, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)}
        shapes |= (
            {"attn_qkv": (3 * N_EMBD, N_EMBD), "ffn_gate": (N_FF, N_EMBD)}
            if nomic
            else dict.fromkeys(("attn_q", "attn_k", "attn_v"), (N_EMBD, N_EMBD))
        )
        for name, shape in shapes.items():
            tensor(f"blk.{i}.{name}.weight", *shape)
            if not nomic:
                tensor(f"blk.{i}.{name}.bias", shape[0])
        norm(f"blk.{i}.attn_output_norm")
        norm(f"blk.{i}.layer_output_norm")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_reranker(path: Path) -> Path:
    """Of qwen3: "yes" and "no" by softmax, and a template of the pair."""
    model = Model(write_tiny("qwen3", path))
    n = model.keys["qwen3.embedding_length"][1]
    model.keys["qwen3.classifier.output_labels"] = ARR, (STR, ["yes", "no"])
    model.keys["tokenizer.chat_template.rerank"] = STR, "Query: {query} Document: {document} Answer:"
    model.tensors["cls.output.weight"] = [(n, 2), 0, np.random.default_rng(4).normal(0, 1, (2, n)).astype(np.float32).tobytes()]
    return model.write(path)
