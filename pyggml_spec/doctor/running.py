"""Generations: chunked prompts, repeated prompts, graph replay, step times, and the speed-up."""

import statistics
import time
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from ..engine.engine import generate
from ..engine.options import candidate_widths
from ..engine.runner import ModelRunner
from ..engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from ..engine.stats import Stats
from ..ggml.cores import ThreadCounts
from ..ggml.device import Backend
from ..speculation.calibrate import WARMUP, step_costs
from ..speculation.policy import SpeculationPolicy
from . import trees
from .probe import Measured
from .report import FAIL, NOT_APPLICABLE, OK, RUNNING, WARN, Check

PIECE = 32
AGREES = 0.6  # share of accepted drafts that has to remain; batch shapes differ in the last bit
IN_LOOP = 0.35  # the same for decoding, whose blocks start after a rejection
RUNS = 9
REPEATS = 4  # calls of a graph until the last ones are replays


def speculate(engine: ModelRunner, prompt: Sequence[int], tokens: int, *, mode: str = SPECULATIVE, width: int | None = None, piece: int = 0,
              keep: bool = False, widths: SpeculationPolicy | None = None) -> Stats:  # fmt: skip
    """Statistics of one generation. ``piece``: prefill chunk; ``keep``: continue the current sequence."""
    if not keep:
        engine.reset(drafting=mode == SPECULATIVE)
    prompt, stats = list(prompt), Stats()
    while piece and len(prompt) > piece:
        engine.prefill(prompt[:piece])
        prompt = prompt[piece:]
    options = GenerationOptions(tokens, mode, width or engine.options.width, ignore_end=True)
    for _ in generate(engine, prompt, options, stats, policy=widths):
        pass
    return stats


def _same(name: str, usual: Stats, other: Stats, how: str, remedy: str) -> Check:
    data = {"usual": usual.tokens_per_step, "other": other.tokens_per_step, "drafted": other.drafted, "nan_drafts": other.nan_drafts}
    found = f"{other.tokens_per_step:.2f} tokens per step {how}, {usual.tokens_per_step:.2f} otherwise"
    broken = other.nan_drafts or not other.drafted or other.matched < AGREES * usual.matched
    return Check(name, FAIL if broken else OK, found, remedy if broken else "", RUNNING, data)


def micro_batches(engine: ModelRunner, prompt: Sequence[int], tokens: int) -> Check:
    """Chunked prefill: does the drafter see the whole prompt?"""
    if len(prompt) <= PIECE:
        return Check("micro-batches", NOT_APPLICABLE, f"the prompt has {len(prompt)} tokens, one chunk holds {PIECE}", stage=RUNNING)
    usual, pieces = speculate(engine, prompt, tokens), speculate(engine, prompt, tokens, piece=PIECE)
    how = f"with the prompt in {-(-len(prompt) // PIECE)} chunks"
    return _same("micro-batches", usual, pieces, how, "report this: the hidden states of some chunks do not reach the drafter")


def repeated_prompt(engine: ModelRunner, prompt: Sequence[int], tokens: int) -> Check:
    """The same prompt again."""
    usual, again = speculate(engine, prompt, tokens), speculate(engine, prompt, tokens)
    return _same(
        "repeated prompt", usual, again, "for the same prompt again", "report this: the first run leaves state that changes the second"
    )


def cache_hit(engine: ModelRunner, prompt: Sequence[int], tokens: int) -> Check:
    """Prefix reuse: are the drafter's rows restored?"""
    if len(prompt) < 2:
        return Check("cache hit", NOT_APPLICABLE, "the prompt is one token, so there is no prefix to keep", stage=RUNNING)
    usual = speculate(engine, prompt, tokens)
    engine.reset()
    engine.prefill(prompt[:-1])
    with closing(engine.snapshot()) as snapshot:
        speculate(engine, prompt[::-1], tokens)  # overwrites the caches
        engine.restore(snapshot)
        hit = speculate(engine, prompt[-1:], tokens, keep=True)
    return _same("cache hit", usual, hit, "with a restored prefix", "report this: the drafter does not see the restored tokens")


