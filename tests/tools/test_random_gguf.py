"""Random models that mix types have them where llama-quantize puts them: benchmarks of mixed files measure what people run."""

import gguf
from random_gguf.model import MIXES, Shape, write_qwen35


def test_q4_k_m_gives_more_bits_to_the_head_to_qkv_and_to_some_layers(tmp_path):
    path = write_qwen35(tmp_path / "mixed.gguf", Shape(n_layer=8), "Q4_K_M")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds["output.weight"] == "Q6_K" and kinds["token_embd.weight"] == "Q4_K"
    assert kinds["blk.0.attn_qkv.weight"] == "Q5_K" and kinds["blk.3.attn_q.weight"] == "Q4_K"
    down = [kinds[f"blk.{i}.ffn_down.weight"] for i in range(8)]
    assert down == ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]  # the first and last eighth, and every third between
    assert kinds["blk.3.attn_v.weight"] == "Q6_K" and kinds["blk.3.attn_k.weight"] == "Q4_K"


def test_of_a_tensor_outside_layers_the_name_decides():
    assert MIXES["Q5_K_M"].of("token_embd.weight", 32) == "q5_K" and MIXES["Q5_K_M"].of("output.weight", 32) == "q6_K"
