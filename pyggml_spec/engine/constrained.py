"""What a constraint has to do with a step: which drafts are worth verifying and, while the device computes, what may come behind each row.

    drafts are made -> the constraint says how many may come -> these are verified; beside that, the bits of every row -> where the greedy
    choice is forbidden, the device is asked once, for all rows and slots, for the likeliest token that is not

Most greedy choices are allowed: then nothing is asked. Where logits are in host memory, nothing is worked out that is not needed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..constraints.grammar import allows, only
from ..sampling.sampler import Sampler
from ..speculation.synthetic import SyntheticAcceptance
from .batch import BatchItem, Prefill, StepOutput
from .runner import ModelRunner


class Guide:
    """One sequence's constraint, in one step after the other.

    Attributes:
        allowed: by row of the last step, the likeliest token that may come, as far as it was asked for.
        failed: what the constraint has raised within a step, which others may share: its own sequence ends with it behind the step.
        widths: rows of blocks that no wider block is as cheap as, ascending, where that is known (4B on one H200: 16 rows 6.4 ms, 8 rows 7.4).
    """

    def __init__(self, sampler: Sampler, synthetic: SyntheticAcceptance | None = None) -> None:
        """
        Args:
            sampler: with a constraint.
        """
        assert sampler.grammar is not None
        self._sampler, self._grammar, self._synthetic = sampler, sampler.grammar, synthetic
        self._path: list[int] = []
        self._drawn = False  # whether the path is what was drawn to be accepted
        self._bits: list[np.ndarray] = []
        self.allowed: dict[int, int] = {}
        self.failed: Exception | None = None
        self.widths: Sequence[int] = ()

    @property
    def slow(self) -> bool:
        """Whether what may come behind a token takes long to work out: no drafts are verified then, behind each of which it would have to be."""
        return self._grammar.slow

    def late(self, patience: float) -> bool:
        """Whether it is not known yet what may come next, in ``patience`` seconds from now; its sequence cannot take part in a step.

        Raises:
            ConstraintError: it has taken too long.
        """
        return self._grammar.late(patience)

    def begin(self, drafts: Sequence[int] = ()) -> None:
        """A step that verifies ``drafts``, as far as they are known."""
        self._path, self._bits, self._drawn, self.allowed = list(drafts), [], False, {}

    def check(self, drafts: np.ndarray) -> int:
        """How many of a drafter's drafts are worth verifying: those that may come, one after the other, and what fills up a cheaper block."""
        if self._synthetic is not None:  # which accepts drafts that no constraint would let pass
            return len(drafts)
        try:
            self._path = drafts[: self._grammar.fits(drafts.tolist())].tolist()
        except Exception as error:
            self.failed, self._path = error, []
        passed = len(self._path)
        return min(next((width - 1 for width in self.widths if width > passed), passed), len(drafts))

    @property
    def asks(self) -> bool:
        """Whether the device can be asked for its choices before they are made: sampled ones depend on those before."""
        return self._sampler.masks_on_device

    def look_ahead(self, rows: int) -> None:
        """Works out what may come behind each of the step's ``rows`` that can be reached."""
        try:
            if self._synthetic is not None and not self._path:
                self._path, self._bits = self._grammar.some(self._synthetic.draw(rows - 1))
                self._drawn = True
            else:
                self._bits = self._grammar.ahead(self._path)
        except Exception as error:
            self.failed, self._bits = error, []

    def wanted(self, greedy: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The rows whose greedy choice is forbidden while others may come, as far as drafts can be accepted; and their bits."""
        for row, bits in enumerate(self._bits):
            choice: int | None = int(greedy[row])
            if not allows(bits, int(greedy[row])):
                choice = only(bits)
                if choice is None:
                    yield row, bits
                else:
                    self.allowed[row] = choice
            if choice is not None and not self._drawn and self._path[row : row + 1] != [choice]:
                return

    def imposed(self, drafts: Sequence[int]) -> list[int]:
        """What counts as accepted instead of ``drafts``: as many tokens as are drawn, which may come."""
        assert self._synthetic is not None
        return self._path if self._drawn else self._grammar.some(self._synthetic.draw(len(drafts)))[0]


def run_step(
    engine: ModelRunner, guides: Mapping[int, Guide], work: Mapping[int, BatchItem], meanwhile: Callable[[], object] | None = None
) -> dict[int, StepOutput]:
    """A step of the engine, and what constraints need of it. ``guides`` by slot; other arguments and errors as those of ``ModelRunner.step``."""
    asking = [
        (slot, guides[slot])
        for slot, item in work.items()
        if slot in guides and guides[slot].asks and engine.slots[slot].masked and not isinstance(item, Prefill)
    ]
    if not asking:
        return engine.step(work, meanwhile)

    def beside() -> None:
        for slot, guide in asking:
            guide.look_ahead(work[slot].rows)
        if meanwhile is not None:
            meanwhile()

    results = engine.step(work, beside)
    asks = [(slot, row, bits) for slot, guide in asking for row, bits in guide.wanted(results[slot].ids)]
    for (slot, row, _), token in zip(asks, engine.likeliest(asks) if asks else ()):
        guides[slot].allowed[row] = token
    return results
