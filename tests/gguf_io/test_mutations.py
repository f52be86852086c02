"""Mutated files: whatever is wrong with one, it is refused with PyspecError or it works."""

import random
from dataclasses import replace

import pytest
from fuzz.mutate import header_places, mutated
from gguf_io.batch import load_all
from gguf_io.build import ARR, BOOL, F32, F64, I32, STR, U8, U16, U32, U64, Model, aligned, gguf, info, key
from gguf_io.small import SMALL
from random_gguf.model import write_qwen35

import pyggml_spec as ps
from pyggml_spec.ggml.library import lib
from pyggml_spec.tools.inspect import inspect_file

EVERY_VALUE = gguf(
    [key(f"v{kind}", kind, (kind == STR and "text") or 1) for kind in (U8, U16, U32, I32, F32, BOOL, STR, U64, F64)]
    + [key(f"a{kind}", ARR, (kind, ["a", "bc"] if kind == STR else [1, 0, 1])) for kind in (U8, U32, F32, BOOL, STR, U64)]
    + [key("general.alignment", U32, 32)],
    [info("a", (8, 4)), info("b", (256,), 12, 128), info("c", (2, 2, 2, 2), 1, 288)],
    aligned(bytes(320)),
)


@pytest.mark.slow
def test_mutations_are_read_or_refused(small, tmp_path):
    rng, path = random.Random(1), tmp_path / "x.gguf"
    originals = [(EVERY_VALUE, [range(len(EVERY_VALUE))])] + [(p.read_bytes(), header_places(p.read_bytes())) for p in small]
    refusals = 0
    for i in range(4000):
        data, places = originals[i % 3]
        path.write_bytes(mutated(data, rng, places))
        try:
            inspect_file(path).as_dict()
        except ps.GGUFError:
            refusals += 1
        except BaseException as error:
            raise AssertionError(f"mutation {i} raised {error!r}") from error
    assert 1000 < refusals < 3900  # neither everything nor nothing was hit


@pytest.mark.slow
def test_mutated_pairs_run_or_are_refused(small, tmp_path):
    """All the way through llama.cpp's tokenizer, the weights and a few steps; an abort is a failure."""
    rng, pairs, originals = random.Random(2), [], [p.read_bytes() for p in small]
    places = [header_places(data) for data in originals]
    for i in range(300):
        which = i % 2
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(mutated(originals[which], rng, places[which]))
        pairs.append((small[0], path) if which else (path, small[1]))
    bad = {i: found for i, found in enumerate(load_all(pairs)) if found is not None and found[0] != "PyspecError"}
    assert not bad


@pytest.mark.slow
def test_every_tensor_type_is_computed_or_refused(tmp_path):
    """ggml says that it can multiply integers and activations' types, then calls a null pointer."""
    shape = replace(SMALL, n_embd=256, n_ff=256)
    valid, pairs = write_qwen35(tmp_path / "valid.gguf", shape), []
    for kind in range(lib.GGML_TYPE_COUNT):
        for name in ("token_embd.weight", "blk.0.ffn_up.weight") if lib.ggml_blck_size(kind) else ():
            model = Model(valid)
            n_in, rows = model.tensors[name][0]
            model.tensors[name] = [(n_in, rows), kind, bytes(lib.ggml_row_size(kind, n_in) * rows)]
            pairs.append((model.write(tmp_path / f"{kind}{name}.gguf"), None))
    outcomes = load_all(pairs, tokens=2)
    assert all(found[0] == "PyspecError" and "not a type for weights" in found[1] for found in outcomes if found is not None)
    assert sum(found is None for found in outcomes) > 40
