"""Random models from descriptions alone, and the comparison that finds the first wrong node of one."""

from dataclasses import replace

import pytest
from click.testing import CliRunner
from random_gguf.described import write_described
from random_gguf.model import Shape

from pyggml_spec.cli.compare import command
from pyggml_spec.models import decoder
from pyggml_spec.models.archs import qwen2
from pyggml_spec.models.registry import TARGETS
from pyggml_spec.tools.compare import compare_nodes

LEAN = Shape(n_ff=128)


def test_every_part_of_a_right_description_agrees(tmp_path):
    nodes = compare_nodes(write_described("qwen2", tmp_path / "t.gguf", LEAN), 9, threads=1)
    assert {node.nmse for node in nodes} == {0.0} and len(nodes) >= 8 * LEAN.n_layer


@pytest.mark.parametrize("wrong, first", [({"rope": "pairs"}, "Qcur-0"), ({"eps": 1e-2}, "attn_norm-0"), ({"ffn": "gelu"}, "ffn_out-0")])
def test_the_first_wrong_node_is_named(tmp_path, monkeypatch, wrong, first):
    path = write_described("qwen2", tmp_path / "t.gguf", LEAN)

    def mistaken(f):
        model = qwen2.qwen2(f)
        model.eps = wrong.get("eps", model.eps)
        layer = model.layers[0]
        if "rope" in wrong:
            layer = replace(layer, mixer=replace(layer.mixer, rope=replace(layer.mixer.rope, neox=False)))
        if "ffn" in wrong:
            layer = replace(layer, ffn=replace(layer.ffn, act=wrong["ffn"]))
        model.layers = (layer,) * len(model.layers)
        return model

    monkeypatch.setitem(TARGETS, "qwen2", decoder.described(mistaken, "qwen2"))
    shown = CliRunner().invoke(command, ["--nodes", str(path), "--tokens", "9", "-t", "1"])
    assert f"first difference: {first} (" in shown.output and shown.exit_code == 3
