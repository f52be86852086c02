"""The configuration line printed before a run and the footer printed after it."""

import re
from collections.abc import Sequence

from ..api import Configuration
from ..engine.sequence import PLAIN, SPECULATIVE
from ..engine.stats import LEAST_WAITED, MUCH_WAITING, Stats
from ..ggml.device import graph_replay_enabled
from ..speculation.methods import MODELS
from .options import in_options
from .terminal import size

BUSY = (
    f"warning: other processes used the CPU for more than {100 * MUCH_WAITING:.0f} % of the time, so speeds, and what they are of each other, "
    "are not those of an idle machine"
)
LEAST_REPLAY = 0.99
AGREE = 1.33  # times as long as a plain step of the text, or as short, plain steps may have been measured to take
SPEEDS = re.compile(r": [^;(]*[^;( ]")  # in a reason
_BAR = " ▁▂▃▄▅▆▇█"


def configuration_line(e: Configuration, mode: str | None, sampling: str = "greedy", notes: Sequence[str] = (), slots: int = 1) -> str:
    """One line with everything that decides speed and memory, and one per note. ``slots``: sequences at once, each with that context."""
    where = f"{e.device} ({e.threads} thread{'s' * (e.threads > 1)}, kernels: {e.kernels})" if e.threads else e.device
    if e.drafter is None and e.lookup is None:
        draft = "no drafter: plain decoding"
    elif e.drafter is None:
        draft = f"n-gram drafts ({e.lookup}) where the text repeats" if mode in (None, SPECULATIVE) else f"{e.lookup} unused ({mode} mode)"
    elif mode == "plain":
        draft = f"drafter {e.drafter} unused (plain mode)"
    elif mode == "reference":
        draft = f"drafter {e.drafter} unused (reference mode: the text is that of --draft-width {e.width})"
    elif e.widths == (1,):
        draft = f"drafter {e.drafter} unused (no block width is faster than plain decoding here)"
    else:
        draft = f"drafter {e.drafter}, width " + (f"chosen from {'/'.join(map(str, e.widths))}" if e.widths else str(e.width))
    if e.drafter is not None and e.lookup is not None and mode in (None, SPECULATIVE):
        draft += f"; {e.lookup} too"
    if e.drafter is not None and not e.draws and mode in (None, SPECULATIVE) and not sampling.startswith("greedy"):
        draft += "; drafts are argmaxes on this build"
    if e.encoder is not None:
        draft += f" | pictures by {e.encoder}"
    m = e.memory
    parts = [
        f"weights {size(m['weights'] + m.get('draft_weights', 0))}",
        f"K/V {size(slots * (m['kv'] + m.get('draft_kv', 0)))} {e.kv_type}",
    ]
    if "recurrent" in m:
        parts.append(f"state {size(slots * m['recurrent'])}")
    parts.append(f"compute {size(m['compute'])}")
    context = f" {e.context}" if e.context.startswith("of ") else f" ({e.context})" if e.context else ""  # "20480 of 131072: memory"
    context += f" for each of {slots} slots" if slots > 1 else ""
    line = f"configuration: {e.target} on {where} | {draft} | {sampling} | context {e.n_ctx}{context} | {', '.join(parts)}"
    return "\n".join([line, *(f"note: {in_options(note)}" for note in (*e.notes, *notes))])


