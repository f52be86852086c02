"""Graph keys: equal values are one object, and families ignore what a step decides last."""

from pyggml_spec.cache.slots import SlotRange
from pyggml_spec.engine.batch import Batch, Draft, GraphKey, Prefill, Verify

SLOTS = SlotRange(0, 2)


def test_equal_values_are_one_object_with_one_hash():
    key = GraphKey.of("fused", 4, 256, SLOTS, "draft-dflash", drafting=True)
    assert key is GraphKey.of("fused", 4, 256, SLOTS, "draft-dflash", drafting=True)
    made = GraphKey("fused", 4, 256, SLOTS, "draft-dflash", drafting=True)
    assert made == key and hash(made) == hash(key) and len({made, key}) == 1
    assert key.at(512) == GraphKey("fused", 4, 512, SLOTS, "draft-dflash", drafting=True) != key


def test_every_field_distinguishes_graphs():
    key = GraphKey.of("verify", 4, 256, SLOTS)
    others = {
        "kind": "fused", "verify_len": 8, "kv_bucket": 512, "slots": SlotRange(0, 1), "method": "mtp", "n_drafts": 2, "streamed": True,
        "deferred": True, "layers": (1,), "next_len": 2, "replay": True, "drafting": True, "candidates": None, "masked": True,
    }  # fmt: skip
    values = {name: getattr(key, name) for name in others}
    assert len({key, *(GraphKey.of(**(values | {name: other})) for name, other in others.items())}) == 1 + len(others)


def test_families_ignore_bucket_slots_and_sampling():
    key = GraphKey.of("verify", 4, 256, SLOTS, deferred=True, drafting=True, candidates=64, masked=True)
    assert key.family is GraphKey.of("verify", 4, 1024, SlotRange(0, 1), deferred=True).family
    assert key.family is not GraphKey.of("verify", 4, 256, SLOTS).family


def test_a_batch_knows_its_graph():
    batch = Batch({0: Draft(4), 1: Verify([5])}, kind="fused", verify_len=4, kv_bucket=256, slots=SLOTS, method="mtp", drafting=True)
    key = batch.make_key()
    assert key is batch.key and key.drafts == 3 and key.total == 8
    batch.computed, batch.rows = {0: Prefill([1, 2, 3]), 1: Verify()}, {0: 3, 1: 1}
    assert not batch.is_block
    batch.computed, batch.rows = {0: Prefill([1, 2, 3]), 1: Verify([4])}, {0: 3, 1: 2}
    assert batch.is_block
