"""One sequence's constraint within a step: how many drafts to verify and, while the device computes, the mask of each row.

    drafts --> check: drafts that the constraint allows --> verify; meanwhile masks of all rows
    greedy token forbidden --> one masked argmax on the device for all rows and slots

Most greedy tokens are allowed and need no mask. Logits in host memory need none ahead of the choice.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ..constraints.grammar import allows, only
from ..sampling.sampler import Sampler
from ..speculation.synthetic import SyntheticAcceptance


class StepConstraint:
    """Attributes:
    allowed: by row of the last step, the likeliest allowed token, where it was computed on the device.
    failure: error of the constraint within a step; its own sequence ends with it after the step.
    widths: verify lengths that no longer one is as cheap as, ascending, where known (4B on one H200: 16 rows 6.4 ms, 8 rows 7.4).
    """

    def __init__(self, sampler: Sampler, synthetic: SyntheticAcceptance | None = None) -> None:
        """
        Args:
            sampler: with a constraint.
        """
        assert sampler.grammar is not None
        self._sampler, self._grammar, self._synthetic = sampler, sampler.grammar, synthetic
        self._path: list[int] = []
        self._drawn = False  # the path is synthetic
        self._masks: list[np.ndarray] = []
        self.allowed: dict[int, int] = {}
        self.failure: Exception | None = None
        self.widths: Sequence[int] = ()

    @property
    def slow(self) -> bool:
        """Whether a mask takes long to compute: then no drafts are verified, each of which would need one."""
        return self._grammar.slow

    def mask_late(self, timeout: float) -> bool:
        """Whether the mask of the next token is still missing after ``timeout`` seconds.

        Raises:
            ConstraintError: it took too long.
        """
        return self._grammar.late(timeout)

    def begin(self, drafts: Sequence[int] = ()) -> None:
        """A step that verifies ``drafts``, as far as they are known."""
        self._path, self._masks, self._drawn, self.allowed = list(drafts), [], False, {}

    def check(self, drafts: np.ndarray) -> int:
        """How many drafts to verify: the allowed prefix, extended to the next cheaper verify length."""
        if self._synthetic is not None:  # accepts drafts that no constraint would
            return len(drafts)
        try:
            self._path = drafts[: self._grammar.fits(drafts.tolist())].tolist()
        except Exception as error:
            self.failure, self._path = error, []
        passed = len(self._path)
        return min(next((width - 1 for width in self.widths if width > passed), passed), len(drafts))

    @property
    def ahead(self) -> bool:
        """Whether masks can be computed before tokens are chosen: sampled tokens depend on those before."""
        return self._sampler.masks_on_device

    def compute_masks(self, rows: int) -> None:
        """Masks of the step's ``rows``, as far as they can be reached."""
        try:
            if self._synthetic is not None and not self._path:
                self._path, self._masks = self._grammar.some(self._synthetic.draw(rows - 1))
                self._drawn = True
            else:
                self._masks = self._grammar.ahead(self._path)
        except Exception as error:
            self.failure, self._masks = error, []

    def forbidden(self, greedy: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(row, mask) of the rows whose greedy token is forbidden while several others are allowed, as far as drafts can be accepted."""
        for row, mask in enumerate(self._masks):
            choice: int | None = int(greedy[row])
            if not allows(mask, int(greedy[row])):
                choice = only(mask)
                if choice is None:
                    yield row, mask
                else:
                    self.allowed[row] = choice
            if choice is not None and not self._drawn and self._path[row : row + 1] != [choice]:
                return

    def synthetic(self, drafts: Sequence[int]) -> list[int]:
        """Allowed tokens that count as accepted in place of ``drafts``, as many as are drawn."""
        assert self._synthetic is not None
        return self._path if self._drawn else self._grammar.some(self._synthetic.draw(len(drafts)))[0]