def loop_acceptance(stats: Sequence[Stats], base: Measured) -> Check:
    """Tokens per step of generations against the teacher-forced estimate."""
    steps, matched = sum(s.steps for s in stats), sum(s.matched for s in stats)
    nan, real = sum(s.nan_drafts for s in stats), 1 + matched / max(1, steps)
    data = {"tokens_per_step": real, "estimate": base.tokens_per_block, "nan_drafts": nan, "steps": steps}
    found = f"{real:.2f} tokens per step in {steps} steps, {base.tokens_per_block:.2f} teacher-forced"
    if nan:
        return Check("acceptance", FAIL, f"{nan} blocks of drafts were NaN or Inf", "the drafter overflows on this device: use `device` CPU to tell, "
                     "and a drafter in another type", RUNNING, data)  # fmt: skip
    if real < 1 + IN_LOOP * (base.tokens_per_block - 1):
        return Check(
            "acceptance", WARN, found, "decoding accepts less than single blocks, but not this much less: report this", RUNNING, data
        )
    if real < 1.5:
        return Check(
            "acceptance",
            WARN,
            found,
            "try prompts like those the drafter was trained on (`prompts`), and both thinking modes",
            RUNNING,
            data,
        )
    return Check("acceptance", OK, found, "", RUNNING, data)


def replay(stats: Sequence[Stats]) -> Check:
    """Share of steps with a cached graph, and on CUDA of replayed ones."""
    computes = sum(s.computes for s in stats)
    built, grown = (sum(getattr(s, name) for s in stats) for name in ("graphs_built_after_warmup", "buffer_growths_after_warmup"))
    cuda = [s.cuda_graphs for s in stats if s.cuda_graphs is not None]
    replayed, eager = (sum(c[name] for c in cuda) for name in ("replayed", "eager"))
    rate = replayed / (replayed + eager) if replayed + eager else None
    data = {"graphs_computed": computes, "built_after_warmup": built, "buffers_grown_after_warmup": grown, "cuda_replay_rate": rate}
    found = f"{computes} graphs computed, {built} built and {grown} buffers grown after warm-up"
    if rate is not None:
        found += f", {100 * rate:.1f} % of the steps after each graph's warm-up replayed as CUDA graphs"
    if built or grown:
        return Check(
            "graph replay",
            FAIL,
            found,
            "report this with the model's name and the context: a graph was not prepared beforehand",
            RUNNING,
            data,
        )
    if rate is not None and rate < 0.9:
        remedy = "see whether GGML_CUDA_DISABLE_GRAPHS is set; routed experts at many rows keep ggml-cuda from replaying"
        return Check("graph replay", WARN, found, remedy, RUNNING, data)
    return Check("graph replay", OK, found, "", RUNNING, data)


def repeated_step(engine: ModelRunner, prompt: Sequence[int]) -> Check:
    """Repeats one step from the same state: CUDA launches the first call's kernels one by one and replays the third and fourth."""
    engine.read_candidates(None)  # graphs not yet run
    replays = 0
    try:
        for width in sorted({1, engine.options.width}):
            steps = [_step_logits(engine, prompt, width) for _ in range(REPEATS)]
            (first, _), *others = steps
            replays += sum(replayed for _, replayed in steps)
            off = max(float(np.abs(other - first).max()) for other, _ in others)
            if not all(np.array_equal(other, first) for other, _ in others):
                found = f"a step of {width} rows computed again from the same state gave logits that differ by {off:.2g}"
                remedy = (
                    "run with GGML_CUDA_PDL=0, or without CUDA graphs (GGML_CUDA_DISABLE_GRAPHS=1), and report this with the model's name"
                )
                return Check("repeated step", FAIL, found, remedy, RUNNING, {"width": width, "largest_difference": off})
    finally:
        engine.read_candidates(0)
    among = f", {replays} replayed ones among them," if replays else ""
    found = f"{REPEATS} calls of a step of each width{among} gave the same logits bit for bit"
    return Check("repeated step", OK, found, "", RUNNING, {"replays": replays})


