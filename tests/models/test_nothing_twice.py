"""No graph multiplies the same rows with the same matrix twice: sums that became part of a product did, where the product was read by others, too."""

import argparse
from collections import Counter

import check_replay
import pytest

import pyggml_spec as ps
from pyggml_spec.errors import EngineError
from pyggml_spec.ggml.kernels import levels
from pyggml_spec.ggml.library import ffi, lib, text


def products(graph):
    """What each product reads: its weights, and what is rounded already or what it rounds itself."""
    for i in range(graph.n_nodes):
        node = lib.ggml_graph_node(graph.gf, i)
        if text(lib.ggml_op_desc(node)) == "CUSTOM" and text(lib.ggml_get_name(node)) in ("native product", "native gated product"):
            weights, rounded, *own = node.src[0:5]
            yield weights, *((rounded,) if rounded != ffi.NULL else own)


@pytest.mark.slow
@pytest.mark.skipif(not levels(), reason="native kernels do not run on this processor")
def test_every_architecture_and_drafter(tmp_path):
    looked = 0
    for name, target, drafter, spec in check_replay.pairs(argparse.Namespace(model=None, only=", Q8_0"), tmp_path):
        try:
            session = ps.load(
                target,
                drafter,
                device="CPU",
                threads=1,
                n_ctx=512,
                draft_width=16 if drafter or spec else None,
                spec=spec,
                kernels="native",
            )
        except EngineError:  # an architecture without hidden states for this drafter
            continue
        with session:
            for kind, width in (("plain", 1), ("verify", 4), *((("fused", 4),) if session.drafter is not None else ())):
                twice = [what for what, count in Counter(products(session.engine.step_graph(kind, width))).items() if count > 1]
                assert not twice, (name, kind)
                looked += 1
    assert looked > 50
