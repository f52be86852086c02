"""K/V rows: zero at creation, one row per position, and rows that do not count go where no query looks."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from random_gguf.model import Shape, write_dflash, write_qwen35
from sessions import fails_with

import pyggml_spec as ps
from pyggml_spec.cache import kv
from pyggml_spec.cache.kv import KVCache, KVTypes, bucket_for, buckets_up_to, check_types, draft_types, hadamard, least_bucket, padded
from pyggml_spec.cache.prefix import layout_of
from pyggml_spec.cache.slots import Cursor
from pyggml_spec.errors import ContextError, DeviceError, EngineError, ModelError, PyspecError
from pyggml_spec.ggml import device as devices
from pyggml_spec.ggml.device import Backend, Device, pick_device
from pyggml_spec.ggml.library import ffi, lib, versions
from pyggml_spec.models.base import KVShape
from pyggml_spec.tools.plan import plan

TRASH = 16


@pytest.fixture(scope="module")
def backend():
    backend = Backend(pick_device("CPU"), 1)
    yield backend
    backend.close()
    backend.close()  # twice is fine


@pytest.fixture
def cache(backend):
    cache = KVCache(backend, [KVShape(2, 64), KVShape(1, 32)], 300, TRASH)
    yield cache
    cache.close()
    cache.close()


def content(tensor, dtype) -> np.ndarray:
    out = np.empty(lib.ggml_nbytes(tensor) // np.dtype(dtype).itemsize, dtype)
    lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), 0, out.nbytes)
    return out


def rows(cache, first, count, real) -> list[int]:
    out = np.empty(count, np.int64)
    cache.rows_for(first, count, real, out)
    return out.tolist()


@pytest.mark.parametrize("fine", [False, True])
def test_all_in_front_of_the_unsettled_rows_was_there_before_the_chunk(fine):
    """Masks of prompts have columns for these alone: a row would see what comes behind it."""
    for live in (256, 1280, 40960, 132096):
        cache = SimpleNamespace(live=live, fine=fine, _least=kv.GPU_KV_BUCKET)
        for rows, n in product((1, 8, 512, 2048), (*range(1, 3000), *range(3000, live, 61), *range(live - 300, live + 2048))):
            if rows <= n < live + rows:  # a last chunk's padding goes beyond the rows
                bucket = KVCache.bucket(cache, n, kv.KV_BUCKET)
                columns = KVCache.unsettled(cache, bucket, rows)
                assert columns % 256 == 0 and bucket - columns <= n - rows and columns < rows + max(512, bucket / (17 if fine else 4) + 257)


def test_spans_pairs_and_types_at_their_limits(tmp_path):
    live = padded(33_000)
    listed = buckets_up_to(live)
    assert listed == sorted(set(listed)) and listed[-1] == live and len(listed) <= 25
    for n in range(1, live, 97):
        span = min(bucket_for(n), live)
        assert span in listed and n <= span <= max(n + kv.KV_BUCKET, 1.25 * n) and span % kv.KV_BUCKET == 0
        assert min(bucket_for(n, kv.GPU_KV_BUCKET), live) in listed  # whose memory has been measured
    fine = buckets_up_to(padded(140_000), True)
    for n in range(1, fine[-1], 97):
        span = min(bucket_for(n, kv.GPU_KV_BUCKET, True), fine[-1])
        assert span in fine and n <= span <= max(n + kv.GPU_KV_BUCKET, 1.06 * n)  # behind a power of two it was 1.25
    assert [len({bucket_for(n, least) for n in range(1, 4097)}) for least in (kv.GPU_KV_BUCKET, kv.KV_BUCKET)] == [4, 12]
    fails_with(PyspecError, "'q4_K'.*use one of f16, bf16, q8_0", KVTypes, "q4_K")
    fails_with(PyspecError, "'Q8_0'", ps.load, device="CPU", cache_type_v="Q8_0")
    target, draft = write_qwen35(tmp_path / "t.gguf", Shape()), write_dflash(tmp_path / "d.gguf", Shape(draft_head_size=80))
    with pytest.raises(ModelError, match="the drafter's heads of 80"):
        ps.load(target, draft, device="CPU", threads=1, n_ctx=256, draft_cache_type_k="q8_0")
    with ps.load(target, draft, device="CPU", threads=1, n_ctx=256, cache_type_k="q8_0", cache_type_v="q4_0") as session:
        assert session.configuration().kv_type == "K q8_0 V q4_0, drafter f16"
    # Masks are computed in F32 from 0.5 - position; from 2^23 on the half is lost, and tokens did not see themselves.
    last = np.float32(kv.MOST_CONTEXT - 1)
    assert last + (np.float32(0.5) - last) > 0 > last + np.float32(0.5 - kv.MOST_CONTEXT)


@pytest.mark.parametrize("row_kib, least", [(20, 1024), (64, 1024), (65, 512), (160, 512), (256, 512), (257, 256), (880, 256)])
def test_wide_rows_are_hidden_in_smaller_numbers(row_kib, least):
    """A row of gemma4-31B's K/V is 880 KiB: 768 hidden ones would be 0.7 GB per step."""
    assert least_bucket(row_kib << 10) == least