def _step_logits(engine: ModelRunner, prompt: Sequence[int], width: int) -> tuple[np.ndarray, int]:
    """F32 [width, n_vocab]: logits of one step after the prompt; and 1 if the step was a replay, where known."""
    engine.reset()
    engine.prefill(prompt)
    before = _replays(engine)
    result = engine.plain_step() if width == 1 else engine.verify_step([prompt[0]] * (width - 1))
    replayed = _replays(engine) - before
    logits = np.stack([engine.candidates(row)[1] for row in range(width)])
    engine.accept(1, int(result.ids[0]))
    return logits, replayed


def _replays(engine: ModelRunner) -> int:
    return engine.io.replay.replayed if engine.io.replay is not None else 0


def time_split(engine: ModelRunner, stats: Sequence[Stats], width: int) -> Check:
    """Milliseconds of one speculative step: drafting, verification, commit of recurrent state, host."""
    fused, verify = _median(engine, lambda: engine.fused_step(width)), _median(engine, lambda: engine.verify_step([0] * (width - 1)))
    commit = _commit(engine, width) if engine.delta is not None else 0.0
    steps = max(1, sum(s.steps for s in stats))
    host = sum(s.host_us["host"] + s.host_us["upload"] for s in stats) / steps / 1000
    parts = {"draft": max(0.0, fused - verify), "verify": max(0.0, verify - commit), "commit": commit, "host": host}
    found = f"width {width}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in parts.items())
    data = {"width": width, "fused_ms": fused, **{f"{k}_ms": v for k, v in parts.items()}}
    if host > 0.25 * fused:
        return Check(
            "time split",
            WARN,
            found + ": the host takes a quarter of it or more",
            "leave a core free for the process; use fewer threads (`threads`)",
            RUNNING,
            data,
        )
    if parts["draft"] > parts["verify"]:
        return Check(
            "time split", WARN, found + ": drafting costs more than verifying", "use a drafter of fewer layers or fewer bits", RUNNING, data
        )
    return Check("time split", OK, found, "", RUNNING, data)


def other_work(backends: Sequence[Backend]) -> list[Check]:
    """Warns if other processes compete for the CPU."""
    if ThreadCounts([backend.rule for backend in backends if backend.rule is not None]).calm:
        return []
    found = "other processes used the CPU while this was measured; times and ratios are not those of an idle machine"
    return [Check("other work", WARN, found, "run it again when they have ended", RUNNING)]


def _median(engine: ModelRunner, step) -> float:
    engine.reset()
    engine.prefill([0] * 8)
    times = []
    for _ in range(min(RUNS + WARMUP, engine.cursor.room - engine.options.width)):
        began = time.perf_counter()
        result = step()
        engine.accept(1, int(result.ids[0]))
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[WARMUP:] or times)


def _commit(engine: ModelRunner, width: int) -> float:
    """The graph that only commits a block."""
    engine.reset()
    engine.prefill([0] * 8)
    times = []
    for _ in range(RUNS):
        result = engine.fused_step(width)
        engine.accept(1, int(result.ids[0]))
        began = time.perf_counter()
        engine.flush()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def _costs(engine: ModelRunner, base: Measured) -> dict[int, float]:
    """Step costs by width; measured twice, taking the minimum, before speculation is called unprofitable."""
    widths = candidate_widths(engine.options.width)
    costs = step_costs(engine, widths)
    if max(_gains(costs, base).values()) <= 1:
        again = step_costs(engine, widths)
        costs = {w: min(costs[w], again[w]) for w in costs}
    return costs


def _expected(width: int, base: Measured) -> float:
    """Expected tokens of a block of ``width`` rows."""
    return 1.0 + float(np.minimum(base.matched, width - 1).mean())


