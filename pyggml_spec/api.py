"""A loaded pair: files, models, tokenizer and engine together, and generation from text."""

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, Protocol, Self, Unpack, cast

from .arguments import GenerateOptions, RequestOptions
from .cache.prefix import PrefixCache, Reuse, layout_of
from .cache.prefix_files import PrefixFiles
from .checks import whole
from .concurrent import ConcurrentSession, request_options
from .configuration import Configuration, configuration_of
from .drafters.multi import AnyDrafter
from .engine.devices import GROUPS
from .engine.engine import Engine
from .engine.lock import ENDED, EngineLock, Hold
from .engine.memory import SHARED, count_memory
from .engine.options import MOST_SLOTS, EngineOptions, candidate_widths
from .engine.prompt import Prompt
from .engine.resources import Closable, P
from .engine.runner import ModelRunner
from .engine.sequence import SPECULATIVE
from .engine.stats import Stats
from .errors import ContextError, EngineError, PictureError, PyspecError, SamplingError
from .events import StepEvent
from .folders import why_nothing_is_kept
from .ggml.device import Backend, disable_graph_replay, free_bytes, present, release_threads
from .ggml.library import versions
from .load_options import AUTO, LoadOptions
from .loading import Drafts, Loader, Progress, default_context, files_to_load, room, rough_bytes, runner_of, silent
from .models.decoder import Decoder
from .sampling.recommended import chosen
from .sampling.sampler import Sampler, Sampling
from .speculation.calibrate import Waiting, keep_costs, keep_drafts, known_costs, known_drafts, plain_cost
from .speculation.confidence import Confidence
from .speculation.ngram import NgramMethod
from .speculation.plan import skip_drafter_rows
from .speculation.policy import (
    NEVER_PAYS,
    PLAIN_STEP,
    ROW_COST,
    AcceptancePrior,
    SpeculationPolicy,
    StepPlan,
    chain_plans,
    estimate,
    with_known,
    worth_keeping,
)  # fmt: skip
from .speculation.synthetic import SyntheticAcceptance
from .text.stream import TextStream, stop_texts
from .text.tokenizer import Tokenizer
from .vision.encoder import Encoder
from .vision.messages import NO_ENCODER
from .vision.pictures import LIMITS, picture_file

GREEDY = Sampling(temperature=0)
PREFIX_MEMORY = 1 << 30  # bytes on the device that the prefix cache may take, and at most an eighth of what is free after loading
PREFIX_DISK = 8 << 30

# ggml operations that compute value by value, or move values
BY_ROWS = frozenset((
    "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT", "CPY", "DUP", "GET_ROWS", "SET_ROWS", "ROPE", "ADD", "SUB", "MUL", "DIV", "SCALE", "CLAMP",
    "UNARY", "GLU", "CONCAT", "REPEAT", "SQR", "SQRT", "LOG", "SIN", "COS", "PAD",
))  # fmt: skip
NOT_BATCH_INVARIANT = (
    "some products use ggml's kernels, which round by the rows of a step: near-ties may resolve differently from plain decoding where n-gram "
    "drafts are verified; `spec` none disables them"
)

MANY = "this session runs many requests at once: submit this one too, or close what concurrent() or batch() returned"
ONLY = "this session gave up its own caches with concurrent(only=True): submit to that one, or load the model again"
CLOSED = "the session is closed: load the model again"


def slots_note(slots: int, n_ctx: int) -> str:
    """Where memory limits the context of slots."""
    return f"each of the {slots} slots has {n_ctx} tokens of context, as many as memory has room for: use fewer `slots` for more"


