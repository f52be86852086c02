"""A short run of every target, and proof that the driver notices each way in which an input can go wrong."""

import pytest
from fuzz.run import fuzz
from fuzz.targets import make

pytestmark = pytest.mark.slow
SHORT = [("gguf", 800), ("json", 800), ("prompt", 300), ("grammar", 600), ("prefix", 800), ("template", 150), ("pair", 200)]
FEW = ("layers", 6, "17")  # 1, 571, 1025 (one more than there may be), 6, 96 and 21 of them; models/test_deep.py has 1,024


@pytest.mark.parametrize("target, executions, seed", [*((target, count, "2") for target, count in SHORT), FEW])
def test_a_short_run_finds_nothing(target, executions, seed):
    result = fuzz(target, executions, seed)
    assert not result.findings, result.findings[0]
    assert result.executions == executions == sum(result.outcomes.values()) and len(result.outcomes) > 1


def test_every_pair_generates_before_it_is_changed():
    """Targets of another size than the drafters were refused, whatever was changed in them."""
    target = make("pair")
    assert {target.run(bytes([which, 1]) + data) for which, data in enumerate(target.corpus)} == {"generated"}


def test_the_driver_notices_what_goes_wrong():
    result = fuzz("selftest", 120, "1331", stalled_s=2)
    found = {number: what for number, what, _ in result.findings}
    assert sorted(found) == [67, 84, 105, 109, 111]
    assert (
        "MemoryError" in found[67] and "died" in found[84] and found[105] == "stalled" and "took" in found[109] and "KeyError" in found[111]
    )
    assert all(data == bytes([kind]) for (_, _, data), kind in zip(sorted(result.findings), (3, 1, 2, 5, 4)))
    assert result.executions == 120