def _gains(costs: dict[int, float], base: Measured) -> dict[int, float]:
    """Predicted speed-up by width."""
    return {w: _expected(w, base) * costs[1] / costs[w] for w in costs if w > 1}


def pays(costs: dict[int, float], base: Measured, plain: Sequence[Stats], speculative: Sequence[Stats]) -> list[Check]:
    """Break-even acceptance by width, and predicted against measured speed-up."""
    gains = _gains(costs, base)
    expected, needed = {w: _expected(w, base) for w in gains}, {w: costs[w] / costs[1] for w in gains}
    width = max(gains, key=gains.__getitem__)
    rows = {str(w): {"ms": costs[w], "break_even": needed[w], "expected": expected[w], "speedup": gains[w]} for w in needed}
    found = f"width {width} needs {needed[width]:.2f} tokens per step to pay and gets {expected[width]:.2f}"
    worth = gains[width] > 1
    even = Check(
        "break-even", OK if worth else WARN, found, "" if worth else "speculation cannot pay here, and the policy decodes plainly: use a smaller or better drafter, or a device with more compute for its bandwidth", RUNNING, {"plain_ms": costs[1], "widths": rows},
    )  # fmt: skip
    speeds = [sum(s.emitted - 1 for s in legs) / sum(s.seconds["decode"] for s in legs) for legs in (plain, speculative)]
    measured, predicted = speeds[1] / speeds[0], max(1.0, gains[width])
    found = f"{measured:.2f}x measured ({speeds[0]:.0f} to {speeds[1]:.0f} tok/s), {predicted:.2f}x predicted from costs and acceptance"
    data = {"measured": measured, "predicted": predicted, "plain_tok_s": speeds[0], "speculative_tok_s": speeds[1]}
    slow = measured < 0.75 * predicted
    remedy = "run it again on a quiet machine; if it stays, compare the time split with `pyspec bench`" if slow else ""
    return [even, Check("speed-up", WARN if slow else OK, found, remedy, RUNNING, data)]


def chain(engine: ModelRunner, prompts: Sequence[Sequence[int]], tokens: int) -> Measured:
    """Acceptance of whole blocks while the target generates, for drafters without alternative readings."""
    matched, drafts, finite = [], [], True
    for prompt in prompts:
        engine.reset()
        engine.prefill(prompt)
        end = engine.cursor.committed + tokens
        while engine.cursor.committed < end and engine.cursor.room >= engine.options.width:
            result = engine.fused_step()
            agree = result.ids[:-1] == result.tokens[1:]
            right = int(agree.size if agree.all() else np.argmin(agree))
            engine.accept(right + 1, int(result.ids[right]))
            matched.append(right)
            drafts.append(result.tokens[1:])
            finite &= result.draft_finite
    return Measured(np.array(matched or [0]), np.concatenate(drafts or [np.empty(0, np.int32)]), np.empty((0, 0)), finite)


def examine(
    engine: ModelRunner, prompts: Sequence[Sequence[int]], tokens: int, base: Measured, ranked: Measured | None = None
) -> list[Check]:
    """All checks that run generations. ``ranked``: blocks with the drafter's top choices, if available."""
    costs = _costs(engine, base)
    longest = max(prompts, key=len)
    checks = [check(engine, longest, tokens) for check in (micro_batches, repeated_prompt, cache_hit)]
    full = [speculate(engine, prompt, tokens) for prompt in prompts]
    checks += [loop_acceptance(full, base), replay(full), repeated_step(engine, longest)]
    assert engine.drafter is not None
    plain, chosen = [], []
    for prompt in prompts:  # interleaved, against drift of the machine
        plain.append(speculate(engine, prompt, tokens, mode=PLAIN))
        chosen.append(speculate(engine, prompt, tokens, widths=SpeculationPolicy.measured_for(engine.drafter.method, costs)))
    return [*checks, time_split(engine, full, engine.options.width), *pays(costs, base, plain, chosen), trees.check(ranked or base, costs)]