class Session:
    """A target, perhaps a drafter, ready to generate. Use in a ``with`` block, or ``close`` it; closing twice is fine."""

    backend: Backend  # the last of ``backends``, the devices that a step goes through
    backends: tuple[Backend, ...]
    target: Decoder
    tokenizer: Tokenizer
    runner: ModelRunner
    engine: Engine  # of the runner's only slot
    prefix: PrefixCache

    def __init__(self) -> None:
        self._parts: list[Closable] = []
        self.options = LoadOptions()
        self.notes: list[str] = []
        self.load_seconds = 0.0
        self.drafter: AnyDrafter | None = None
        self.encoder: Encoder | None = None  # of pictures
        self.lookup: NgramMethod | None = None  # n-gram drafting
        self._plans: list[StepPlan] = []  # among which the policy chooses; empty where the width is pinned
        self._known_costs: dict[StepPlan, float] = {}  # of earlier sessions
        self._watched: Waiting | None = None  # whether other processes used the CPU
        self._known_drafts: Mapping[str, AcceptancePrior] = {}  # acceptance of each drafter, of earlier sessions at first
        self._drafts_count = False  # whether this session's acceptance is to be stored
        self._concurrent: ConcurrentSession | None = None  # the last one
        self._rows_stay = False  # whether rows in place equal those that would be computed
        self._last: tuple[int, list[int]] = (-1, [])  # the engine's epoch of the last generation, and its tokens
        self._adapters = ""  # that it had
        self._lock = EngineLock()

    def _own(self, part: P) -> P:
        self._parts.append(part)
        return part

    def _load(self, target: Path, drafts: Sequence[Path], options: LoadOptions, progress: Progress, slots: int | None = None) -> None:
        """``slots``: of a server; where one device has everything, the only engine is that of its slots, which ``concurrent`` takes over."""
        started, self.options = time.perf_counter(), options
        loader = Loader(target, drafts, options, self._own, progress)
        loader.open()
        loader.choose_context()
        loader.load_weights()
        self.backends, self.backend = loader.backends, loader.backend
        self.target, self.drafter, self.encoder = loader.target, loader.drafter, loader.encoder
        self.notes, self.context_from = loader.notes, loader.context_from
        if slots is not None and len(loader.backends) == 1 and loader.placement is None:
            wanted = replace(loader.engine_options, slots=slots)
            loader.engine_options = replace(wanted, n_ctx=self._context_that_fits(wanted, [0]))
            if loader.engine_options != wanted:
                self.notes.append(slots_note(slots, loader.engine_options.n_ctx))
        self.runner, self.tokenizer = loader.runner(), loader.tokenizer
        width = self.runner.options.width
        if loader.ngram is not None:
            self.lookup = NgramMethod.unmeasured(loader.ngram, [w for w in candidate_widths(width) if w > 1])
            if loader.default_ngram and not self.batch_invariant:
                self.notes.append(NOT_BATCH_INVARIANT)
        self.engine = Engine(self.runner, width, ngram=self.lookup)
        if self.drafter is not None and options.draft_width is None:
            self._plans = self._possible_plans()
            self._known_costs, self._watched = known_costs(self.runner, self._plans), Waiting(self.runner).__enter__()
            self._known_drafts, self._drafts_count = known_drafts(self.runner), True
            if not self._known_costs and (why := why_nothing_is_kept()):
                self.notes.append(why)
        self.engine.policy = self.new_policy()
        files = self._prefix_files(self.runner, options, progress)
        self.prefix = self._own(PrefixCache(self.runner, self._prefix_memory(options.prefix_memory), files))
        exact = self.batch_invariant and not any(member.weights.other_matrix_bytes for member in loader.drafters)
        self._rows_stay = exact and not self.runner.sequence.stateful and self.prefix.files is None  # files have whole chunks
        self.load_seconds = time.perf_counter() - started

    @property
    def batch_invariant(self) -> bool:
        """Whether a row of the target has the same bits in steps of any number of rows: native kernels compute all sums over values."""
        if self.backend.level is None:
            return False
        graph = self.runner.graphs.get(self.runner.graphs.key("plain", 1, self.runner.kv.live)).graph
        return all(op.startswith("native ") or op in BY_ROWS for op in graph.op_counts())

    @property
    def methods(self) -> tuple[str, ...]:
        """Drafting methods in use, by the names of `--spec-type`."""
        models = tuple(member.method for member in self.drafter.methods) if self.drafter is not None else ()
        return models if self.lookup is None else (*models, self.lookup.method)

    def _prefix_files(
        self, engine: ModelRunner, options: LoadOptions, progress: Progress = silent, shared: bool = False
    ) -> PrefixFiles | None:
        if options.prefix_cache is None:
            return None
        layout = layout_of(engine, versions(), lambda what, done, total: progress(f"identity of the {what}", done, total), shared)
        files = PrefixFiles(Path(options.prefix_cache), layout, PREFIX_DISK if options.prefix_disk is None else options.prefix_disk)
        self.notes += [note for note in files.notes if note not in self.notes]
        return files

    def _prefix_memory(self, nbytes: int | None) -> int:
        """Bytes for copies of prompts; by default of what is free now."""
        return min(PREFIX_MEMORY, free_bytes(present(self.backend.device)) // 8) if nbytes is None else nbytes

    def _possible_plans(self) -> list[StepPlan]:
        """What a lone sequence may do in a step: plain decoding first."""
        assert self.drafter is not None
        out, widths = [PLAIN_STEP], [w for w in candidate_widths(self.runner.options.width) if w > 1]
        for member in self.drafter.methods:
            fitting = [width for width in widths if width <= member.block_size]
            out += [StepPlan.of(member.method, width) for width in fitting]
            out += chain_plans(member.method, fitting) if fitting and member.one_by_one else []
        return [plan for plan in dict.fromkeys(out) if plan.verify_len <= self.runner.options.n_ctx]

    @property
    def costs(self) -> dict[int, float] | None:
        """Milliseconds per step by its tokens at most, of plain decoding and of the first drafter, as far as steps have told them; None where the width is
        pinned."""
        if self.drafter is None or self.engine.policy is None:
            return None
        first = ("", self.drafter.method)
        known = {plan.tokens: ms for plan, ms in self._learnt().items() if plan.method in first and plan.verify_len == plan.tokens}
        return dict(sorted(known.items()))

    def _learnt(self) -> dict[StepPlan, float]:
        """Milliseconds of steps by plan, of this session or of earlier ones."""
        policy = self.engine.policy
        return self._all(policy.learnt) if policy is not None and policy.learnt else self._known_costs

    def _all(self, learnt: Mapping[StepPlan, float]) -> dict[StepPlan, float]:
        """What was ``learnt``, and in proportion the other costs of earlier sessions: the machine may have been slower then."""
        known = self._known_costs
        unit = learnt[PLAIN_STEP] / known[PLAIN_STEP] if known and learnt else 1.0
        return {plan: unit * ms for plan, ms in known.items()} | dict(learnt)

    def new_policy(self) -> SpeculationPolicy | None:
        """A new one, with what steps have told of their costs so far, and estimates of the others; None where the width is pinned."""
        if self.drafter is None or not self._plans:
            return None

        def matrices(weights: Any) -> int:
            return weights.native_bytes + weights.other_matrix_bytes

        members, row_cost = self.drafter.methods, ROW_COST["cpu" if self.backend.device.kind == "cpu" else "gpu"]
        shares = {member.method: matrices(member.weights) / max(matrices(self.target.weights), 1) for member in members}
        chained = [member.method for member in members if member.one_by_one]
        known, told = self._learnt(), self.engine.policy.learnt if self.engine.policy is not None else ()
        costs = with_known(estimate(self._plans, row_cost, shares, chained), known, told)
        control = SpeculationPolicy(costs, costs, relative=True, told=PLAIN_STEP in known)
        control.condition_changed(self.runner.threads.condition, 0, ())
        for name, prior in self._known_drafts.items():
            control.load_prior(name, prior)
        rows = {rows: 1 + row_cost * (rows - 1) for rows in (1, *candidate_widths(self.runner.options.width))}
        control.confidence = {member.method: Confidence(rows, relative=True) for member in members if member.confident}
        return control

    def slots_context(self, slots: int, only: bool = False) -> int:
        """Default context of each of ``slots``: the session's, or as many tokens as leave memory on every device. ``only``: as of ``concurrent``."""
        self._check_open()
        options = replace(self.runner.options, slots=slots)
        if only and options == self.runner.options:  # its own caches become those of the slots
            return options.n_ctx
        held = [0] * len(self.backends) if self.runner.graphs.closed else [
            sum(n for name, n in part.items() if name not in SHARED) for part in self.runner.memory_by_segment()
        ]  # fmt: skip
        on_cpu = [backend.device.kind == "cpu" for backend in self.backends]  # whose pages are taken when they are written
        return self._context_that_fits(options, [mine * (only - cpu) for mine, cpu in zip(held, on_cpu, strict=True)])

    def _context_that_fits(self, options: EngineOptions, more: Sequence[int]) -> int:
        """The context of an engine with these options, or as much of it as there is memory for; ``more``: bytes on each device besides free ones."""
        if not self.context_from:
            return options.n_ctx
        rooms = [room(free_bytes(present(backend.device)) + nbytes) for backend, nbytes in zip(self.backends, more, strict=True)]
        if len(rooms) == 1 and rough_bytes(self.target, self.drafter, options) <= rooms[0]:
            return options.n_ctx

        def taken(n_ctx: int) -> list[int]:
            return count_memory(self.backend, self.target, self.drafter, replace(options, n_ctx=n_ctx)).totals(weights=False)

        return default_context(taken, rooms, options.n_ctx)

    # -- generating

    def steps(
        self,
        prompt: str | bytes | Sequence[int],
        max_tokens: int | None = None,
        *,
        mode: str | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
        special: bool = False,
        append: bool = False,
        synthetic: SyntheticAcceptance | None = None,
        prefill_progress: Callable[[int, int], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        stats: Stats | None = None,
    ) -> Generator[StepEvent, None, None]:
        """Generates from ``prompt`` and yields one event per step; the last event flushes the text.

        Args:
            prompt: text (str, or bytes of UTF-8), or token ids; of ``picture_prompt`` where it has pictures.
            max_tokens: at most this many tokens; None: until the end token or the end of the context.
            mode: "speculative" (the default with a drafter), "plain", or "reference".
            sampling: how tokens are chosen; None: greedily, whatever the file recommends (``sampling()`` makes one of that).
            stop: texts that end the generation; they and what follows are not part of the text. An empty one ends nothing.
            ignore_end: go on after the end token.
            special: whether control tokens are recognised in the prompt text.
            append: go on in the caches if the prompt begins with exactly the tokens that the last generation left there. Rows of tokens that
                were generated come from steps then, not from a prefill, and round differently: a near-tie may fall the other way.
            synthetic: accept drafts at random (benchmarks only: the text is not the target's).
            interrupted: called between steps; True ends the generation with the stop reason "interrupt".
            stats: of ``new_stats``, filled in as it goes: complete also when the generation is closed early or fails.

        Raises:
            ContextError: the prompt is empty or does not fit the context, or an id is outside the vocabulary.
            SamplingError: the sampling names tokens that do not exist, or a wrong grammar.
            EngineError: an unknown mode, or the speculative one without a drafter; the session is closed, or generating already; its next
                generation began before this one was read to its end.

        A session has one generation at a time. The next one of the same thread ends one that was left half read, which raises then; another
        thread is refused until it has been read to its end, closed or dropped, or its thread has ended.
        """
        self._check_own()
        ids, text = self.prompt_ids(prompt, special), TextStream(self.tokenizer.piece, stop_texts(stop))
        options = request_options(self.engine, self.tokenizer, text, max_tokens, mode, ignore_end=ignore_end, synthetic=synthetic)
        options.check(self.drafter or self.lookup)
        hold, sampler = self._lock.acquire(), None
        self._drafts_count = self._drafts_count and synthetic is None
        try:
            sampler, started = self._sampler(sampling, ignore_end), time.perf_counter()
            stats = self.new_stats() if stats is None else stats
            reuse, held = self._begin(ids, options.mode, append, stats)
            stats.seconds["prefill"] = time.perf_counter() - started  # restoring rows included
            if sampler is not None:
                stats.seed, stats.sampling = sampler.seed, sampler.sampling.describe()
            self._last = (self.runner.epoch, history := list(ids))

            def prefilled(done: int, total: int) -> None:
                if not held:  # the chunks that the cache knows are those of the prompt that was begun
                    self.prefix.computed()
                if prefill_progress is not None:
                    prefill_progress(reuse.tokens + done, reuse.tokens + total)

            stream = self.engine.submit(
                ids, replace(options, sampler=sampler), stats, slot=0, cached=reuse.tokens, progress=prefilled, interrupted=interrupted
            )
            hold.close = stream.close
            for block in stream:
                history += block
                logprobs = sampler.take_logprobs() if sampler is not None else ()
                event = StepEvent(text.take(block), tuple(block), stats.snapshot(), logprobs)
                self._lock.pause(hold)
                yield event
                self._check_open()
                if not self._lock.resume(hold):
                    raise EngineError(ENDED)
            self._lock.pause(hold)
            yield StepEvent(text.finish(), (), stats)
            if self._parts and self._lock.resume(hold):  # files after the text is out
                self.prefix.save()
                stats.notes += self.prefix.take_notes()
        except GeneratorExit:
            raise
        except BaseException:
            if self._lock.holds(hold):
                self._last = (-1, [])  # a step may be in the recurrent state that is not in the cursor: nothing can be appended
            raise
        finally:
            self._lock.release(hold)
            if sampler is not None:
                sampler.close()

    def _begin(self, ids: list[int], mode: str, append: bool, stats: Stats) -> tuple[Reuse, int]:
        """What the caches have of ``ids``, and how much of that the last generation left."""
        if (adapters := self.target.weights.adapters) is not None and self._adapters != (chosen := f"adapters {adapters.default}"):
            self._adapters, self._last = chosen, (-1, [])
        drafting = mode == SPECULATIVE and self._needs_drafters_rows(ids, append)
        held = self._held(ids, drafting) if append else 0
        alike = 0 if held else self._alike(ids, drafting)
        reuse = Reuse(held) if held else self.prefix.begin(ids, drafting, self._adapters)
        if alike > reuse.tokens:
            self.prefix.resume(alike)
            reuse.tokens = alike
        stats.reused_tokens, stats.reused_from, stats.notes = reuse.tokens, reuse.chunks, reuse.notes
        return reuse, held

    def _needs_drafters_rows(self, ids: list[int], append: bool) -> bool:
        """Whether the drafters' rows are computed for this text. While drafting is disabled they are not; but a reused prefix with such rows keeps them, as
        computing it anew takes longer."""
        widths = self.engine.policy
        if append and widths is not None and widths.should_disable():
            return self.runner.slots[0].drafting
        return not skip_drafter_rows(widths, lambda drafting: self.prefix.known(ids, drafting, self._adapters))

    def _alike(self, ids: list[int], drafting: bool) -> int:
        """Leading tokens of ``ids`` whose rows can stay: of models without recurrent state whose rows have the same bits in any step."""
        (epoch, history), engine, slot = self._last, self.runner, self.runner.slots[0]
        alike = slot.drafting == (drafting and self.drafter is not None)
        if epoch != engine.epoch or not alike or not slot.sound or slot.open_rows or not self._rows_stay:
            return 0
        engine.settle()
        most = min(engine.cursor.committed, len(history), len(ids) - 1)
        return next((i for i in range(most) if ids[i] != history[i]), most)

    def _held(self, ids: list[int], drafting: bool) -> int:
        """Leading tokens of ``ids`` that are all of what the last generation left in the caches, or 0."""
        epoch, history = self._last
        n, alike = self.runner.cursor.committed, self.runner.slots[0].drafting == (drafting and self.drafter is not None)
        return n if epoch == self.runner.epoch and alike and n < len(ids) and ids[:n] == history[:n] and n <= len(history) else 0

    def prompt_ids(self, prompt: str | bytes | Sequence[int], special: bool = False) -> list[int]:
        """The token ids of a prompt that is text or token ids already. Raises ContextError if it is neither, or empty."""
        if isinstance(prompt, (str, bytes)):
            prompt = self.tokenizer.encode(prompt, special)
            if not prompt:
                raise ContextError("the prompt is empty; give some text")
        return Prompt.checked(prompt, self.target.n_vocab)

    def picture_prompt(self, *parts: str | Sequence[int] | bytes | Path, special: bool = False) -> Prompt:
        """A prompt of texts (str) or token ids, and pictures and sounds: bytes of their files, or paths. Where each stands, the tokens that its encoder wants
        around it are added.

        Raises:
            PictureError: there is no encoder (load the model with `mmproj`), or a picture is none, damaged or too large.
        """
        self._check_open()
        if self.encoder is None:
            raise PictureError(NO_ENCODER)
        read: list[Sequence[int] | bytes] = []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                read.append(self.tokenizer.encode(part, special, bos=i == 0))
            else:
                read.append(picture_file(part) if isinstance(part, Path) else part)
        return self.encoder.prompt(read, replace(LIMITS, rows=self.runner.options.n_ctx))

    def _check_open(self) -> None:
        if not self._parts:
            raise EngineError(CLOSED)

    def _check_own(self) -> None:
        """Whether this session can generate alone."""
        self._check_open()
        if self.runner.graphs.closed or self.runner.options.slots > 1:
            raise EngineError(ONLY)

    def _sampler(self, sampling: Sampling | None, ignore_end: bool) -> Sampler | None:
        if not isinstance(sampling, (Sampling, type(None))):
            raise SamplingError(f"the sampling is {sampling!r}; give pyggml_spec.Sampling(temperature=...)")
        sampling, forbidden = sampling or GREEDY, self.target.file.array("tokenizer.ggml.suppress_tokens", "i")
        if forbidden is not None:  # by the model file, as in llama.cpp
            ids = [int(i) for i in forbidden if 0 <= i < self.tokenizer.n_vocab]
            sampling = replace(sampling, logit_bias={**sampling.logit_bias, **dict.fromkeys(ids, -math.inf)})
        if sampling.constrained and ignore_end:
            raise SamplingError("a grammar ends with an end token, and end tokens are to be ignored; give one of the two")
        return None if sampling.is_greedy else Sampler(sampling, self.tokenizer, self.tokenizer.n_vocab)

    def stream(
        self, prompt: str | bytes | Sequence[int], max_tokens: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[StepEvent]:
        """``steps``, without the events that carry no text (except the last, which has the final statistics)."""
        last = None
        for last in self.steps(prompt, max_tokens, **options):
            if last.text and last.tokens:
                yield last
        if last is not None:
            yield last

    def generate(
        self, prompt: str | bytes | Sequence[int], max_tokens: int | None = None, **options: Unpack[GenerateOptions]
    ) -> tuple[str, Stats]:
        """The whole text and its statistics."""
        events = list(self.steps(prompt, max_tokens, **options))
        return "".join(event.text for event in events), events[-1].stats

    def generate_all(
        self,
        prompts: Iterable[str | bytes | Sequence[int]],
        max_tokens: int | None = None,
        *,
        slots: int = 4,
        n_ctx: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[tuple[str, Stats]]:
        """The texts of many prompts and their statistics, in the order of the prompts; they share steps, ``slots`` at a time.

        ``n_ctx``: tokens of context of each slot; None takes the session's. ``max_tokens`` and the options hold for each prompt.

        Raises:
            ContextError: the prompts are one text instead of several, or one of them does not fit.
            PyspecError: as ``concurrent`` and ``steps``; the other prompts end then.
        """
        if isinstance(prompts, (str, bytes)):
            raise ContextError("the prompts are one text; give a list of prompts, or use generate")
        prompts, slots = list(prompts), whole(slots, "the number of slots", 1, MOST_SLOTS)
        if not prompts:
            return []
        with self.concurrent(min(slots, len(prompts)), n_ctx) as server:
            handles = [server.submit(prompt, max_tokens, **options) for prompt in prompts]
            return [handle.result() for handle in handles]

    def sampling(self, **fields: Any) -> Sampling:
        """The sampling that `pyspec run` uses for these fields of ``Sampling``: greedy if none of them needs random numbers; otherwise fields that are not
        named are what the model file recommends, or llama.cpp's defaults.

        Raises:
            SamplingError: a value out of range.
        """
        return chosen(fields, self.target.file)[0]

    def new_stats(self) -> Stats:
        """Empty statistics of this session, load time and versions filled in."""
        stats = Stats(device=self.backend.device.name, versions=versions())
        stats.seconds["load"] = self.load_seconds
        return stats

    def batch(self, slots: int, n_ctx: int | None = None, prefix_memory: int = 0, groups: int | str = 1) -> Engine:
        """A scheduler for ``slots`` sequences at once over this session's weights, with caches of its own; close it before the session.

        Args:
            n_ctx: tokens of context of each slot; None takes the session's, or as many as memory has room for where `load` chose that.
            prefix_memory: bytes on the device for shared prompt prefixes, which are computed once.
            groups: micro-batches that decode concurrently where the layers are split over several devices: 1 for none, 2 where possible; "auto"
                measures which is faster.

        This session itself generates nothing until it is closed.

        Raises:
            EngineError: an impossible number of slots; the session is generating, or runs many requests at once already.
            DeviceError: their caches do not fit the device.
        """
        self._check_open()
        with self._reserved() as hold:
            scheduler = self._scheduler_of(slots, n_ctx, {"prefix_memory": prefix_memory}, groups)
        hold.ended = lambda: scheduler.runner.graphs.closed
        return scheduler

    @contextmanager
    def _reserved(self) -> Iterator[Hold]:
        """Takes this session's lock for an engine of many requests; gives it back if none is made."""
        hold = self._lock.acquire(MANY)
        try:
            yield hold
        except BaseException:
            self._lock.release(hold)
            raise

    def _own_runner(self, options: EngineOptions) -> ModelRunner | None:
        """Gives up this session's own caches; its runner, if it has these options and has computed nothing yet."""
        taken = options == self.runner.options and not self.runner.graphs.closed and not self.runner.epoch
        for part in (self.prefix,) if taken else (self.prefix, self.runner):
            part.close()
        self._parts = [part for part in self._parts if part is not self.prefix and part is not self.runner]
        return self.runner if taken else None

    def _scheduler_of(self, slots: int, n_ctx: int | None, prefixes: dict[str, Any], groups: int | str, only: bool = False) -> Engine:
        """``prefixes``: fields of LoadOptions."""
        self._check_open()
        wanted = None if groups == AUTO else whole(groups, f"`groups`, if it is not {AUTO!r},", 1, GROUPS)
        context = self.slots_context(slots, only) if n_ctx is None else n_ctx
        options = replace(self.runner.options, slots=slots, n_ctx=context, groups=wanted != 1)
        kept = replace(self.options, **{"prefix_cache": None, "prefix_disk": None, **prefixes})
        memory = self._prefix_memory(kept.prefix_memory)
        if kept.prefix_cache is not None and not memory:
            raise PyspecError(
                "a prefix cache on disk is filled from memory, and `prefix_memory` is 0: give it more, or leave the folder out"
            )
        engine = self._own_runner(options) if only else None
        engine = engine or runner_of(self.backend, self.target, self.drafter, options, self.notes)
        try:
            files = self._prefix_files(engine, kept, shared=True)
        except BaseException:
            engine.close()
            raise
        lookup = self.lookup.for_slots(candidate_widths(options.width)) if self.lookup is not None else None
        control = self.new_policy()
        pinned = options.width if control is None else None
        kinds = worth_keeping({plan: control.costs[1, plan] for plan in control.plans if plan.draft_tokens}) if control is not None else ()
        if engine.devices.groups and wanted != 1:
            from .multi_device.pipeline import PipelinedEngine

            scheduler: Engine = PipelinedEngine(engine, pinned, memory, lookup, files, kinds, groups=wanted)
        else:
            scheduler = Engine(engine, pinned, memory, lookup, files, kinds)
        if slots == 1:  # the same graphs
            scheduler.policy = control
        elif control is not None:
            if control.never_pays:
                scheduler.pin_width(1, NEVER_PAYS)  # where W rows cost W plain steps, those of several sequences are no cheaper
            elif scheduler.policy is not None and not engine.devices.groups:  # whose steps are launched before drafts can be read
                scheduler.policy.confidence = control.confidence
        return scheduler

    def concurrent(
        self, slots: int, n_ctx: int | None = None, prefix_memory: int | None = None, prefix_cache: str | Path | None = None,
        prefix_disk: int | None = None, *, only: bool = False, groups: int | str = 1,
    ) -> ConcurrentSession:  # fmt: skip
        """Many requests at once, from threads or asyncio: ``submit`` returns handles. Arguments and errors as of ``batch``; without
        ``prefix_memory`` it is 1 GiB, or an eighth of what is free if that is less.

        Args:
            prefix_cache, prefix_disk: folder in which prompt prefixes outlive the process, and bytes that it may take, as of ``load``.
            only: frees this session's own caches first: from then on it generates through ``concurrent`` alone.

        This session itself generates nothing while it is open: both would use one device stream from two threads.
        """
        if self._concurrent is not None and self._concurrent.ended and self._concurrent in self._parts:
            self._concurrent.close()  # it failed, and its thread may not have ended yet
            self._parts.remove(self._concurrent)
        with self._reserved() as hold:
            prefixes = {"prefix_memory": prefix_memory, "prefix_cache": prefix_cache, "prefix_disk": prefix_disk}
            scheduler = self._scheduler_of(slots, n_ctx, prefixes, groups, only)
            made = self._concurrent = self._own(ConcurrentSession(scheduler, self.tokenizer, self.prompt_ids, self._sampler))
        hold.ended = lambda: made.closed
        return made

    def calibrate_plain(self, steps: int = 36, depth: int = 0, *, behind: int | None = None) -> float:
        """Milliseconds per token of plain decoding, host time included: the mean of at most ``steps`` steps. Forgets the sequence.

        Steps are measured for 0.15 seconds, slow ones for about half a second. ``depth``: tokens of context before them; fewer where computing them would
        take longer than a tenth of a second.

        Raises:
            ContextError: the context is too short for a step.
        """
        self._check_own()
        if behind is not None:
            warnings.warn("`behind` of calibrate_plain is `depth` now", DeprecationWarning, stacklevel=2)
            depth = behind
        steps = whole(steps, "the number of steps", 1, 1 << 20)
        depth = whole(depth, "the number of tokens before them", 0, 1 << 30)
        text, stats = TextStream(self.tokenizer.piece, ()), self.new_stats()
        with self._lock.held():
            return plain_cost(self.engine, steps, depth, lambda block: StepEvent(text.take(block), tuple(block), stats.snapshot(), ()))

    def configuration(self) -> Configuration:
        """What is in use: read it before trusting a speed."""
        self._check_open()
        return configuration_of(self)

    def engaged(self) -> Configuration:
        """The old name of ``configuration``."""
        warnings.warn("Session.engaged is Session.configuration now", DeprecationWarning, stacklevel=2)
        return self.configuration()

    def close(self) -> None:
        """Frees everything that ``load`` made.

        Raises:
            EngineError: a step is under way, in another thread or in a call that this one was made from; nothing has been freed then.
        """
        try:
            if self._concurrent is not None:
                self._concurrent.close()
        except BaseException:
            with suppress(Exception):  # its thread may still be at work; the first error is raised
                self._free()
            raise
        self._free()

    def _free(self) -> None:
        self._lock.shut(CLOSED)
        if self._watched is not None and self._parts:
            self._watched.__exit__()
            policy = self.engine.policy
            keep_costs(
                self.runner, self._plans, self._learnt() if policy is None or not self._watched.much else self._all(policy.undisturbed)
            )
            self._watched = None
        if self._drafts_count and (widths := self.engine.policy) is not None:
            keep_drafts(self.runner, widths.priors)
            self._drafts_count = False
        with ExitStack() as freed:  # in reverse order, whatever one of them raises
            for part in self._parts:
                freed.callback(part.close)
            self._parts = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


F = ParamSpec("F")


class _Load(Protocol[F]):
    """``load`` as type checkers see it: with each field of LoadOptions as a keyword."""

    def __call__(
        self,
        target: str | Path | None = None,
        draft: str | Path | Sequence[str | Path] | None = None,
        options: LoadOptions | None = None,
        progress: Progress = silent,
        *args: F.args,
        **fields: F.kwargs,
    ) -> Session: ...


def _takes(options: Callable[F, LoadOptions]) -> Callable[[Callable[..., Session]], _Load[F]]:
    return lambda call: cast(Any, call)


@_takes(LoadOptions)
def load(
    target: str | Path | None = None,
    draft: str | Path | Sequence[str | Path] | None = None,
    options: LoadOptions | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> Session:
    """Loads a target and perhaps its drafters; without a target, the embedded pair.

    Args:
        target, draft: GGUF files. A target without a drafter, and without an MTP layer of its own, has n-grams of the text verified where it repeats. Of
            several drafters, one that drafts blocks and one that drafts chains, the one with the most expected tokens per millisecond drafts each step.
        options: how they are loaded; None for the defaults.
        progress: called with (what, done, total) while files are read.
        fields: of ``LoadOptions``, in place of those of ``options``.

    Raises:
        PyspecError: any reason why this cannot work, in one sentence.
    """
    return _loaded(target, draft, LoadOptions.of(options, fields), progress)


def load_to_serve(target: str | Path | None, draft: Drafts, options: LoadOptions, progress: Progress, slots: int) -> Session:
    """``load`` of what generates through ``concurrent(slots, only=True)`` alone."""
    return _loaded(target, draft, options, progress, slots)


def _loaded(target: str | Path | None, draft: Drafts, options: LoadOptions, progress: Progress, slots: int | None = None) -> Session:
    files = files_to_load(target, draft, options.methods)
    if not options.graphs:
        disable_graph_replay()
    session = Session()
    try:
        session._load(*files, options, progress, slots)
        return session
    except BaseException:
        session.close()
        raise
    finally:
        release_threads()  # costs of steps were measured, and others may be going to run them
