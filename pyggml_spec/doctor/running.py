"""Generations: chunked prompts, repeated prompts, graph replay, step times, and the speed-up."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import numpy as np

from ..engine.engine import generate
from ..engine.options import candidate_widths
from ..engine.runner import ModelRunner
from ..engine.sequence import PLAIN, SPECULATIVE, GenerationOptions
from ..engine.stats import Stats
from ..errors import TemplateError
from ..ggml.cores import ThreadCounts
from ..ggml.device import Backend
from ..speculation.calibrate import step_costs
from ..speculation.policy import SpeculationPolicy
from ..text.template import KEY, ChatTemplate
from ..text.tokenizer import Tokenizer
from ..tools.anatomy import dissect, fits
from . import trees
from .probe import KNOWN, Measured, Probe, Reading, write_passages
from .report import FAIL, NOT_APPLICABLE, OK, RUNNING, WARN, Check

PIECE = 32
AGREES = 0.6  # share of accepted drafts that has to remain; batch shapes differ in the last bit
IN_LOOP = 0.35  # the same for decoding, whose blocks start after a rejection
MATTERS = 0.8  # share of the best variant's accepted drafts below which a variant is reported
REPEATS = 4  # calls of a graph until the last ones are replays

_Check = partial(Check, stage=RUNNING)


def speculate(engine: ModelRunner, prompt: Sequence[int], tokens: int, *, mode: str = SPECULATIVE, piece: int = 0, keep: bool = False,
              policy: SpeculationPolicy | None = None) -> Stats:  # fmt: skip
    """Statistics of one generation. ``piece``: prefill chunk; ``keep``: continue the current sequence."""
    if not keep:
        engine.reset(drafting=mode == SPECULATIVE)
    prompt, stats = list(prompt), Stats()
    while piece and len(prompt) > piece:
        engine.prefill(prompt[:piece])
        prompt = prompt[piece:]
    for _ in generate(engine, prompt, GenerationOptions(tokens, mode, engine.options.width, ignore_end=True), stats, policy=policy):
        pass
    return stats


def _same(name: str, usual: Stats, other: Stats, how: str, remedy: str) -> Check:
    data = {"usual": usual.tokens_per_step, "other": other.tokens_per_step, "drafted": other.drafted, "nan_drafts": other.nan_drafts}
    found = f"{other.tokens_per_step:.2f} tokens per step {how}, {usual.tokens_per_step:.2f} otherwise"
    broken = other.nan_drafts or not other.drafted or other.matched < AGREES * usual.matched
    return _Check(name, FAIL if broken else OK, found, remedy if broken else "", data=data)


def same_prompt(engine: ModelRunner, prompt: Sequence[int], tokens: int) -> Iterator[Check]:
    """The same prompt in chunks, again, and from a restored prefix: does the drafter see all of it?"""
    usual = speculate(engine, prompt, tokens)
    if len(prompt) <= PIECE:
        yield _Check("micro-batches", NOT_APPLICABLE, f"the prompt has {len(prompt)} tokens, one chunk holds {PIECE}")
    else:
        how = f"with the prompt in {-(-len(prompt) // PIECE)} chunks"
        remedy = "report this: the hidden states of some chunks do not reach the drafter"
        yield _same("micro-batches", usual, speculate(engine, prompt, tokens, piece=PIECE), how, remedy)
    remedy = "report this: the first run leaves state that changes the second"
    yield _same("repeated prompt", usual, speculate(engine, prompt, tokens), "for the same prompt again", remedy)
    if len(prompt) < 2:
        yield _Check("cache hit", NOT_APPLICABLE, "the prompt is one token, so there is no prefix to keep")
        return
    engine.reset()
    engine.prefill(prompt[:-1])
    with closing(engine.snapshot()) as snapshot:
        speculate(engine, prompt[::-1], tokens)  # overwrites the caches
        engine.restore(snapshot)
        hit = speculate(engine, prompt[-1:], tokens, keep=True)
    yield _same("cache hit", usual, hit, "with a restored prefix", "report this: the drafter does not see the restored tokens")


def loop_acceptance(stats: Sequence[Stats], base: Measured) -> Check:
    """Tokens per step of generations against the teacher-forced estimate."""
    steps, matched, nan = (sum(getattr(s, name) for s in stats) for name in ("steps", "matched", "nan_drafts"))
    real = 1 + matched / max(1, steps)
    check = partial(
        _Check, "acceptance", data={"tokens_per_step": real, "estimate": base.tokens_per_block, "nan_drafts": nan, "steps": steps}
    )
    found = f"{real:.2f} tokens per step in {steps} steps, {base.tokens_per_block:.2f} teacher-forced"
    if nan:
        remedy = "the drafter overflows on this device: use `device` CPU to tell, and a drafter in another type"
        return check(FAIL, f"{nan} blocks of drafts were NaN or Inf", remedy)
    if real < 1 + IN_LOOP * (base.tokens_per_block - 1):
        return check(WARN, found, "decoding accepts less than single blocks, but not this much less: report this")
    if real < 1.5:
        return check(WARN, found, "try prompts like those the drafter was trained on (`prompts`), and both thinking modes")
    return check(OK, found)


def replay(stats: Sequence[Stats]) -> Check:
    """Share of steps with a cached graph, and on CUDA of replayed ones."""
    names = "computes", "graphs_built_after_warmup", "buffer_growths_after_warmup"
    computes, built, grown = (sum(getattr(s, name) for s in stats) for name in names)
    cuda = [s.cuda_graphs for s in stats if s.cuda_graphs is not None]
    replayed, eager = (sum(c[name] for c in cuda) for name in ("replayed", "eager"))
    rate = replayed / (replayed + eager) if replayed + eager else None
    data = {"graphs_computed": computes, "built_after_warmup": built, "buffers_grown_after_warmup": grown, "cuda_replay_rate": rate}
    check, found = (
        partial(_Check, "graph replay", data=data),
        f"{computes} graphs computed, {built} built and {grown} buffers grown after warm-up",
    )
    if rate is not None:
        found += f", {100 * rate:.1f} % of the steps after each graph's warm-up replayed as CUDA graphs"
    if built or grown:
        return check(FAIL, found, "report this with the model's name and the context: a graph was not prepared beforehand")
    if rate is not None and rate < 0.9:
        return check(WARN, found, "see whether GGML_CUDA_DISABLE_GRAPHS is set; routed experts at many rows keep ggml-cuda from replaying")
    return check(OK, found)


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
                return _Check("repeated step", FAIL, found, remedy, data={"width": width, "largest_difference": off})
    finally:
        engine.read_candidates(0)
    among = f", {replays} replayed ones among them," if replays else ""
    found = f"{REPEATS} calls of a step of each width{among} gave the same logits bit for bit"
    return _Check("repeated step", OK, found, data={"replays": replays})


def _step_logits(engine: ModelRunner, prompt: Sequence[int], width: int) -> tuple[np.ndarray, int]:
    """F32 [width, n_vocab]: logits of one step after the prompt; and 1 if the step was a replay, where known."""
    engine.reset()
    engine.prefill(prompt)
    counts = engine.io.replay
    before = counts.replayed if counts is not None else 0
    result = engine.plain_step() if width == 1 else engine.verify_step([prompt[0]] * (width - 1))
    replayed = counts.replayed - before if counts is not None else 0
    logits = np.stack([engine.candidates(row)[1] for row in range(width)])
    engine.accept(1, int(result.ids[0]))
    return logits, replayed


def time_split(engine: ModelRunner, width: int) -> Check:
    """Milliseconds of one speculative step: drafting, verification, commit of recurrent state, host."""
    if not fits(engine, width):
        return _Check("time split", NOT_APPLICABLE, "the context has no room for the measured steps; raise `n_ctx`")
    step = dissect(engine, width)
    parts = {
        "draft": max(0.0, step.draft_ms),
        "verify": max(0.0, step.verify_ms - step.commit_ms),
        "commit": step.commit_ms,
        "host": step.host_ms,
    }
    found = f"width {width}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in parts.items())
    data = {"width": width, "fused_ms": step.step_ms, **{f"{k}_ms": v for k, v in parts.items()}}
    check = partial(_Check, "time split", data=data)
    if step.host_ms > 0.25 * step.step_ms:
        remedy = "leave a core free for the process; use fewer threads (`threads`)"
        return check(WARN, found + ": the host takes a quarter of it or more", remedy)
    if parts["draft"] > parts["verify"]:
        return check(WARN, found + ": drafting costs more than verifying", "use a drafter of fewer layers or fewer bits")
    return check(OK, found)


def other_work(backends: Sequence[Backend]) -> list[Check]:
    """Warns if other processes compete for the CPU."""
    if ThreadCounts([backend.rule for backend in backends if backend.rule is not None]).calm:
        return []
    found = "other processes used the CPU while this was measured; times and ratios are not those of an idle machine"
    return [_Check("other work", WARN, found, "run it again when they have ended")]


def _costs(engine: ModelRunner, base: Measured) -> dict[int, float]:
    """Step costs by width; measured twice, taking the minimum, before speculation is called unprofitable."""
    widths = candidate_widths(engine.options.width)
    costs = step_costs(engine, (1, *widths))
    if max(base.expected(w) * costs[1] / costs[w] for w in costs if w > 1) <= 1:
        again = step_costs(engine, (1, *widths))
        costs = {w: min(costs[w], again[w]) for w in costs}
    return costs


def pays(costs: dict[int, float], base: Measured, plain: Sequence[Stats], speculative: Sequence[Stats]) -> list[Check]:
    """Break-even acceptance by width, and predicted against measured speed-up."""
    expected, needed = ({w: of(w) for w in costs if w > 1} for of in (base.expected, lambda w: costs[w] / costs[1]))
    gains = {w: expected[w] / needed[w] for w in needed}
    width = max(gains, key=gains.__getitem__)
    rows = {str(w): {"ms": costs[w], "break_even": needed[w], "expected": expected[w], "speedup": gains[w]} for w in needed}
    found = f"width {width} needs {needed[width]:.2f} tokens per step to pay and gets {expected[width]:.2f}"
    worth = gains[width] > 1
    remedy = "" if worth else (
        "speculation cannot pay here, and the policy decodes plainly: use a smaller or better drafter, or a device with more compute for its bandwidth"
    )  # fmt: skip
    even = _Check("break-even", OK if worth else WARN, found, remedy, data={"plain_ms": costs[1], "widths": rows})
    speeds = [sum(s.emitted - 1 for s in legs) / sum(s.seconds["decode"] for s in legs) for legs in (plain, speculative)]
    measured, predicted = speeds[1] / speeds[0], max(1.0, gains[width])
    found = f"{measured:.2f}x measured ({speeds[0]:.0f} to {speeds[1]:.0f} tok/s), {predicted:.2f}x predicted from costs and acceptance"
    data = {"measured": measured, "predicted": predicted, "plain_tok_s": speeds[0], "speculative_tok_s": speeds[1]}
    slow = measured < 0.75 * predicted
    remedy = "run it again on a quiet machine; if it stays, compare the time split with `pyspec bench`" if slow else ""
    return [even, _Check("speed-up", WARN if slow else OK, found, remedy, data=data)]


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


def ways(template: ChatTemplate, tokenizer: Tokenizer, prompts: Sequence[str]) -> dict[str, list[list[int]]]:
    """Token ids of each prompt by variant."""
    modes = {"template, thinking": True, "template, no thinking": False} if template.can_think else {"template": None}
    out = {"raw text": [tokenizer.encode(prompt) for prompt in prompts]}
    for name, thinking in modes.items():
        out[name] = [template.encode(tokenizer, [{"role": "user", "content": prompt}], thinking=thinking) for prompt in prompts]
    return out


def template_and_thinking(
    engine: ModelRunner, tokenizer: Tokenizer, probe: Probe, reading: Reading, prompts: Sequence[str], tokens: int
) -> Check:
    """Acceptance of the target's own text for each variant."""
    check, file = partial(_Check, "template and thinking"), engine.target.file
    if KEY not in file.metadata:
        return check(NOT_APPLICABLE, "the target has no chat template")
    try:
        asked = ways(ChatTemplate.from_gguf(file), tokenizer, prompts)
    except TemplateError as error:
        return check(WARN, f"the template cannot be measured: {error}", "use a model file with a working template")
    tokens = min(tokens, engine.options.n_ctx - max(len(ids) for both in asked.values() for ids in both) - 1)
    if tokens < KNOWN + 8:
        return check(NOT_APPLICABLE, f"the rendered prompts leave no room in a context of {engine.options.n_ctx}; use a larger `n_ctx`")
    kept, found = probe.passages, {}
    try:
        for way, ids in asked.items():
            probe.passages = write_passages(engine, ids, sorted(kept[0].features), tokens)
            found[way] = probe.measure(reading).tokens_per_block
    finally:
        probe.passages = kept
    best = max(found, key=found.__getitem__)
    text = ", ".join(f"{way} {value:.2f}" for way, value in found.items()) + " tokens per block"
    if any(value - 1 < MATTERS * (found[best] - 1) for value in found.values()):
        return check(WARN, text, f"the drafter was trained for {best!r}: prompt that way where the task allows it", data={"ways": found})
    return check(OK, text, data={"ways": found})


def examine(
    engine: ModelRunner, prompts: Sequence[Sequence[int]], tokens: int, base: Measured, ranked: Measured | None = None
) -> list[Check]:
    """All checks that run generations. ``ranked``: blocks with the drafter's top choices, if available."""
    costs = _costs(engine, base)
    longest = max(prompts, key=len)
    checks = list(same_prompt(engine, longest, tokens))
    full = [speculate(engine, prompt, tokens) for prompt in prompts]
    checks += [loop_acceptance(full, base), replay(full), repeated_step(engine, longest)]
    assert engine.drafter is not None
    plain, chosen = [], []
    for prompt in prompts:  # interleaved, against drift of the machine
        plain.append(speculate(engine, prompt, tokens, mode=PLAIN))
        chosen.append(speculate(engine, prompt, tokens, policy=SpeculationPolicy.measured_for(engine.drafter.method, costs)))
    return [*checks, time_split(engine, engine.options.width), *pays(costs, base, plain, chosen), trees.check(ranked or base, costs)]
