"""GGUF files of the demo pair: written from the PyTorch weights, Q8_0 matrices, everything small in F32."""

import json

import gguf
import numpy as np

from .corpus import END, MASK


def _tokenizer(writer, path):
    """Write the byte-level BPE at path (a tokenizer.json) into the metadata."""
    spec = json.loads(path.read_text())
    vocab = dict(spec["model"]["vocab"])
    special = {t["content"]: t["id"] for t in spec["added_tokens"]}
    vocab.update(special)
    tokens = [t for t, _ in sorted(vocab.items(), key=lambda kv: kv[1])]
    assert sorted(vocab.values()) == list(range(len(tokens)))
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL) for t in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocab[END])
    writer.add_pad_token_id(vocab[END])
    writer.add_mask_token_id(vocab[MASK])
    writer.add_add_bos_token(False)


def _tensor(writer, name, array, exact=False):
    """Add array [out, in] as Q8_0, or as F32 where exact is set or it is no matrix."""
    array = np.ascontiguousarray(array, dtype=np.float32)
    if exact or array.ndim < 2:
        writer.add_tensor(name, array)
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _common(writer, c, name, context, licence):
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_license(licence)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q8_0))
    writer.add_context_length(context)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.n_ff)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_kv)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_rope_freq_base(c.rope_base)


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_target(path, c, weights, tokenizer, licence):
    """Write the target: c a TargetConfig, weights its state dict as numpy arrays, tokenizer a path to tokenizer.json."""
    w = gguf.GGUFWriter(path, "qwen35")
    _common(w, c, "pyggml-spec demo target", c.context, licence)
    w.add_vocab_size(c.vocab)
    w.add_rope_dimension_count(c.n_rot)
    # Text positions are equal in every section, so the split is free; the sum must be n_rot / 2.
    third = c.n_rot // 6
    w.add_rope_dimension_sections([c.n_rot // 2 - 2 * third, third, third, 0])
    w.add_ssm_conv_kernel(c.conv)
    w.add_ssm_inner_size(c.v_heads * c.state)
    w.add_ssm_state_size(c.state)
    w.add_ssm_time_step_rank(c.v_heads)
    w.add_ssm_group_count(c.k_heads)
    w.add_uint32("qwen35.full_attention_interval", c.interval)
    _tokenizer(w, tokenizer)
    for name, array in weights.items():
        if not name.startswith("blk."):
            _tensor(w, name + ".weight", array)
            continue
        name = name.replace(".mixer.", ".")
        if name.endswith("a_log"):
            _tensor(w, name.replace("a_log", "ssm_a"), -np.exp(array.astype(np.float32)), True)
        elif name.endswith("ssm_dt"):
            _tensor(w, name + ".bias", array, True)
        else:
            small = any(s in name for s in ("ssm_conv1d", "ssm_alpha", "ssm_beta"))
            _tensor(w, name if name.endswith(".weight") else name + ".weight", array, small)
    _finish(w)


def write_drafter(path, c, weights, tokenizer, context, licence):
    """Write the drafter: c a DrafterConfig; embedding and head are left out, a loader borrows the target's."""
    w = gguf.GGUFWriter(path, "dflash")
    _common(w, c, "pyggml-spec demo drafter", context, licence)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_dimension_sections([c.head_dim // 2, 0, 0, 0])
    w.add_causal_attention(False)
    w.add_uint32("dflash.block_size", c.block)
    w.add_array("dflash.target_layers", [int(v) for v in c.target_layers])
    _tokenizer(w, tokenizer)
    for name, array in weights.items():
        name = name.replace("enc_output_norm", "enc.output_norm")
        _tensor(w, name if name.endswith(".weight") else name + ".weight", array)
    _finish(w)


def read_weights(path):
    """Read an exported file back: {state dict name: float32 array}, dequantised."""
    reader, out = gguf.GGUFReader(path), {}
    target = reader.fields["general.architecture"].contents() == "qwen35"
    for t in reader.tensors:
        array = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).copy()
        name = t.name.replace("enc.output_norm", "enc_output_norm")
        if name.endswith(".ssm_a"):
            name, array = name.replace("ssm_a", "a_log"), np.log(-array)
        name = name.removesuffix(".bias")
        if array.ndim == 1 or name == "token_embd.weight" or "ssm_conv1d" in name:
            name = name.removesuffix(".weight")
        if target and name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            if rest.split(".")[0] not in ("attn_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down"):
                name = f"blk.{layer}.mixer.{rest}"
        out[name] = array
    return out
