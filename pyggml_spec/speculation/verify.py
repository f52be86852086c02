"""Verification: which tokens a step emits.

The target computes rows [last token, d_1 .. d_{W-1}]; row j predicts the token after it. Accepted is the longest prefix of drafts with
target_j == d_{j+1}, where target_j is the greedy or sampled token after row j; the target's own token after it follows. Every emitted token is therefore
the target's choice after exactly the tokens before it: drafts change how many tokens a step emits, never which.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..engine.batch import Batch, Prefill, StepOutput
from ..engine.runner import ModelRunner
from ..engine.sequence import CONSTRAINT, Limits
from ..engine.sequence import Sequence as SequenceState
from ..errors import EngineError
from ..sampling.sampler import Sampler


class Choices(NamedTuple):
    """What may come after the rows of one slot after a step, until the next one: the ``greedy`` token, and by row the likeliest one that the constraint
    allows, where it is known (``allowed``)."""

    greedy: Sequence[int]
    runner: ModelRunner
    slot: int
    allowed: Mapping[int, int] = {}


def compute_masks(batch: Batch, runner: ModelRunner, meanwhile: Callable[[], object] | None) -> Callable[[], object] | None:
    """What to call while the step computes: the masks of constrained sequences whose logits stay on the device, then ``meanwhile``."""
    batch.masked = [s for s in batch.constrained if s.constraint is not None and s.constraint.ahead and runner.slots[s.slot].masked]
    if not batch.masked:
        return meanwhile

    def during() -> None:
        for s in batch.masked:
            assert s.constraint is not None
            s.constraint.compute_masks(batch.items[s.slot].rows)
        if meanwhile is not None:
            meanwhile()

    return during


def accept(batch: Batch, output: Mapping[int, StepOutput], runner: ModelRunner) -> dict[int, list[int]]:
    """The tokens that each slot gains; none while its prompt is not complete. A sequence's own error goes to ``batch.errors``."""
    if batch.masked:
        _choose_masked(batch, output, runner)
    accepted: dict[int, list[int]] = {}
    for slot, item in batch.items.items():
        seq = batch.sequences[slot]
        try:
            if isinstance(item, Prefill):
                accepted[slot] = _first(seq, item, output[slot], runner)
            else:
                accepted[slot] = _verified(seq, output[slot], runner)
        except Exception as error:  # its constraint, its sampler, its caller's functions
            batch.errors[slot] = error
    return accepted


def _choose_masked(batch: Batch, output: Mapping[int, StepOutput], runner: ModelRunner) -> None:
    """One masked argmax for all rows whose greedy token is forbidden."""
    rows = [(s.slot, row, mask) for s in batch.masked if s.constraint for row, mask in s.constraint.forbidden(output[s.slot].ids)]
    for (slot, row, _), token in zip(rows, runner.likeliest(rows) if rows else ()):
        constraint = batch.sequences[slot].constraint
        assert constraint is not None
        constraint.allowed[row] = token


def _first(seq: SequenceState, item: Prefill, output: StepOutput, runner: ModelRunner) -> list[int]:
    """The token after a prompt, once its last chunk is computed."""
    if not output.target_finite:
        raise EngineError(runner.not_finite(seq.slot))
    if item.scored and (sampler := seq.options.sampler) is not None:
        following = seq.prompt[seq.computed + 1 : seq.computed + 1 + len(item.tokens)]
        for token, logits in zip(following, runner.row_logits(seq.slot, len(item.tokens))):
            sampler.score(token, logits)
    if seq.remaining > len(item.tokens) or seq.limits.reason:  # no tokens wanted: the prompt is computed for the prefix cache
        return []
    seq.limits.begin(runner.slots[seq.slot].cursor.room)
    return [first_token(Choices([int(output.ids[0])], runner, seq.slot), seq.history, seq.limits, seq.options.sampler)]


def _verified(seq: SequenceState, output: StepOutput, runner: ModelRunner) -> list[int]:
    """The accepted drafts of a decode step and the target's token after them.

    Raises:
        EngineError: the target produced NaN or Inf.
        Exception: what the sequence's constraint, sampler or scripted drafter raised.
    """
    constraint, options = seq.constraint, seq.options
    failure = seq.failure or (constraint.failure if constraint is not None else None)
    if failure is not None:
        raise failure
    if not output.target_finite:
        raise EngineError(runner.not_finite(seq.slot))
    if not output.draft_finite:
        seq.stats.nan_drafts += 1
        seq.speculating = False
    if seq.by_drafter:
        seq.offered = output.tokens[1:].tolist()
    drafts, imposed = seq.offered, False
    if options.synthetic is not None and seq.source != CONSTRAINT:
        drafts, imposed = constraint.synthetic(drafts) if constraint is not None else drafts[: options.synthetic.draw(len(drafts))], True
    choices = Choices(output.ids.tolist(), runner, seq.slot, constraint.allowed if constraint is not None else {})
    return choose_tokens(choices, drafts, seq.limits, options.sampler, imposed)


def first_token(choices: Choices, prompt: Sequence[int], limits: Limits, sampler: Sampler | None) -> int:
    """The target's token after ``prompt``."""
    if sampler is not None:
        sampler.accept_prompt(prompt)
    token = _choose(choices, 0, sampler)
    limits.take([token])
    return token


def choose_tokens(
    choices: Choices, drafts: Sequence[int], limits: Limits, sampler: Sampler | None = None, imposed: bool = False
) -> list[int]:
    """The target's tokens after rows 0, 1, ... while each equals the next row's draft, up to the sequence's end.

    Args:
        drafts: of rows 1, 2, ....
        limits: of the sequence.
        imposed: drafts count as chosen (synthetic acceptance).
    """
    if sampler is None and not imposed:
        greedy, matched = choices.greedy, 0
        while matched < len(drafts) and drafts[matched] == greedy[matched]:
            matched += 1
        chosen = list(greedy[: matched + 1])
        return chosen[: limits.take(chosen)]
    tokens: list[int] = []
    for row, draft in enumerate([*drafts, None]):
        token = _impose(choices, row, draft, sampler) if imposed and draft is not None else _choose(choices, row, sampler)
        tokens.append(token)
        limits.take((token,))
        if limits.reason or token != draft:
            break
    return tokens


def _choose(choices: Choices, row: int, sampler: Sampler | None) -> int:
    greedy, runner, slot = choices.greedy[row], choices.runner, choices.slot
    if sampler is None:
        return greedy
    if (forced := sampler.take_forced()) is not None:
        return forced
    if sampler.accepts_argmax(greedy):
        return greedy
    if sampler.masks_on_device:
        token = choices.allowed.get(row)
        if token is None and runner.slots[slot].masked:
            token = runner.likeliest([(slot, row, sampler.allowed())])[0]
        if token is not None and sampler.accepts_argmax(token):
            return token
    return sampler.choose(*runner.candidates(row, slot), lambda mask: runner.largest(row, mask, slot))


def _impose(choices: Choices, row: int, draft: int, sampler: Sampler | None) -> int:
    """``draft``. The target's choice is still made, because it takes time, except under a constraint, which advances by the draft."""
    if sampler is not None and sampler.grammar is not None:
        sampler.take(draft)
    else:
        _choose(choices, row, sampler)
    return draft
