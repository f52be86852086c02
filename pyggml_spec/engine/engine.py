"""The engine: runs the steps of many sequences over one model runner, one forward pass for all of them at a time.

A reader that waits for tokens drives: iterating a sequence runs steps, for all sequences, until it has some. Of several threads one drives and the others
wait. A single generation is a sequence of an engine with one slot.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import replace
from typing import Self

from ..cache.prefix import PrefixCache
from ..cache.prefix_files import PrefixFiles
from ..errors import ContextError, DeviceError, EngineError
from ..speculation import verify
from ..speculation.ngram import NgramMethod
from ..speculation.plan import Planner
from ..speculation.policy import SpeculationPolicy, StepPlan
from .batch import Batch
from .prompt import Prompt
from .runner import ModelRunner
from .scheduler import Scheduler
from .sequence import PLAIN, REFERENCE, SPECULATIVE, GenerationOptions, Sequence
from .stats import BatchStats, Stats

NO_DRAFTS = "a small model that reads text alone does not draft after pictures: this text is generated without its drafts"
SLACK = 256  # tokens of output that the remedy for a prompt that is too long leaves room for


def generate(
    runner: ModelRunner,
    prompt: Tokens[int],
    options: GenerationOptions,
    stats: Stats | None = None,
    prefill_progress: Callable[[int, int], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    policy: SpeculationPolicy | None = None,
    cached: int = 0,
) -> Generator[list[int], None, None]:
    """One generation in the only slot of ``runner``: the tokens of each step, first the token after the prompt.

    Arguments as of ``Engine.submit``; ``options.width`` pins the verify length where there is no ``policy``. Close the generator to stop earlier.
    """
    engine = Engine(runner, options.width)
    engine.policy = policy
    sequence = engine.submit(prompt, options, stats, slot=0, cached=cached, progress=prefill_progress, interrupted=interrupted)
    try:
        yield from sequence
    finally:
        sequence.close()


class Engine:
    """Owns its runner.

    Args:
        width: pins the verify length; None lets the policy choose.
        prefix_memory: bytes on the device for the prefix cache; 0 for none.
        ngram: n-gram drafting.
        files: of the prefix cache.
        kinds: further plans of the drafters.
    """

    def __init__(
        self, runner: ModelRunner, width: int | None = None, prefix_memory: int = 0, ngram: NgramMethod | None = None,
        files: PrefixFiles | None = None, kinds: Iterable[StepPlan] = (),
    ) -> None:  # fmt: skip
        self.runner = runner
        self.prefixes = PrefixCache(runner, prefix_memory, files, shared=True) if prefix_memory else None
        self.planner = Planner(runner, width, ngram, kinds)
        self.scheduler = Scheduler(runner, self.planner, self.prefixes)
        self._step_lock = threading.Lock()

    # -- the loop

    def _step(self, meanwhile: Callable[[], object] | None = None, batch: Batch | None = None) -> bool:
        """One forward pass; False if no sequence is left. ``batch``: of ``next_batch``, where it was called already."""
        try:
            batch = batch or self.scheduler.next_batch()  # admission, decoding sequences, prompts to compute
            if batch.decoding:
                self.planner.choose(batch)  # drafter and number of drafts, n-gram or jump-forward drafts, or none
            if batch.prefilling:
                self.scheduler.add_prefill(batch)  # prompt chunks
            if not batch.items:
                return bool(self.scheduler.active)  # that wait for their masks
            during = verify.compute_masks(batch, self.runner, meanwhile) if batch.constrained else meanwhile
            output = self.runner.forward(batch, during)  # one graph: prefill, decode or verify
            accepted = verify.accept(batch, output, self.runner)  # lossless rule, limits, constraints
            self.runner.commit(batch, accepted)  # KV, recurrent state, hidden states, cursors
            self.scheduler.finish(batch, accepted, output)
            if batch.decoding:
                self.planner.observe(batch, output)
        except StopIteration as error:  # readers would take it for the end of their text
            failure = RuntimeError("a step failed with StopIteration")
            self._fail_all(failure)
            raise failure from error
        except BaseException as error:
            self._fail_all(error)
            raise
        return True

    def _fail_all(self, error: BaseException) -> None:
        """Ends every sequence with a slot: the step itself failed."""
        with suppress(DeviceError):  # reported by ``error``
            self.runner.abandon()
        self.scheduler.fail_all(error)

    def _settle(self) -> None:
        """No step is under way afterwards."""

    # -- from any thread

    def submit(
        self,
        prompt: Tokens[int],
        options: GenerationOptions = GenerationOptions(),
        stats: Stats | None = None,
        *,
        slot: int | None = None,
        cached: int = 0,
        progress: Callable[[int, int], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Sequence:
        """Queues a sequence; it starts when a slot is free. ``options.width`` is not used: the verify length is the engine's.

        Args:
            stats: filled in while it runs, also when it is closed early or fails.
            slot: continues the sequence of this slot, which stays there at the end with exactly the committed tokens.
            cached: leading tokens of ``prompt`` that this slot has.
            progress: called with (done, total) of the other tokens after each chunk.
            interrupted: called before each step; True ends the sequence with the stop reason "interrupt".

        Raises:
            ContextError: the prompt is empty, does not fit the context, or has ids outside the vocabulary.
            EngineError: speculative mode without a drafter.
        """
        runner, planner = self.runner, self.planner
        ids = Prompt.checked(prompt, runner.target.n_vocab)
        if ids.pictures:
            self._check_pictures(ids, options)
        if len(ids) > runner.options.n_ctx:
            each = " per slot" if runner.options.slots > 1 else ""
            need = len(ids) + (SLACK if options.max_tokens is None else max(1, min(options.max_tokens, SLACK)))
            raise ContextError(
                f"a prompt of {len(ids)} tokens does not fit the context of {runner.options.n_ctx}{each}; raise `n_ctx` to {need} or more"
            )
        options.check(runner.drafter or planner.ngram)
        if (adapters := runner.target.weights.adapters) is not None:
            chosen = adapters.default if options.adapters is None else adapters.chosen(dict(options.adapters))
            options = replace(
                options, adapters=chosen, owner=f"{options.owner}|adapters {chosen}"
            )  # prefixes and n-grams are those of one choice
        elif options.adapters:
            raise EngineError("there are no adapters; load some with `lora`")
        stats = stats if stats is not None else Stats()
        width = runner.options.width if options.mode == REFERENCE and planner.width == 1 else planner.width
        stats.mode, stats.width, stats.prompt_tokens = options.mode, 1 if options.mode == PLAIN else width, len(ids)
        stats.width_reason = planner.width_reason if options.mode == SPECULATIVE else ""
        stats.most_threads, stats.threads_follow = runner.threads.most, runner.threads.follow
        speculating = runner.drafter is not None or options.drafts is not None
        if ids.pictures and options.drafts is None and any(member.whole_model for member in runner.resources.members):
            speculating = False
            stats.notes.append(NO_DRAFTS)
        sequence = Sequence(self, ids, options, stats, runner.target.n_vocab, width, speculating)
        sequence.cached = sequence.computed = cached
        sequence.on_progress, sequence.interrupted = progress, interrupted
        if slot is not None:
            sequence.slot, sequence.keeps_slot = slot, True
        self.scheduler.add(sequence)
        return sequence

    def _check_pictures(self, prompt: Prompt, options: GenerationOptions) -> None:
        """Raises EngineError, ContextError: they cannot be computed."""
        runner = self.runner
        if not (tables := runner.resources.pictures):
            raise EngineError("this session computes no pictures: load the model with `mmproj`")
        if options.scored:
            raise ContextError("log probabilities of a prompt with pictures are not computed; request them of text alone")
        size, most = tables[0].table.ne[0], runner.options.chunk
        for _, picture in prompt.pictures:
            if picture.embeddings.shape != (picture.rows, size):
                raise EngineError(
                    f"a picture's rows are {picture.embeddings.shape[1:]} values, but the target reads {size}; use the encoder that was made for it"
                )
            if picture.both_ways and picture.rows > most:
                raise ContextError(
                    f"a picture of {picture.rows} rows that see each other needs a step of as many: raise `chunk` from {most}"
                )

    def wake(self) -> None:
        """The next step looks for sequences that come or go."""
        self.scheduler.changed = True

    def drive(self, sequence: Sequence) -> None:
        """Runs one step, unless another thread's step gave ``sequence`` tokens meanwhile."""
        with self._step_lock:
            if not (sequence.outputs or sequence.ended or self._step() or sequence.ready):
                raise EngineError("this sequence is not in its engine any more: submit it again")

    def end(self, sequence: Sequence) -> None:
        """Ends one sequence now."""
        with self._step_lock:
            sequence.cancelled = True
            self._settle()
            self.scheduler.drop_cancelled()

    def step(self, meanwhile: Callable[[], object] | None = None) -> bool:
        """One forward pass; False if no sequence is left. ``meanwhile`` is called while the device computes."""
        with self._step_lock:
            return self._step(meanwhile)

    def run(self) -> None:
        """Steps until every sequence has ended."""
        while self.step():
            pass

    def pin_width(self, width: int, reason: str = "") -> None:
        """Every verify step has ``width`` rows from now on, 1 for plain decoding; ``reason`` goes into the statistics of later sequences."""
        self.planner.pin_width(width, reason)

    def learn_widths(self) -> None:
        """Steps until the cost of every plan is known for the sequences that decode now, or one of them has ended."""
        before = len(self.scheduler.active)
        while not self.planner.settled and len(self.scheduler.active) == before and self.step():
            pass

    def cancel_all(self) -> None:
        """Ends every sequence and frees every slot."""
        with self._step_lock:
            self._cancel_all()

    def _cancel_all(self) -> None:
        self.scheduler.cancel_all()
        with suppress(DeviceError, EngineError):  # which end all sequences
            self._settle()
        self.scheduler.drop_cancelled()

    def close(self) -> None:
        """Ends every sequence and closes the runner. Closing twice is fine."""
        with self._step_lock:  # to the end: another thread may be about to step, or to close as well
            if not self.runner.graphs.closed:
                try:
                    self._cancel_all()
                finally:
                    try:
                        if self.prefixes is not None:
                            self.prefixes.close()
                    finally:
                        self.runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- state

    @property
    def stats(self) -> BatchStats:
        """Counts over all sequences."""
        stats = self.scheduler.stats
        totals = self.runner.totals
        stats.rows_computed, stats.rows_used = totals.rows_computed, totals.rows_used
        return stats

    @property
    def policy(self) -> SpeculationPolicy | None:
        """Chooses drafter and number of drafts; None where the verify length is pinned."""
        return self.planner.policy

    @policy.setter
    def policy(self, policy: SpeculationPolicy | None) -> None:
        self.planner.policy = policy

    @property
    def ngram(self) -> NgramMethod | None:
        """N-gram drafting; None for none."""
        return self.planner.ngram

    @ngram.setter
    def ngram(self, ngram: NgramMethod | None) -> None:
        self.planner.ngram = ngram

    @property
    def drafts(self) -> bool:
        """Whether there is a drafting method."""
        return self.runner.drafter is not None or self.ngram is not None

    @property
    def unsettled(self) -> bool:
        """Whether the next step may be of another kind than the last."""
        return self.scheduler.unsettled

    @property
    def idle(self) -> bool:
        """Whether there are no sequences."""
        return self.scheduler.idle
