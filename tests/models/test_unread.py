"""No tensor of a file goes unread without a reason, whatever the architecture."""

import numpy as np
import pytest
from architectures import TARGETS
from click.testing import CliRunner
from gguf_io.build import Model as Parts
from models.dress import opened, with_tensor
from random_gguf.model import Shape, write_dflash

from pyggml_spec.cli.inspect import command
from pyggml_spec.errors import ModelError
from pyggml_spec.gguf_io import GGUFFile
from pyggml_spec.models.decoder import Decoder
from pyggml_spec.models.registry import TARGETS as CLASSES
from pyggml_spec.models.registry import open_target
from pyggml_spec.tools.inspect import inspect_file

LAYERS = Shape().n_layer
ALL = {**TARGETS, "dflash": write_dflash}
UNKNOWN = (
    "unheard.weight",
    "blk.0.attn_q.unheard",
    f"blk.{LAYERS - 1}.unheard.weight",
    f"blk.{LAYERS}.attn_q.weight",
    "blk.x.attn_q.weight",
)


def test_every_architecture_is_covered():
    assert CLASSES.keys() == TARGETS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("arch", ALL)
def test_an_unknown_tensor_is_refused_by_name(tmp_path, arch, name):
    """qwen35 ran such files, with text that looks right: it alone did not ask for the check."""
    path = with_tensor(Parts(ALL[arch](tmp_path / "t.gguf")), name, np.ones(4)).write(tmp_path / "u.gguf")
    with GGUFFile(path) as file, pytest.raises(ModelError, match=f"tensor '{name}'"):
        opened(file).specs()
    assert not inspect_file(path).usable and name in inspect_file(path).verdict


def test_an_architecture_cannot_leave_the_rule_out():
    with pytest.raises(TypeError, match="refuses unknown tensors"):

        class Lax(Decoder):
            def specs(self):
                return self.tensors()


def test_what_is_left_aside_has_a_reason(tmp_path):
    """The MTP layers of a qwen35 file; the layers after them are as unknown as any."""
    parts = Parts(TARGETS["qwen35"](tmp_path / "t.gguf"))
    parts.keys |= {"qwen35.block_count": (4, LAYERS + 1), "qwen35.nextn_predict_layers": (4, 1)}
    path = with_tensor(parts, f"blk.{LAYERS}.nextn.eh_proj.weight", np.ones(4)).write(tmp_path / "m.gguf")
    with GGUFFile(path) as file:
        model = open_target(file)
        assert model.unused_in_file() == {f"blk.{LAYERS}.nextn.eh_proj.weight": "the model's own MTP layers"} and model.specs()
    shown = CliRunner().invoke(command, [str(path), "--no-tensors"]).output
    assert "not used: 1 tensor, the model's own MTP layers\n" in shown
    path = with_tensor(parts, f"blk.{LAYERS + 1}.nextn.eh_proj.weight", np.ones(4)).write(tmp_path / "n.gguf")
    with GGUFFile(path) as file, pytest.raises(ModelError, match=rf"blk\.{LAYERS + 1}\.nextn"):
        open_target(file).specs()