def footer(s: Stats, plain_ms: float | None, busy: bool = False) -> str:
    """Speed, acceptance and the proof that nothing was built while decoding.

    ``plain_ms``: cost of one plain step, measured by this process; ``busy``: while other processes used the CPU, so that it is not compared.
    """
    lines = [""]
    decode, alone = s.seconds["decode"], not (busy or s.contended)
    agrees = plain_ms is None or s.plain_ms is None or 1 / AGREE <= plain_ms / s.plain_ms <= AGREE
    if s.steps:
        compared = plain_ms if alone and agrees else None
        plain = f"plain {1000 / compared:.1f} tok/s (calibrated) | " if compared else ""
        gain = f" | speedup {s.tokens_per_second * compared / 1000:.2f}x" if compared and s.drafted else ""
        how = "decoded plainly at" if s.mode in (SPECULATIVE, PLAIN) and not s.drafted else s.mode
        lines.append(f"{plain}{how} {s.tokens_per_second:.1f} tok/s{gain}")
        lines.append(f"{s.emitted} tokens in {s.steps} steps: {s.tokens_per_step:.2f} per step, {1000 * decode / s.steps:.2f} ms per step")
    if s.drafted:
        positions = " ".join(f"{100 * p:.0f}" for p in s.matched_per_position)
        lines.append(f"accepted {s.matched} of {s.drafted} drafts ({100 * s.acceptance:.1f} %), by position: {positions} %")
        most, widest = max(s.block_sizes.values()), max(s.width, *s.block_sizes)
        bars = "".join(_BAR[round(8 * s.block_sizes.get(n, 0) / most)] for n in range(1, widest + 1))
        lines.append(f"tokens per step: 1 |{bars}| {widest}")
    if len(s.drafters) > 1 or s.drafters.keys() - {*MODELS}:
        by_method = [f"{method}: {right} of {n} in {steps} steps" for method, (steps, n, right) in s.drafters.items()]
        lines.append(f"drafts by {', '.join(by_method)}")
    if s.forced:
        lines.append(f"forced by the constraint: {s.forced} of the drafts, {s.forced_matched} accepted")
    if s.width_reason and s.widths:
        used = ", ".join(f"{n} at width {w}" if w > 1 else f"{n} plain" for w, n in sorted(s.widths.items()))
        why = s.width_reason if alone and agrees else SPEEDS.sub("", s.width_reason, 1)  # what is expected of steps is no speed of these
        lines.append(f"steps: {used}; {why}")
    lines += _of_others(s)
    if s.steps and plain_ms and not (alone and agrees):
        lines.append(
            "no speed of plain decoding to compare with: other processes used the CPU during the generation or the measurement after it"
        )
    if s.seed is not None:
        lines.append(f"sampling: {s.sampling}; --seed {s.seed}")
    if s.nan_drafts:
        lines.append("the drafter produced NaN or Inf: speculation was switched off; the text is the target's own")
    if s.cuda_graphs:
        lines.append(_replays(s, s.cuda_graphs))
    if s.expert_hit_rate is not None and (e := s.experts) is not None:
        choices = f"{100 * s.expert_hit_rate:.1f} % of {e['chosen']} choices were on the device, in layers with experts in host memory"
        lines.append(f"experts: {choices}; the host computed the others for {e['host_us'] / 1e6:.2f} s")
    ahead = f", {s.graphs_built_ahead} announced" if s.graphs_built_ahead else ""
    built = f"{s.computes} computed, {s.graphs_built} built ({s.graphs_built_after_warmup} after warm-up{ahead})"
    lines.append(f"graphs: {built}, {s.buffer_growths} buffers allocated ({s.buffer_growths_after_warmup} after warm-up)")
    reused = f", {s.reused_tokens} of them from the prefix cache" if s.reused_tokens else ""
    prefill = f"prefill {s.seconds['prefill']:.2f} s ({s.prompt_tokens} tokens{reused})"
    lines.append(f"load {s.seconds['load']:.2f} s, {prefill}, decode {decode:.2f} s; ended by: {ended(s)}")
    lines += [f"note: {note}" for note in s.notes]
    return "\n".join(lines)


def _of_others(s: Stats) -> list[str]:
    """What other work on the machine did to the text's speed."""
    if not s.contended:
        return []
    waited = f" for {s.waited_s:.1f} of {s.seconds['decode']:.1f} s" if s.waited_s and s.waited_s >= LEAST_WAITED else ""
    line = f"warning: other processes used the CPU{waited}, so the speeds are not those of an idle machine"
    if s.threads_follow and s.most_threads > 1:
        used = ", ".join(f"{n} steps by {threads} thread{'s' * (threads > 1)}" for threads, n in sorted(s.threads.items(), reverse=True))
        line += f"; fewer threads computed meanwhile: {used}"
    elif s.most_threads > 1:
        line += f"; -t {s.most_threads} keeps all threads, each of which waits whenever one does: leave -t out, use -t 1, or stop that work"
    return [line]


def _replays(s: Stats, c: dict[str, int]) -> str:
    rate = s.replay_rate
    line = f"CUDA graphs: {c['captured']} captured, {c['replayed']} steps replayed, {c['eager']} launched kernel by kernel after warm-up"
    if rate is None or rate >= LEAST_REPLAY:
        return line
    why = "they are switched off (--no-graphs or GGML_CUDA_DISABLE_GRAPHS)" if not graph_replay_enabled() else (
        "a matrix product over routed experts at this width stops the replay; a smaller --draft-width may keep it, "
        "or else this build of ggml has no CUDA graphs"
    )  # fmt: skip
    return f"{line}\nwarning: only {100 * rate:.0f} % of the steps were replayed, so launches cost time: {why}"


def ended(s: Stats) -> str:
    """Why a generation ended, and whether what it had to match is there as a whole."""
    return (s.stop_reason or "nothing") + (" (cut: not complete)" if s.cut else "")


def answer_line(s: Stats) -> str:
    """The one line that a chat shows below an answer."""
    drafts = f", {s.matched} of {s.drafted} drafts accepted" if s.drafted else ""
    reused = f", {s.reused_tokens} in the caches" if s.reused_tokens else ""
    return f"[{s.emitted} tokens, {s.tokens_per_second:.1f} tok/s{drafts}; prompt {s.prompt_tokens} tokens{reused}; ended by: {ended(s)}]"
