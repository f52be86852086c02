"""Random checkpoints in the layouts that drafters are published in: config.json and tensors under their makers' names."""

import json
from pathlib import Path

import numpy as np
from random_gguf.model import Shape
from tools.checkpoint import safetensors

N, FF, HEADS, KV, SIZE, VOCAB, MASK = 64, 128, 4, 2, 32, 320, 319
TARGET = Shape(n_layer=6, n_embd=N, n_ff=FF, head_size=SIZE)
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]


class Random:
    """Tensors by name, with as much in the products as in those of a trained model."""

    def __init__(self, seed):
        self.rng, self.tensors = np.random.default_rng(seed), {}

    def matrix(self, name, rows, cols, gain=1.0):
        self.tensors[name] = (self.rng.standard_normal((rows, cols)) * gain / cols**0.5).astype(np.float32)

    def norms(self, **sizes):
        for name, size in sizes.items():
            self.tensors[name.replace("__", ".") + ".weight"] = self.rng.uniform(0.5, 1.5, size).astype(np.float32)

    def layer(self, prefix, wide=N, heads=HEADS, kv=KV, size=SIZE, qk_norms=True, v=True, fused=False):
        rows = {"q": heads * size, "k": kv * size, **({"v": kv * size} if v else {})}
        for name, count in ({"qkv": sum(rows.values())} if fused else rows).items():
            self.matrix(f"{prefix}self_attn.{name}_proj.weight", count, wide)
        self.matrix(f"{prefix}self_attn.o_proj.weight", N, heads * size)
        for name, shape in (("gate", (FF, N)), ("up", (FF, N)), ("down", (N, FF))):
            self.matrix(f"{prefix}mlp.{name}_proj.weight", *shape)
        self.norms(**{f"{prefix}{name}": N for name in ("input_layernorm", "post_attention_layernorm")})
        if qk_norms:
            self.norms(**{f"{prefix}self_attn.{name}": size for name in ("q_norm", "k_norm")})

    def ends(self, tokens=VOCAB, embedding=True):
        if embedding:
            self.matrix("embed_tokens.weight", VOCAB, N, N**0.5)
        self.matrix("lm_head.weight", tokens, N)
        if tokens < VOCAB:
            ids = np.sort(self.rng.permutation(VOCAB)[:tokens])
            known = np.zeros(VOCAB, bool)
            known[ids] = True
            self.tensors |= {"d2t": ids - np.arange(tokens), "t2d": known}

    def write(self, folder: Path, config: dict) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(safetensors(self.tensors))
        return folder


def sizes(layers, **more):
    """What transformers writes of a Qwen3; some of it is without effect."""
    return {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16", "head_dim": SIZE, "hidden_act": "silu",
        "hidden_size": N, "initializer_range": 0.02, "intermediate_size": FF, "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 4096, "max_window_layers": layers, "model_type": "qwen3", "num_attention_heads": HEADS,
        "num_hidden_layers": layers, "num_key_value_heads": KV, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0,
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": VOCAB, **more,
    }  # fmt: skip


def block(r, layers=3, features=3, **layer):
    for i in range(layers):
        r.layer(f"layers.{i}.", **layer)
    r.matrix("fc.weight", N, features * N)
    r.norms(hidden_norm=N, norm=N)


def windows(**more):
    return {"layer_types": SLIDING, "sliding_window": 12, "use_sliding_window": True, **more}


def dflash(r, **more):
    """z-lab's: `is_causal` is not there unless ``more`` has it."""
    block(r)
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 2, 4]} | more.pop("own", {})
    return {**sizes(3), "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 8,
            "num_target_layers": 6, "dflash_config": own, **more}  # fmt: skip