@pytest.mark.parametrize("n, rounded", [(1, kv.KV_BUCKET), (kv.KV_BUCKET, kv.KV_BUCKET), (kv.KV_BUCKET + 1, 2 * kv.KV_BUCKET), (300, 512)])
def test_contexts_are_rounded_up_to_whole_spans(n, rounded):
    assert padded(n) == rounded


def test_shapes_and_creation(cache):
    assert [(k.ne[0], k.ne[1], v.ne[0], v.ne[1]) for k, v, *_ in cache.layers] == [(128, 528, 128, 528), (32, 528, 32, 528)]
    assert cache.nbytes >= 2 * 2 * 528 * (128 + 32)
    # 0 * NaN is NaN: a masked row of whatever was in memory before would poison every attention.
    assert all(not content(t, np.uint8).any() for layer in cache.layers for t in (layer.k, layer.v))
    cache.fill(0xFF)
    assert (content(cache.layers[1].k, np.uint8) == 0xFF).all()
    assert (content(cache.mask_base, np.float32) == 0.5 - np.arange(528)).all()


@pytest.mark.parametrize("first, count, real, live", [(100, 5, 5, 5), (100, 10, 4, 4), (508, 10, 10, 4), (0, 128, 3, 3)])
def test_rows_are_written_at_their_positions_and_others_to_trash_rows(cache, first, count, real, live):
    written = rows(cache, first, count, real)
    assert written[:live] == [*range(first, first + live)] and all(512 <= row < 528 for row in written[live:])
    assert len(set(written)) == min(count, live + TRASH)


def test_caches_without_attention_and_the_newest_rows_of_rings(backend):
    cache = KVCache(backend, [], 16, TRASH)
    assert cache.layers == () and (content(cache.mask_base, np.float32) == 0.5 - np.arange(kv.KV_BUCKET + TRASH)).all()
    cache.close()
    cache = KVCache(backend, [KVShape(1, 32, sliding=True)], 4 * kv.KV_BUCKET, TRASH, window=100, widest=16)
    try:
        assert 0 < cache.ring < cache.live
        for n in (
            1,
            2,
            99,
            cache.ring - 1,
            cache.ring,
            cache.ring + 1,
            2 * cache.ring,
            2 * cache.ring + 7,
        ):
            near = np.empty(cache.ring, np.float32)
            cache.positions_of_ring(n, near)
            held = {p % cache.ring: p for p in range(n)}  # of each row the last position that was written into it
            wanted = [0.5 - held[row] if row in held else kv.NOWHERE for row in range(cache.ring)]
            np.testing.assert_array_equal(near, np.array(wanted, np.float32))
            assert near[(n - 1) % cache.ring] == 0.5 - (n - 1)
    finally:
        cache.close()


