"""The script that compares our conversion with llama.cpp's says what differs, to the bit."""

from compare_convert import differences
from gguf_io.build import Model
from tools.checkpoint import export

from pyggml_spec.loading import DEMO_DRAFTER, DEMO_TARGET
from pyggml_spec.tools.convert import convert_drafter


def test_one_bit_a_key_and_a_missing_tensor_are_named(tmp_path):
    ours, theirs = tmp_path / "a.gguf", tmp_path / "b.gguf"
    convert_drafter(export(DEMO_DRAFTER, tmp_path / "checkpoint"), DEMO_TARGET, ours, "f32")
    assert differences(ours, ours, True) == ([], [], 25)
    model = Model(ours)
    data = bytearray(model.tensors["fc.weight"][2])
    data[0] ^= 1
    model.tensors["fc.weight"][2] = bytes(data)
    model.tensors["other.weight"] = model.tensors.pop("output_norm.weight")
    model.keys["dflash.block_size"] = (model.keys["dflash.block_size"][0], 8)
    model.keys["general.name"] = (model.keys["general.name"][0], "x")
    del model.keys["dflash.attention.causal"]
    model.write(theirs)
    wrong, named, equal = differences(ours, theirs, True)
    assert equal == 23 and [line.split(":")[0] for line in wrong] == [
        "tensor fc.weight", "tensor other.weight", "tensor output_norm.weight", "key dflash.block_size",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in named] == ["key dflash.attention.causal", "key general.name"]
