"""Types of K/V rows: what they take, what cannot hold a head, and what a device cannot run is said before anything is allocated."""

import numpy as np
import pytest
from cache.test_kv import TRASH, backend, content  # noqa: F401
from random_gguf.model import Shape, write_dflash, write_qwen35

import pyggml_spec as ps
from pyggml_spec.cache import kv_types
from pyggml_spec.cache.kv import KVCache
from pyggml_spec.cache.kv_types import MOST_CONTEXT, TYPES, KVTypes, check_types, hadamard
from pyggml_spec.errors import DeviceError, ModelError, PyspecError
from pyggml_spec.ggml.device import Backend
from pyggml_spec.models.base import KVShape


@pytest.mark.parametrize("name, nbytes", [("f16", 128), ("bf16", 128), ("q8_0", 68), ("q5_1", 48), ("q4_0", 36)])
def test_bytes_of_a_row(name, nbytes):
    assert KVTypes(name, name).row_bytes(KVShape(1, 64)) == 2 * nbytes
    assert KVTypes(name, "f16").row_bytes(KVShape(2, 64)) == 2 * nbytes + 256
    assert KVTypes(name, name).row_bytes(KVShape(1, 64, latent=32)) == nbytes
    assert KVTypes(name, name).row_bytes(KVShape(1, 64, latent=32, index=128, index_heads=3)) == 3 * nbytes


def test_a_type_that_rows_cannot_have_is_named():
    with pytest.raises(PyspecError, match="'q4_K'.*use one of f16, bf16, q8_0"):
        KVTypes("q4_K")
    with pytest.raises(PyspecError, match="'Q8_0'"):
        ps.load(device="CPU", cache_type_v="Q8_0")


@pytest.mark.parametrize(
    "size, types, rotations",
    [(64, ("q8_0", "q8_0"), (64, 64)), (256, ("q8_0", "f16"), (256, 0)), (192, ("f16", "q4_0"), (0, 64)), (96, ("q8_0", "q8_0"), (0, 0)),
     (128, ("bf16", "f16"), (0, 0))],
)  # fmt: skip
def test_what_is_rotated(size, types, rotations):
    assert KVTypes(*types).rotations(KVShape(2, size)) == rotations


@pytest.mark.parametrize("n", [1, 64, 256])
def test_the_rotation_is_its_own_inverse(n):
    assert np.allclose(hadamard(n) @ hadamard(n), np.eye(n), atol=1e-6) and hadamard(n).shape == (n, n)


def test_poisoning_rows_leaves_the_rotation_alone(backend):  # noqa: F811
    cache = KVCache(backend, [KVShape(2, 64)], 256, TRASH, types=KVTypes("q8_0", "q4_0"))
    cache.fill(0xFF)
    layer = cache.layers[0]
    assert (content(layer.rotation_k, np.float32).reshape(64, 64) == hadamard(64)).all() and (content(layer.v, np.uint8) == 0xFF).all()
    cache.close()


def test_heads_that_are_not_whole_blocks(backend):  # noqa: F811
    with pytest.raises(ModelError, match="the target's heads of 80 values.*blocks of 32.*q8_0.*`cache_type_v` f16"):
        check_types(KVTypes("f16", "q8_0"), [KVShape(2, 80)], backend, draft=False)
    with pytest.raises(ModelError, match="the drafter's.*`draft_cache_type_k`"):
        check_types(KVTypes("q4_0", "f16"), [KVShape(2, 64), KVShape(2, 48)], backend, draft=True)
    check_types(KVTypes("bf16", "f16"), [KVShape(2, 80)], backend, draft=False)


@pytest.mark.parametrize("name", TYPES)
def test_the_cpu_runs_every_type(backend, name):  # noqa: F811
    check_types(KVTypes(name, name), [KVShape(2, 64)], backend, draft=False)


def test_a_device_without_the_kernel(backend, monkeypatch):  # noqa: F811
    """Some backends lack attention over some types; ggml would end the process in the middle of a step."""
    monkeypatch.setattr(Backend, "supports", lambda self, node: node.type != KVTypes("q8_0").ids[0])
    with pytest.raises(DeviceError, match="CPU cannot attend over K q8_0 V f16 rows with heads of 64.*`draft_cache_type_k`"):
        check_types(KVTypes("q8_0", "f16"), [KVShape(2, 64)], backend, draft=True)
    check_types(KVTypes("bf16", "f16"), [KVShape(2, 64)], backend, draft=False)


def test_an_indexers_rows_of_a_type_that_a_device_cannot_score(backend, monkeypatch):  # noqa: F811
    """ggml-cuda scores no rows of IQ4_NL; f16 is the remedy where the heads are ones that it scores."""
    shape = KVShape(1, 96, latent=64, index=64, index_heads=32)
    monkeypatch.setattr(kv_types, "_scores", lambda types, shape, backend: types.k == "f16")
    check_types(KVTypes(), [shape], backend, draft=False)
    with pytest.raises(
        DeviceError, match="CPU cannot score iq4_nl rows of 64 values for 32 heads .*; use `cache_type_k` and `cache_type_v` f16$"
    ):
        check_types(KVTypes("iq4_nl", "iq4_nl"), [shape], backend, draft=False)


def test_a_pair_whose_drafter_cannot(tmp_path):
    target, draft = write_qwen35(tmp_path / "t.gguf", Shape()), write_dflash(tmp_path / "d.gguf", Shape(draft_head_size=80))
    with pytest.raises(ModelError, match="the drafter's heads of 80"):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_cache_type_k="q8_0")
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, cache_type_k="q8_0", cache_type_v="q4_0") as session:
        assert session.configuration().kv_type == "K q8_0 V q4_0, drafter f16"


def test_a_position_sees_itself_and_not_the_next_in_the_longest_context():
    """Masks are computed in F32 from 0.5 - position; from 2^23 on the half is lost, and tokens did not see themselves."""
    last = np.float32(MOST_CONTEXT - 1)
    assert last + (np.float32(0.5) - last) > 0 > last + np.float32(0.5 - MOST_CONTEXT)