@pytest.mark.parametrize("name, nbytes", [("f16", 128), ("bf16", 128), ("q8_0", 68), ("q5_1", 48), ("q4_0", 36)])
def test_bytes_of_a_row(name, nbytes):
    assert KVTypes(name, name).row_bytes(KVShape(1, 64)) == 2 * nbytes
    assert KVTypes(name, "f16").row_bytes(KVShape(2, 64)) == 2 * nbytes + 256
    assert KVTypes(name, name).row_bytes(KVShape(1, 64, latent=32)) == nbytes
    assert KVTypes(name, name).row_bytes(KVShape(1, 64, latent=32, index=128, index_heads=3)) == 3 * nbytes


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


def test_rotations_and_heads_of_quantised_rows(backend):
    cache = KVCache(backend, [KVShape(2, 64)], 256, TRASH, types=KVTypes("q8_0", "q4_0"))
    cache.fill(0xFF)
    layer = cache.layers[0]
    assert (content(layer.rotation_k, np.float32).reshape(64, 64) == hadamard(64)).all() and (content(layer.v, np.uint8) == 0xFF).all()
    cache.close()
    with pytest.raises(ModelError, match="the target's heads of 80 values.*blocks of 32.*q8_0.*`cache_type_v` f16"):
        check_types(KVTypes("f16", "q8_0"), [KVShape(2, 80)], backend, draft=False)
    with pytest.raises(ModelError, match="the drafter's.*`draft_cache_type_k`"):
        check_types(KVTypes("q4_0", "f16"), [KVShape(2, 64), KVShape(2, 48)], backend, draft=True)
    check_types(KVTypes("bf16", "f16"), [KVShape(2, 80)], backend, draft=False)


READ = KVShape(2, 128, queries=3)


@pytest.mark.parametrize("shapes, read", [
    ([READ], True), ([READ, KVShape(1, 256, queries=8, sliding=True)], True), ([], False), ([READ, KVShape(2, 64, queries=4)], False),
    ([KVShape(4, 128, queries=2)], False), ([KVShape(2, 80, queries=4)], False), ([KVShape(2, 128, queries=4, other_v=64)], False),
    ([KVShape(2, 128)], False), ([KVShape(1, 256, latent=256)], False),
])  # fmt: skip
def test_drafters_rows_are_q8_0_where_the_device_reads_them_as_they_lie(backend, monkeypatch, shapes, read):
    assert draft_types(shapes, backend) == KVTypes()
    monkeypatch.setattr(kv, "reads_quantised", lambda device: True)
    assert draft_types(shapes, backend) == (KVTypes("q8_0", "q8_0", rotated=False) if read else KVTypes())


@pytest.mark.parametrize("name, features, switches, reads", [
    ("CUDA0", {"DRAW": "1", "SMALL_BATCH": "tma"}, {}, True), ("CUDA0", {"SMALL_BATCH": "tma"}, {}, False), ("CUDA0", {"DRAW": "1"}, {}, False),
    ("CUDA0", {"DRAW": "1", "SMALL_BATCH": "tma"}, {"GGML_CUDA_QUANTIZED_KV": "0"}, False), ("CPU", {"DRAW": "1", "SMALL_BATCH": "x"}, {}, False),
    ("CUDA0", {"DRAW": "1", "SMALL_BATCH": "tma"}, {"GGML_CUDA_BATCH_INVARIANT": "1"}, False),
])  # fmt: skip
def test_which_devices_read_quantised_rows(monkeypatch, name, features, switches, reads):
    monkeypatch.setattr(devices, "device_feature", lambda device, feature: features.get(feature))
    for switch in ("GGML_CUDA_QUANTIZED_KV", "GGML_CUDA_BATCH_INVARIANT"):
        monkeypatch.delenv(switch, raising=False)
    for switch, value in switches.items():
        monkeypatch.setenv(switch, value)
    assert devices.reads_quantised(Device(name, "", "gpu", 0, 0, 0)) == reads


