"""The sequence of checks, and the resources they share."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..cache.kv import MOST_CONTEXT
from ..drafters.base import TOKEN_MAP
from ..drafters.dflash import DFlash
from ..drafters.mtp import has_layer, is_layer_alone
from ..drafters.pairs import drafters_for
from ..engine.options import EngineOptions
from ..engine.runner import ModelRunner
from ..errors import EngineError, PyspecError
from ..ggml.library import versions
from ..gguf_io import GGUFFile
from ..load_options import LoadOptions
from ..loading import DEMO_DRAFTER, DEMO_TARGET, Loader
from ..models.registry import open_target
from ..models.weights import Weights
from ..multi_device.split import SplitWeights
from . import files, precision, readings, running, split
from .opening import open_leniently
from .probe import FLOOR, JUDGED, Measured, Passage, Probe, Reading, held_out_prompts, write_passages
from .report import FAIL, FEATURES, FIT, NOT_APPLICABLE, RUNNING, Check, Report, causes_only

Done = Callable[[str, int, int], None]
"""Called with (phase, checks done, checks in all)."""


@dataclass(frozen=True)
class Effort:
    """How much is measured: prompts, tokens read and written per prompt, blocks per text, tokens per generation."""

    prompts: int = 4
    prompt_tokens: int = 96
    tokens: int = 160
    blocks: int = 24
    generated: int = 96
    running: bool = True


class Subject:
    """A loaded target and its texts, against which drafters are examined. Owns its resources; ``close`` it."""

    def __init__(self, target: str | Path, *, prompts: Sequence[str] | None = None, effort: Effort = Effort(), **fields: Any):
        """``fields``: of ``LoadOptions``."""
        self.effort, self._stack = effort, ExitStack()
        self._passages: list[Passage] = []
        self._noisy: Passage | None = None
        try:
            options = LoadOptions(**fields, spec=["none"])
            n_ctx, loader = options.n_ctx, Loader(Path(target), (), options, self._own)
            loader.open()
            self.backends, self.backend = loader.backends, loader.backend
            self.target, self.tokenizer, self.file = loader.target, loader.tokenizer, loader.target.file
            longest = min(self.target.context_length, MOST_CONTEXT)
            self.n_ctx = min(1024 if n_ctx is None else n_ctx or longest, longest)
            if self.n_ctx < 128:
                raise PyspecError(f"a context of {self.n_ctx} tokens is too short to measure anything; use `n_ctx` 512 or more")
            self.segments = loader.segments(self.backends, self.n_ctx)
            self.target.weights = self._own(self.target_weights_of(self.target))
            self.prompts = list(prompts if prompts is not None else held_out_prompts(effort.prompts))[: effort.prompts]
            if not self.prompts:
                raise PyspecError("there is no prompt to measure on; give some with `prompts`")
            self.ids = [self.tokenizer.encode(prompt)[: min(effort.prompt_tokens, self.n_ctx // 3)] for prompt in self.prompts]
            if not all(self.ids):
                raise PyspecError(f"prompt {self.ids.index([])} is empty; give texts to continue")
            self.prompts = [self.tokenizer.decode(ids) for ids in self.ids]
        except BaseException:
            self.close()
            raise

    def _own(self, part):
        return self._stack.enter_context(closing(part))

    def target_weights_of(self, target):
        """Weights of the target, or of a perturbed copy, on its devices; the caller closes them."""
        if not self.segments:
            return self.weights_of(target)
        return SplitWeights(target, self.segments, None, None, None, lambda done, total: None, borrowed=True)

    def weights_of(self, model):
        """Weights of a model on the only or last device; the caller closes them."""
        return Weights(self.backend, model.file, model.specs(), model.groups(), model.fused_alike())

    def engine(self, target, drafter=None) -> ModelRunner:
        """A new engine; the caller closes it. Raises PyspecError: the drafter does not fit the target, or out of memory."""
        width = drafter.block_size if drafter is not None else 1
        return ModelRunner(self.backend, target, drafter, EngineOptions(n_ctx=self.n_ctx, width=width))

    @property
    def tokens(self) -> int:
        """Tokens of a continuation that fit the context."""
        return min(self.effort.tokens, self.n_ctx - max(map(len, self.ids)) - 1)

    @cached_property
    def target_weights(self) -> Check:
        return files.weights("target weights", self.target, files.SCANNED_TARGET)

    def passages(self, layers: Sequence[int]) -> list[Passage]:
        """The texts, with the inputs of at least these layers."""
        if not self._passages or set(layers) - set(self._passages[0].features):
            with closing(self.engine(self.target)) as engine:
                self._passages, self._noisy = write_passages(engine, self.ids, sorted(set(layers)), self.tokens), None
        return self._passages

    def noisy_passage(self) -> Passage:
        """The first text as read with twice the quantisation noise."""
        if self._noisy is None:
            self._noisy = precision.noisy_passage(self.engine, self.target_weights_of, self.target, self._passages[0])
        return self._noisy

    def close(self) -> None:
        self._stack.close()


def examine(
    target: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    kernels: str | None = None,
    n_ctx: int | None = None,
    prompts: Sequence[str] | None = None,
    tensor_split: Sequence[float] | None = None,
    progress: Done = lambda what, done, total: None,
) -> Report:
    """Examines a pair; by default the embedded one.

    Args:
        target, draft: GGUF files; a target with an MTP layer needs no drafter.
        device, threads, kernels, n_ctx, tensor_split: as for ``load``; the context defaults to 1024. On several devices the report includes
            the cost of the split.
        prompts: texts to measure on; None for held-out prompts of the embedded set (Python code).

    Raises:
        PyspecError: the target cannot run, or a file cannot be read.
    """
    if isinstance(draft, (list, tuple)):
        raise PyspecError(f"doctor examines one drafter at a time: name one of {', '.join(map(str, draft))} with `draft`")
    if target is None and draft is None:
        target, draft = DEMO_TARGET, DEMO_DRAFTER
    if target is None:
        raise PyspecError(
            "doctor examines a pair: name the target with `target` and the drafter with `draft`; without a drafter, CPUs use n-gram drafting"
        )
    if draft is None:
        with GGUFFile(target) as file:
            if not has_layer(file) or is_layer_alone(file):
                open_target(file)  # errors of the target come first
                raise PyspecError(f"doctor examines a pair: name a drafter with `draft`; {drafters_for(file)}")
    progress("loading", 0, 1)
    options: dict[str, Any] = {"device": device, "threads": threads, "kernels": kernels, "n_ctx": n_ctx, "tensor_split": tensor_split}
    with closing(Subject(target, prompts=prompts, **options)) as subject:
        return examine_drafter(subject, target if draft is None else draft, progress)


def examine_drafter(subject: Subject, draft: str | Path, progress: Done = lambda what, done, total: None) -> Report:
    """Examines one drafter against a loaded target. Raises GGUFError: the drafter's file cannot be read."""
    with GGUFFile(draft) as file:
        checks = list(_Examination(subject, file, progress).checks()) + running.other_work(subject.backends)
    conditions = {
        "device": " and ".join(backend.device.description for backend in subject.backends), "threads": subject.backend.threads, "kernels": subject.backend.kernels,
        "context": subject.n_ctx, "versions": versions(),
        "prompts": len(subject.ids), "tokens_per_text": subject.tokens,
    }  # fmt: skip
    return Report(str(subject.file.path), str(file.path), causes_only(checks), conditions)


