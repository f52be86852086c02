"""K/V rows: zero at creation, one row per position, and rows that do not count go where no query looks."""

import numpy as np
import pytest

from pyggml_spec.cache.kv import GPU_KV_BUCKET, KV_BUCKET, NOWHERE, KVCache, bucket_for, buckets_up_to, least_bucket, padded
from pyggml_spec.ggml.device import Backend, pick_device
from pyggml_spec.ggml.library import ffi, lib
from pyggml_spec.models.base import KVShape

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


def test_a_span_holds_its_tokens_hides_at_most_a_quarter_of_them_and_is_one_of_the_listed():
    live = padded(33_000)
    listed = buckets_up_to(live)
    assert listed == sorted(set(listed)) and listed[-1] == live and len(listed) <= 25
    for n in range(1, live, 97):
        span = min(bucket_for(n), live)
        assert span in listed and n <= span <= max(n + KV_BUCKET, 1.25 * n) and span % KV_BUCKET == 0
        assert min(bucket_for(n, GPU_KV_BUCKET), live) in listed  # whose memory has been measured
    assert [len({bucket_for(n, least) for n in range(1, 4097)}) for least in (GPU_KV_BUCKET, KV_BUCKET)] == [4, 12]


@pytest.mark.parametrize("row_kib, least", [(20, 1024), (64, 1024), (65, 512), (160, 512), (256, 512), (257, 256), (880, 256)])
def test_wide_rows_are_hidden_in_smaller_numbers(row_kib, least):
    """A row of gemma4-31B's K/V is 880 KiB: 768 hidden ones would be 0.7 GB per step."""
    assert least_bucket(row_kib << 10) == least


@pytest.mark.parametrize("n, rounded", [(1, KV_BUCKET), (KV_BUCKET, KV_BUCKET), (KV_BUCKET + 1, 2 * KV_BUCKET), (300, 512)])
def test_contexts_are_rounded_up_to_whole_spans(n, rounded):
    assert padded(n) == rounded


def test_every_layer_has_its_own_shape_and_trash_rows(cache):
    assert [(k.ne[0], k.ne[1], v.ne[0], v.ne[1]) for k, v, *_ in cache.layers] == [(128, 528, 128, 528), (32, 528, 32, 528)]
    assert cache.nbytes >= 2 * 2 * 528 * (128 + 32)


def test_everything_is_zero_at_creation(cache):
    """0 * NaN is NaN: a masked row of whatever was in memory before would poison every attention."""
    assert all(not content(t, np.uint8).any() for layer in cache.layers for t in (layer.k, layer.v))


def test_filling_leaves_the_mask_constant_alone(cache):
    cache.fill(0xFF)
    assert (content(cache.layers[1].k, np.uint8) == 0xFF).all()
    assert (content(cache.mask_base, np.float32) == 0.5 - np.arange(528)).all()


@pytest.mark.parametrize("first, count, real, live", [(100, 5, 5, 5), (100, 10, 4, 4), (508, 10, 10, 4), (0, 128, 3, 3)])
def test_rows_are_written_at_their_positions_and_others_to_trash_rows(cache, first, count, real, live):
    """Padding, and rows past the end of a full context. Writes run in parallel: no two go to one row while trash rows are enough."""
    written = rows(cache, first, count, real)
    assert written[:live] == [*range(first, first + live)] and all(512 <= row < 528 for row in written[live:])
    assert len(set(written)) == min(count, live + TRASH)


def test_a_model_without_attention_layers_has_a_cache_of_nothing(backend):
    cache = KVCache(backend, [], 16, TRASH)
    assert cache.layers == () and (content(cache.mask_base, np.float32) == 0.5 - np.arange(KV_BUCKET + TRASH)).all()
    cache.close()


def test_a_ring_shows_its_newest_rows_and_hides_what_was_never_written(backend):
    """What drafters that borrow the rows look at: the newest token's row is among them, whatever its place in the ring."""
    cache = KVCache(backend, [KVShape(1, 32, sliding=True)], 4 * KV_BUCKET, TRASH, window=100, widest=16)
    try:
        assert 0 < cache.ring < cache.live
        for n in (1, 2, 99, cache.ring - 1, cache.ring, cache.ring + 1, 2 * cache.ring, 2 * cache.ring + 7):
            near = np.empty(cache.ring, np.float32)
            cache.positions_of_ring(n, near)
            held = {p % cache.ring: p for p in range(n)}  # of each row the last position that was written into it
            wanted = [0.5 - held[row] if row in held else NOWHERE for row in range(cache.ring)]
            np.testing.assert_array_equal(near, np.array(wanted, np.float32))
            assert near[(n - 1) % cache.ring] == 0.5 - (n - 1)
    finally:
        cache.close()