def test_named_types_of_a_drafter_win(tmp_path, monkeypatch):
    """Text is that of f16 rows; files of rotated and unrotated rows are not mixed."""
    monkeypatch.setattr(kv, "reads_quantised", lambda device: True)
    shape = Shape(draft_head_size=128, draft_heads=4, draft_heads_kv=1)
    pair, found = (write_qwen35(tmp_path / "t.gguf", shape), write_dflash(tmp_path / "d.gguf", shape)), {}
    for named, shown in (
        ({}, "f16, drafter q8_0 unrotated"),
        ({"k": "f16"}, "f16"),
        ({"v": "q8_0"}, "f16, drafter K f16 V q8_0"),
        ({"k": "q8_0", "v": "q8_0"}, "f16, drafter q8_0"),
    ):
        with ps.load(
            *pair, device="CPU", threads=1, n_ctx=256, **{f"draft_cache_type_{rows}": name for rows, name in named.items()}
        ) as session:
            assert session.configuration().kv_type == shown
            assert any("drafter's K/V are q8_0 unrotated" in note and "`draft_cache_type_k`" in note for note in session.notes) == (
                not named
            )
            found[shown] = session.generate(list(range(40)), 24, ignore_end=True)[0], layout_of(session.runner, versions())
    assert len({text for text, _ in found.values()}) == 1 and len({layout for _, layout in found.values()}) == 4
    assert plan(*pair, device="CPU", n_ctx=256).draft_kv_type == "q8_0 unrotated"


@pytest.mark.parametrize("name", kv.TYPES)
def test_the_cpu_runs_every_type(backend, name):
    check_types(KVTypes(name, name), [KVShape(2, 64)], backend, draft=False)


def test_devices_without_kernels(backend, monkeypatch):
    """Some backends lack attention over some types; ggml would end the process in the middle of a step."""
    monkeypatch.setattr(Backend, "supports", lambda self, node: node.type != KVTypes("q8_0").ids[0])
    with pytest.raises(DeviceError, match="CPU cannot attend over K q8_0 V f16 rows with heads of 64.*`draft_cache_type_k`"):
        check_types(KVTypes("q8_0", "f16"), [KVShape(2, 64)], backend, draft=True)
    check_types(KVTypes("bf16", "f16"), [KVShape(2, 64)], backend, draft=False)
    shape = KVShape(1, 96, latent=64, index=64, index_heads=32)
    monkeypatch.setattr(kv, "_scores", lambda types, shape, backend: types.k == "f16")
    check_types(KVTypes(), [shape], backend, draft=False)
    with pytest.raises(
        DeviceError, match="CPU cannot score iq4_nl rows of 64 values for 32 heads .*; use `cache_type_k` and `cache_type_v` f16$"
    ):
        check_types(KVTypes("iq4_nl", "iq4_nl"), [shape], backend, draft=False)


def state(cursor):
    return cursor.committed, cursor.last_token, cursor.room


def test_the_cursor_moves_within_the_context():
    cursor = Cursor(10)
    assert state(cursor) == (0, None, 10)
    cursor.advance(4, 7)
    cursor.advance(1, 8)
    assert state(cursor) == (5, 8, 5)
    cursor.reset()
    assert state(cursor) == (0, None, 10)
    cursor = Cursor(4)
    cursor.advance(4, 1)
    cursor.advance(0, 1)
    for rows in (1, -1):
        fails_with(EngineError, f"{rows}", cursor.advance, rows, 2)
        assert state(cursor) == (4, 1, 0)
    cursor = Cursor(100, 30)
    cursor.check_fits(70)
    with pytest.raises(ContextError) as caught:
        cursor.check_fits(71)
    assert all(word in str(caught.value) for word in ("71", "100", "30", "`n_ctx`"))
