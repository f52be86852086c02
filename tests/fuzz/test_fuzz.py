"""A short run of every target, and proof that the driver notices each way in which an input can go wrong."""

import pytest
from fuzz.run import fuzz
from fuzz.targets import make

pytestmark = pytest.mark.slow
SHORT = [("gguf", 800), ("json", 800), ("prompt", 300), ("grammar", 600), ("prefix", 800), ("template", 150), ("pair", 200)]
FEW = ("layers", 4, "22268")  # 107, 1, 22 and 1025 (one more than there may be) of them; models/test_described.py has 1,024


@pytest.mark.parametrize("target, executions, seed", [*((target, count, "2") for target, count in SHORT), FEW])
def test_a_short_run_finds_nothing(target, executions, seed):
    result = fuzz(target, executions, seed)
    assert not result.findings, result.findings[0]
    assert result.executions == executions == sum(result.outcomes.values()) and len(result.outcomes) > 1


def test_every_pair_generates_before_it_is_changed():
    """Targets of another size than the drafters were refused, whatever was changed in them. Slots are left to the runs of changed ones."""
    target = make("pair")
    assert {target.run(bytes([which, 0]) + data) for which, data in enumerate(target.corpus)} == {"generated"}


def test_the_driver_notices_what_goes_wrong():
    result = fuzz("selftest", 120, "1331", stalled_s=0.5)
    found = {number: what for number, what, _ in result.findings}
    assert sorted(found) == [67, 84, 105, 109, 111]
    assert (
        "MemoryError" in found[67] and "died" in found[84] and found[105] == "stalled" and "took" in found[109] and "KeyError" in found[111]
    )
    assert all(data == bytes([kind]) for (_, _, data), kind in zip(sorted(result.findings), (3, 1, 2, 5, 4)))
    assert result.executions == 120
