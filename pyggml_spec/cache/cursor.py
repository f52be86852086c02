"""The cursor of a sequence: committed tokens and the next token to compute."""

from dataclasses import dataclass

from ..errors import ContextError, EngineError


@dataclass
class Cursor:
    """``committed`` tokens are in the caches (positions 0 .. committed - 1); ``last_token`` is chosen but not yet computed, or None.

    Invariant: committed + (1 if last_token) <= n_ctx + 1; a step may start while committed < n_ctx.

    ``min_committed``, ``max_committed``: extremes of ``committed`` since they were last set to it. Rows below the first, and those more than one
    step above the second, were not written since.
    """

    n_ctx: int
    committed: int = 0
    last_token: int | None = None
    min_committed: int = 0
    max_committed: int = 0

    @property
    def room(self) -> int:
        """Tokens that can still be committed."""
        return self.n_ctx - self.committed

    def check_fits(self, count: int) -> None:
        """Raises ContextError unless ``count`` more tokens fit."""
        if count > self.room:
            raise ContextError(
                f"{count} tokens do not fit: the context holds {self.n_ctx} and {self.committed} are in it; shorten the prompt or raise "
                f"`n_ctx` to {self.committed + count} or more"
            )

    def advance(self, rows: int, last_token: int | None) -> None:
        """Commits ``rows`` more tokens; ``last_token`` is the target's choice after them."""
        committed = self.committed + rows
        if rows < 0 or committed > self.n_ctx:
            raise EngineError(f"the cursor cannot move by {rows} tokens: {self.room} are left")
        self.place(committed, last_token)

    def reset(self) -> None:
        self.place(0, None)

    def place(self, committed: int, last_token: int | None) -> None:
        """Moves the cursor, also back; the caches must hold the tokens before (a slot within its last block)."""
        self.min_committed = min(self.min_committed, committed)
        self.max_committed = max(self.max_committed, committed)
        self.committed, self.last_token = committed, last_token