def dflash2(r, **more):
    for part in ("attention_conv", "mlp_conv"):
        for i in range(3):
            r.tensors[f"layers.{i}.{part}.base_kernel"] = (r.rng.standard_normal((2, 2, N)) * 0.5).astype(np.float32)
            r.matrix(f"layers.{i}.{part}.kernel_projection.weight", 2 * 2 * N // 16, N, 0.5)
    for kind in ("predecessor", "successor"):
        r.matrix(f"candidate_selector.{kind}_codebook", VOCAB, 32, 32**0.5)
    r.matrix("candidate_selector.hidden_projection.weight", 32, N, 0.5)
    own = {"block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 7, **more.pop("own", {})}
    config = dflash(
        r,
        own=own,
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        **more,
    )
    return {key: value for key, value in config.items() if key not in ("block_size", "rope_theta", "rope_scaling")}


def speculators(r, algorithm, layers=3, tokens=100, layer=sizes, **more):
    r.ends(tokens)
    verifier = {"name_or_path": "x/y", "architectures": ["Qwen3ForCausalLM"]}
    return {
        "architectures": [f"{algorithm}Speculator"], "draft_vocab_size": tokens, "dtype": "float32", "speculators_config": {"verifier": verifier},
        "speculators_model_type": algorithm.lower(), "speculators_version": "0.4.0", "target_hidden_size": None,
        "transformer_layer_config": layer(layers), **more,
    }  # fmt: skip


def speculators_dflash(r, **more):
    block(r)
    return speculators(
        r, "DFlash", aux_hidden_state_layer_ids=[1, 3, 5], mask_token_id=MASK, block_size=8, sample_from_anchor=False, **more
    )


def markov(r, tokens=VOCAB, confidence=True):
    r.matrix("markov_head.markov_w1.weight", VOCAB, 16, 4.0)
    r.matrix("markov_head.markov_w2.weight", tokens, 16)
    if confidence:
        r.matrix("confidence_head.proj.weight", 1, N + 16)
        r.tensors["confidence_head.proj.bias"] = np.full(1, 0.3, np.float32)
    return {
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence,
    }


def speculators_dspark(r, from_anchor=True):
    block(r)
    said = {} if from_anchor is None else {"sample_from_anchor": from_anchor}
    more = markov(r, 100) | said | {"sliding_window_non_causal": False}
    return speculators(r, "DSpark", aux_hidden_state_layer_ids=[1, 3, 5], mask_token_id=MASK, block_size=7,
                       layer=lambda layers: sizes(layers, **windows()), **more)  # fmt: skip


def deepspec(r, rank=16):
    """A DSpark, or with a rank of 0 what DeepSpec calls DFlash: its block drafts from the anchor on."""
    block(r)
    r.ends()
    heads = markov(r) if rank else {"markov_rank": 0, "enable_confidence_head": False}
    return {**sizes(3), "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": MASK, "num_anchors": 512, "num_target_layers": 6,
            "target_layer_ids": [-1, 2, 4], **heads}  # fmt: skip


def laguna(r, gating="per-head"):
    block(r, fused=True)
    for i in range(3):
        r.matrix(f"layers.{i}.self_attn.g_proj.weight", HEADS if gating == "per-head" else HEADS * SIZE, N)
    r.norms(**{f"aux_hidden_norms.{k}": N for k in range(3)})
    own = {"block_size": 8, "causal": True, "mask_token_id": MASK, "num_target_layers": 6, "target_layer_ids": [0, 2, 5]}
    all_sliding = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 12, "sliding_windows": [12] * 3, "use_sliding_window": True}
    return {**sizes(3), "architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "gating": gating, "draft_vocab_size": VOCAB,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "dflash_config": own, **all_sliding}  # fmt: skip


def gemma(r, cap=None):
    """The layers are a Gemma 4's full ones: wider heads, K is V, half of each head is not rotated."""
    block(r, kv=1, size=2 * SIZE, v=False)
    for i in range(3):
        r.norms(**{f"layers.{i}.{name}": N for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")})
        r.tensors[f"layers.{i}.layer_scalar"] = np.full(1, 0.9, np.float32)
    r.ends()
    r.tensors["embed_tokens.weight"] /= np.float32(N**0.5)
    config = sizes(3) | {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "attention_k_eq_v": True, "enable_moe_block": False,
        "final_logit_softcapping": cap, "global_head_dim": 2 * SIZE, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "vocab_size_per_layer_input": VOCAB,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "block_size": 7, "mask_token_id": MASK, "num_anchors": 512, "num_target_layers": 6, "target_layer_ids": [0, 2, 4],
        "target_model_type": "gemma4", "target_text_model_type": "gemma4_text",
    }  # fmt: skip
    return {key: value for key, value in config.items() if key not in ("hidden_act", "rope_theta", "rope_scaling")} | markov(r)


def eagle3(r, layer="midlayer.", **more):
    """SpecForge's; with ``fc_norm`` as of EAGLE 3.1."""
    r.layer(layer, 2 * N, qk_norms=False)
    r.norms(**{f"{layer}hidden_norm": N, "norm": N})
    r.matrix("fc.weight", N, 3 * N)
    if more.get("fc_norm"):
        r.norms(**{f"fc_norm.{k}": N for k in range(3)})
    r.ends(100, embedding=False)
    config = sizes(1, architectures=["LlamaForCausalLMEagle3"], model_type="llama", draft_vocab_size=100, **more)
    return config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}}


def deepspec_eagle3(r, **more):
    """Five hidden states of the target, which are outputs of the layers named; all of its vocabulary."""
    r.layer("layers.0.", 2 * N)
    r.norms(**{"layers.0.hidden_norm": N, "norm": N})
    r.matrix("fc.weight", N, 5 * N)
    r.ends()
    return {**sizes(1), "architectures": ["Qwen3Eagle3Model"], "draft_num_hidden_layers": 1, "num_target_layers": 6, "step_loss_decay": 0.8,
            "target_layer_ids": [0, 1, 2, 3, 4], "target_model_name_or_path": "Qwen/Qwen3-4B", "ttt_length": 7, **more}  # fmt: skip


def peagle(r, layers=4, name="mask_token_id", **more):
    """Several layers; rows after the first have `mask_hidden` in place of the target's hidden states."""
    config = speculators_eagle3(r, layers=layers, **more)
    r.tensors["mask_hidden"] = r.rng.standard_normal((1, 1, 3 * N)).astype(np.float32)
    r.matrix("embed_tokens.weight", VOCAB, N, N**0.5)
    return config | {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "embed_requires_grad": True, name: MASK}


def vllm_peagle(r, **more):
    """As of vLLM's parallel drafting, without the speculators library."""
    config = eagle3(r, parallel_drafting=True, ptd_token_id=MASK, **more)
    r.tensors["mask_hidden"] = r.rng.standard_normal((1, 3 * N)).astype(np.float32)
    return config


def speculators_eagle3(r, qk_norms=True, layers=1, **more):
    r.layer("layers.0.", 2 * N, qk_norms=qk_norms)
    for i in range(1, layers):
        r.layer(f"layers.{i}.", qk_norms=qk_norms)
    r.norms(**{"layers.0.hidden_norm": N, "norm": N})
    r.matrix("fc.weight", N, 3 * N)
    if more.get("norm_before_fc"):
        r.norms(input_norm=3 * N)
    if more.get("fc_norm"):
        r.norms(**{f"fc_norm.{k}": N for k in range(3)})
    return speculators(r, "Eagle3", layers, eagle_aux_hidden_state_layer_ids=[1, 3, 5], embed_requires_grad=False, **more)