class _Examination:
    """All checks of one drafter."""

    def __init__(self, subject: Subject, file: GGUFFile, progress: Done):
        self.subject, self.file, self.target, self.progress = subject, file, subject.target, progress

    def checks(self):
        self.progress("files", 0, 8)
        yield from map(files.build, dict.fromkeys(backend.device for backend in self.subject.backends))
        yield files.tokenizer(self.subject.file, self.file)
        try:
            drafter, refusals = open_leniently(self.file, self.target)
        except PyspecError as error:
            yield Check("drafter", FAIL, str(error), "use a drafter that was converted for this target")
            return
        yield from refusals
        # sequential drafters, selectors and reduced vocabularies have no other readings
        readable = type(drafter) is DFlash and TOKEN_MAP not in drafter.file.tensors
        if misfit := self._out_of_reach(drafter) if readable else _misfit(drafter, self.target):
            yield Check("pair", FAIL, misfit, "use the drafter that was made for this target, or the target that it was made for")
            return
        mask = files.mask_embedding(self.target, drafter) if readable else None
        yield from [mask] if mask is not None else []
        yield files.weights("drafter weights", drafter, files.SCANNED, mask)
        yield self.subject.target_weights
        with ExitStack() as stack:
            drafter.weights = stack.enter_context(closing(self.subject.weights_of(drafter)))
            if not isinstance(drafter, DFlash) or not readable:
                yield from self._running(drafter)
                return
            self.progress("texts", 1, 8)
            layers = sorted({v + shift for v in drafter.hp.target_layers for shift in (-1, 0, 1) if 0 <= v + shift <= self.target.n_layer})
            try:
                passages = self.subject.passages(layers)
            except EngineError as error:
                remedy = "fetch or convert the target again; `pyspec compare --logits` tells a damaged file from a kernel"
                yield Check("target", FAIL, str(error), remedy, FEATURES)
                return
            probe = stack.enter_context(closing(Probe(self.subject.backend, self.target, drafter, passages, self.subject.effort.blocks)))
            yield from self._probed(drafter, probe)

    def _out_of_reach(self, drafter) -> str:
        """Why the pair cannot be measured at all, or empty. Layers and mask tokens out of range can still be swept."""
        layers, kept = drafter.hp.target_layers, drafter.hp
        drafter.hp = replace(kept, target_layers=tuple(min(v, self.target.n_layer) for v in layers), mask_token=0)
        try:
            misfit = _misfit(drafter, self.target)
        finally:
            drafter.hp = kept
        return misfit or (f"{self.file.path.name} has a negative layer or mask token" if min(*layers, kept.mask_token) < 0 else "")

    def _probed(self, drafter, probe: Probe):
        reading = Reading(drafter.hp)
        usable = _fits(reading, probe)  # the target has the layers and the token
        if usable:
            base = probe.measure(reading)
        else:  # a pair that cannot draft
            blocks = sum(len(probe.anchors(p)) for p in probe.passages)
            unlikely = np.full((blocks, JUDGED), np.log(FLOOR), np.float32)
            base = Measured(np.zeros(blocks, np.int32), np.zeros(0, np.int32), unlikely, True)
        if usable:
            yield readings.features(probe, reading, base)
        self.progress("readings", 2, 8)
        longest = min(int(probe.anchors(p).max()) for p in probe.passages)
        for sweep in readings.sweeps(reading, drafter, self.target, longest):
            possible = [(label, other) for label, other in sweep.alternatives if _fits(other, probe)]
            yield readings.run(replace(sweep, alternatives=possible), probe, reading, base)
        if not usable:
            misfit = _misfit(drafter, self.target) or "the drafter reads layers or a token that the target does not have"
            yield Check("pair", FAIL, misfit, "use the drafter that was made for this target", FIT)
            return
        yield readings.soft_cap(probe, reading, base, drafter, self.target)
        self.progress("fit and precision", 4, 8)
        yield readings.fit(probe, reading, base)
        yield precision.drafter(self.subject.weights_of, self.subject.backend, self.target, drafter, probe, reading, base)
        yield precision.target(self.subject.noisy_passage, self.target, probe, reading)
        if self.subject.effort.running:
            yield from self._running(drafter, probe, reading, base)

    def _running(self, drafter, probe: Probe | None = None, reading: Reading | None = None, base: Measured | None = None):
        """Generations; that is all for a drafter without other readings."""
        self.progress("generations", 5, 8)
        tokens = min(self.subject.effort.generated, self.subject.tokens)
        try:
            engine = self.subject.engine(self.target, drafter)
        except PyspecError as error:
            yield Check("generation", NOT_APPLICABLE, f"the pair cannot generate: {error}", stage=RUNNING)
            return
        with closing(engine):
            ranked = None
            if probe is not None and reading is not None:
                prompts = self.subject.prompts[:2]
                yield running.template_and_thinking(engine, self.subject.tokenizer, probe, reading, prompts, self.subject.tokens)
                ranked = probe.measure(replace(reading, ranked=True))
            base = base or running.chain(engine, self.subject.ids, tokens)
            yield from running.examine(engine, self.subject.ids, tokens, base, ranked)
            yield from split.examine(engine)


def _misfit(drafter, target) -> str:
    """Why the drafter does not fit the target, or empty."""
    try:
        drafter.check_pair(target)
    except PyspecError as error:
        return str(error)
    return ""


def _fits(reading: Reading, probe: Probe) -> bool:
    captured = set(probe.passages[0].features)
    return set(reading.hp.target_layers) <= captured and 0 <= reading.hp.mask_token < probe.target.n_vocab
