#!/usr/bin/env python3
"""An oracle without ggml: random tiny models of transformers, converted by llama.cpp's converter, run by pyspec.

    crosscheck_transformers.py --llama-cpp DIR [--only gemma4,...]        (needs the extra `crosscheck`: torch and transformers)

DIR: a llama.cpp source tree of the pinned version (llama-cpp-python's sdist has it in vendor/llama.cpp). Every parameter is random. Prints the NMSE of all
logits and of the worst layer's input, and the agreement of argmax; exit code 3 if an argmax differs with a margin above 1e-3, or an NMSE is above
1e-5 (K/V rows are F16 here and F32 there).
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

TOKENS, VOCAB, GAP, TOLERANCE = 96, 320, 1e-3, 1e-5
SUPPRESSED = [7, 9]
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
HYBRID = {
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]},
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = {
    **SLIDING, "global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "tie_word_embeddings": True,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 32, "final_logit_softcapping": 30.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 1.0, "beta_fast": 32.0,
        "partial_rotary_factor": 0.5}  # fmt: skip
MLA = {
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 96, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 128, "n_shared_experts": 2, "first_k_dense_replace": 1, "scoring_func": "sigmoid",
    "num_mtp_layers": 0, "head_dim": 32,
}  # fmt: skip
INDEXER = {"index_topk": 32, "index_head_dim": 64, "index_n_heads": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def laguna(**yarn) -> dict:
    return EXPERTS | {
        "sliding_window": 24, "layer_types": ["full_attention", *["sliding_attention"] * 3], "gating": "per-head",
        "num_attention_heads_per_layer": [4, 8, 8, 8], "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": YARN | yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    }  # fmt: skip


MODELS = {  # name: (configuration, model, what differs from COMMON)
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {"norm_topk_prob": True}),
    "qwen3next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS | HYBRID | {"norm_topk_prob": True}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", SLIDING | {
        "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": {k: v for k, v in YARN.items() if k != "partial_rotary_factor"},
    }),
    "minimax-m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 32, "scoring_func": "sigmoid",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }),
    "deepseek2": ("DeepseekV3Config", "DeepseekV3ForCausalLM", MLA | {
        "n_group": 4, "topk_group": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "deepseek2 yarn": ("DeepseekV3Config", "DeepseekV3ForCausalLM", MLA | {
        "n_group": 1, "topk_group": 1,
        "rope_parameters": {k: v for k, v in YARN.items() if k != "partial_rotary_factor"} | {"mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "glm-dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", MLA | INDEXER),
    "glm-dsa shared": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", MLA | INDEXER | {"indexer_types": ["full", "shared"] * 2}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "qwen35": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HYBRID),
    "qwen35moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", HYBRID | EXPERTS),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA | {"num_kv_shared_layers": 2}),
    "gemma4 routed": ("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA | {
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 128,
    }),
    "gemma4 unified": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM", {k: v for k, v in GEMMA.items() if "per_layer" not in k}),
    "laguna": ("LagunaConfig", "LagunaForCausalLM", laguna()),
    "laguna factor 1": ("LagunaConfig", "LagunaForCausalLM", laguna(attention_factor=1.0)),
}  # fmt: skip


def make(name: str, folder: Path):
    """Saves a random model; returns its token ids, F32 logits [TOKENS, VOCAB] and the inputs of its layers [layers, TOKENS, n_embd]."""
    import torch
    import transformers

    config_name, model_name, more = MODELS[name]
    config = getattr(transformers, config_name)(**COMMON | more)
    torch.manual_seed(7)
    model = getattr(transformers, model_name)._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, value in [
            *model.named_parameters(),
            *((k, b) for k, b in model.named_buffers() if k.endswith(("layer_scalar", "e_score_correction_bias"))),
        ]:
            if value.ndim == 1:  # norms, of which some store the weight less 1; gates, biases, decays
                most = 0.2 if "correction" in key else 0.4  # larger values give ties between experts of minimax-m2
                value.add_(torch.empty_like(value).uniform_(-most, most))
            elif "embed" in key:
                value.normal_()
            else:
                value.normal_(std=value.shape[-1] ** -0.5)
        ids = torch.randint(0, 256, (1, TOKENS))
        out = model(ids, output_hidden_states=True)
    model.save_pretrained(folder)
    if name == "gemma4 unified":  # the text part is published as part of this, with tokens that must not be generated
        config_file = Path(folder) / "config.json"
        more = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "moe_intermediate_size": None}  # the converter looks for it
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | more))
        (Path(folder) / "generation_config.json").write_text(json.dumps({"suppress_tokens": SUPPRESSED}))
    inputs = torch.cat(out.hidden_states[: config.num_hidden_layers])  # what follows them has passed the last norm
    return ids[0].tolist(), out.logits[0].float().numpy(), inputs.float().numpy()


def convert(tree: Path, folder: Path, out: Path) -> None:
    """llama.cpp's converter with the vocabulary of the test models: these checkpoints have no tokenizer."""
    sys.path[:0] = [str(tree / "gguf-py"), str(tree)]
    import convert_hf_to_gguf
    from conversion import get_model_class
    from random_gguf.model import Writer

    model = get_model_class(json.loads((folder / "config.json").read_text())["architectures"][0])
    model.set_vocab = lambda self: Writer.tokenizer(SimpleNamespace(out=self.gguf_writer), VOCAB)
    vocabulary = {
        "model": {"vocab": {str(i): i for i in range(VOCAB)}},
        "added_tokens": [],
    }  # gemma4's counts the rows of the embedding by it
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    # llama.cpp ignores the key that the converter writes for attention_factor; the one that it reads multiplies what yarn's factor gives
    stretch = 1 + 0.1 * math.log(YARN["factor"])
    writer = convert_hf_to_gguf.gguf.GGUFWriter
    writer.add_rope_scaling_yarn_attn_factor = lambda self, value: self.add_rope_scaling_attn_factors(value / stretch)
    without_mtp = ["--no-mtp"] if model.supports_mtp_export else []
    sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outfile", str(out), "--outtype", "f32", *without_mtp]
    convert_hf_to_gguf.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    parser.add_argument("--only", help="some of: " + ", ".join(MODELS))
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)  # in a process of its own: it has its own gguf package
    args = parser.parse_args()
    if args.convert:
        return convert(args.llama_cpp, *args.convert)

    import torch
    import transformers

    import pyggml_spec as ps  # before torch: ggml has to be mapped first
    from pyggml_spec.tools.compare import nmse

    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {TOKENS} tokens")
    torch.set_num_threads(1)
    failed = False
    for name in args.only.split(",") if args.only else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            ids, theirs, inputs = make(name, Path(folder))
            command = [sys.executable, __file__, "--llama-cpp", str(args.llama_cpp), "--convert", folder, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: llama.cpp's converter failed:\n{done.stderr[-2000:]}")
            with ps.load(path, device="CPU", threads=1, n_ctx=512) as session:
                ours = session.runner.logits(ids)
                session.runner.reset()
                _, features = session.runner.capture(ids, range(len(inputs)))
                suppressed = session.target.file.metadata.get("tokenizer.ggml.suppress_tokens")
                assert name != "gemma4 unified" or list(suppressed) == SUPPRESSED
        top = theirs.copy()
        top.sort(axis=1)
        clear = top[:, -1] - top[:, -2] > GAP
        agree = (ours.argmax(axis=1) == theirs.argmax(axis=1))[clear].mean()
        error, inputs_error = nmse(ours, theirs), max(map(nmse, features, inputs))
        failed |= bool(agree < 1 or max(error, inputs_error) > TOLERANCE)
        print(
            f"{name:<16} NMSE of logits {error:.1e}, of layer inputs at most {inputs_error:.1e}, argmax agrees on {100 * agree:.1f} % of {clear.sum()} rows with a gap above {GAP}",
            flush=True,
        )
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
