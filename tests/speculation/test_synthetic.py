"""AcceptanceTracker at will: the shares that were asked for come out, and impossible ones are refused."""

import pytest

from pyggml_spec.errors import PyspecError
from pyggml_spec.speculation.synthetic import SyntheticAcceptance

BLOCKS = 20000


def test_each_position_is_accepted_in_its_share_of_the_blocks():
    """5 standard deviations of 20,000 draws are 0.018: one seed in a million fails."""
    rates = (0.85, 0.7, 0.55, 0.45)
    synthetic = SyntheticAcceptance.of_rates(rates, seed=3)
    drawn = [synthetic.draw(7) for _ in range(BLOCKS)]
    for i, rate in enumerate(rates):
        assert abs(sum(n > i for n in drawn) / BLOCKS - rate) < 0.018
    assert max(drawn) == len(rates)  # nothing is said of later ones
    assert max(synthetic.draw(2) for _ in range(100)) == 2


@pytest.mark.parametrize("rates", [(), (1.2,), (0.5, 0.6), (0.5, -0.1)])
def test_impossible_rates_are_refused(rates):
    with pytest.raises(PyspecError, match="acceptance rates"):
        SyntheticAcceptance.of_rates(rates)


def test_a_length_is_the_mean_of_a_full_block():
    synthetic = SyntheticAcceptance(6.0, 15, seed=1)
    mean = sum(1 + synthetic.draw(15) for _ in range(BLOCKS)) / BLOCKS
    assert abs(mean - 6.0) < 0.2
