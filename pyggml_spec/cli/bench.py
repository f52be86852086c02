"""pyspec bench"""

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from ..api import load
from ..sampling.sampler import Sampling
from ..speculation.calibrate import Waiting
from ..tools.anatomy import anatomy
from ..tools.bench import BenchOptions, Repeated, bench
from ..tools.bench_prompts import PromptsOptions
from ..tools.bench_slots import bench_slots, tokens_needed
from ..tools.split_steps import copy_speeds, split_steps
from .bench_prompts import chosen_prompts, conditions, measure, session_files
from .help import GroupedCommand, flag, option
from .main import EXIT_INTERRUPT
from .options import MEASURED, Numbers, check_synthetic, load_options, synthetic_options, with_options
from .report import BUSY, configuration_line
from .sampling import sampler_options, take_sampling
from .terminal import Column, Interrupt, json_line, progress_line, say, size, table, written

_NUMBERS = Numbers("N[,N...]", "whole numbers", int, lambda numbers: "{} holds a negative number" if min(numbers, default=0) < 0 else "")


@click.command("bench", cls=GroupedCommand)
@load_options(
    *MEASURED, context="what the measurements need; with --prompts what the model was trained with, or as much as memory has room for"
)
@option("-p --n-prompt lengths", "Prompt lengths to measure; 0 for none.", type=_NUMBERS, shown="512")
@option("-n --n-gen --tokens tokens", "Tokens to generate; 0 for none.", type=click.IntRange(0), shown=128)
@option("-d --n-depth --depths depths", "Tokens in the context beforehand.", type=_NUMBERS, shown="0")
@option("-r --repetitions", "Measured runs of every leg. Default: 5, or 3 with --prompts.", type=click.IntRange(1))
@with_options(synthetic_options(shown=True))
@option("--slots", "Sequences at once: aggregate speed for each of these numbers, instead of the other tests.", type=_NUMBERS)
@option(
    "--prompts",
    'Acceptance and speed on real prompts instead, by category: JSON lines with a "prompt" or "messages" each, or included ones: all, code, chat, reasoning.',
    metavar="FILE",
)
@option("--think/--no-think thinking", "With --prompts: one thinking mode only, if the template has one. Default: both.", default=None)
@sampler_options
@option("-o --output", "Form of the rows.", type=click.Choice(["md", "csv", "jsonl"]), shown="md")
@flag("--json as_json", "The last line is one JSON object with everything.")
def command(
    target, draft, options, lengths, tokens, depths, repetitions, synthetic, rates, slots, prompts, thinking, output, as_json, **more,
):  # fmt: skip
    """Measures speed, or acceptance on real prompts.

    Prompt processing, plain and speculative decoding in one process, interleaved; with --prompts, plain and speculative decoding of each prompt
    in turn. --think and the sampling options go with --prompts: greedy without them, and seeds count up from --seed (0) with them.
    """
    _check_combination(prompts is not None)
    check_synthetic(synthetic, rates)
    wanted = take_sampling(more)
    if prompts is not None:
        if not tokens:
            raise click.UsageError("--prompts needs tokens to generate (-n)")
        chosen = chosen_prompts(prompts)
        with progress_line() as progress:
            session = load(target, draft, options, progress)
        with session, Interrupt() as interrupt:
            sampling, notes = wanted.sampling(session.target.file)
            say(configuration_line(session.configuration(), None, sampling.describe(), notes))
            of_prompts = PromptsOptions(tokens, repetitions or 3, sampling, (True, False) if thinking is None else (thinking,))
            sys.exit(measure(session, chosen, of_prompts, interrupt, output, as_json))
    lengths = tuple(n for n in lengths if n)
    if not lengths and not tokens:
        raise click.UsageError("there is nothing to measure: give prompt lengths (-p) or tokens to generate (-n)")
    depths = depths or (0,)
    measured = BenchOptions(lengths, tokens, depths, repetitions or 5, synthetic, options.draft_width, rates)
    if slots is not None and (0 in slots or not slots or not tokens):
        raise click.UsageError("--slots takes numbers from 1 up, and needs tokens to generate (-n)")
    need = tokens_needed(measured) if slots else max(depths) + max([*lengths, tokens + 8])
    with progress_line() as progress:
        session = load(target, draft, options, progress, n_ctx=options.n_ctx or max(need, 512))
    with session:
        say(configuration_line(session.configuration(), None))
        kv, draft_kv = session.runner.options.kv, session.runner.options.draft_kv
        cache_types = {"cache_type_k": kv.k, "cache_type_v": kv.v, "draft_cache_type_k": draft_kv.k, "draft_cache_type_v": draft_kv.v}
        with Waiting(session.runner) as waiting:
            rows, interrupted = _measured(session, slots, measured)
        if not rows:
            sys.exit(EXIT_INTERRUPT)
        click.echo(written(rows, _SLOT_COLUMNS if slots else _COLUMNS, output))
        parts = anatomy(session, _widths(rows), max(8, depths[-1])) if tokens and not slots and not interrupted else []
        if output == "md" and parts:
            click.echo("\n" + _parts_table(parts))
        split, copies = [], []
        if parts and len(session.backends) > 1:
            copies = copy_speeds(session.runner)
            split = split_steps(session.runner, tuple(p.width for p in parts), max(8, depths[-1]), copies)
            if output == "md":
                click.echo("\n" + _split_tables(split, copies))
        if as_json:
            files = [str(file) for file in session_files(session).values()]
            measured_rows = {"rows": rows, "anatomy": parts, "split": split, "copies": copies}
            about = {**conditions(session), "target": files[0], "drafter": " and ".join(files[1:]) or None, "cache_types": cache_types}
            about |= {"costs_ms": session.costs, "synthetic": synthetic}
            click.echo(json_line(about | {name: [one.as_dict() for one in ones] for name, ones in measured_rows.items()}))
    if waiting.much:
        say(BUSY)
    if interrupted:
        say("interrupted: the rows hold what was measured until then")
        sys.exit(EXIT_INTERRUPT)


def _measured(session, slots: tuple[int, ...] | None, options: BenchOptions) -> tuple[list, bool]:
    """The rows, and whether Ctrl-C ended the measurement; they are those with a run then."""
    seen: dict[str, Repeated] = {}

    def done(row: Any) -> None:
        seen[row.test] = row

    try:
        return bench_slots(session, slots, options, done) if slots else bench(session, options, done), False
    except KeyboardInterrupt:
        return [row for row in seen.values() if row.runs], True


def _check_combination(with_prompts: bool) -> None:
    """Options of the other kind of measurement would be without effect."""
    context, other = click.get_current_context(), {"thinking", *(field.name for field in fields(Sampling))}
    only = {"lengths", "depths", "synthetic", "rates", "slots"} if with_prompts else other
    params = [p for p in context.command.params if p.name in only]
    given = [p.opts[-1] for p in params if context.get_parameter_source(p.name or "") is ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(", ".join(given) + (" and --prompts do not go together" if with_prompts else " needs --prompts"))


def _widths(rows) -> tuple[int, ...]:
    """Plain decoding, and the width that most speculative steps had."""
    used = [max(r.widths, key=r.widths.get) for r in rows if r.widths]
    return tuple(sorted({1, *used}))


def _step_name(width: int) -> str:
    return f"width {width}" if width > 1 else "plain"


def _parts_table(parts) -> str:
    header = "step", "ms", "commit", "draft", "verify", "host", "nodes", "moved", "of copy bandwidth"
    cells = []
    for p in parts:
        times = [f"{ms:.2f}" for ms in (p.step_ms, p.commit_ms, p.draft_ms, p.verify_ms, p.host_ms)]
        cells.append([_step_name(p.width), *times, str(p.nodes), size(p.bytes), f"{100 * p.bandwidth_share:.0f} %"])
    return table(header, cells)


def _split_tables(steps, copies) -> str:
    cells = []
    for step in steps:
        for d in step.devices:
            times = f"{d.compute_ms:.2f} ms", str(d.copies), size(d.copied_bytes), f"{d.copy_ms:.3f} ms", f"{100 * d.waits:.0f} %"
            cells.append([_step_name(step.width), f"{step.step_ms:.2f}", d.device, d.layers, *times])
    shares = table(("step", "ms", "device", "layers", "computes", "copies", "moved", "copying", "waits"), cells)
    speeds = [f"{c.bandwidth / 1e9:.1f} GB/s" if c.bandwidth else "no memory to measure it" for c in copies]
    cells = [[f"{c.source} to {c.target}", f"{c.small_us:.0f} us", speed, c.way] for c, speed in zip(copies, speeds)]
    return shares + "\n\n" + table(("copies", "4 KiB", "large ones", "how"), cells)


def _phase(name: str) -> Callable[[Any], str]:
    return lambda r: f"{r.phases_us[name]:.0f} us" if r.phases_us else ""


_SPEED: list[Column] = [("test", lambda r: r.test), ("tok/s", lambda r: f"{r.mean:.1f}"), ("deviation", lambda r: f"{r.deviation:.1f}")]
_SLOT_COLUMNS: list[Column] = [
    *_SPEED,
    ("per sequence", lambda r: f"{r.mean / r.slots:.1f}"),
    ("ms/step", lambda r: f"{r.ms_per_step:.2f}"),
    ("tokens/step", lambda r: f"{r.tokens_per_step:.2f}"),
    ("widths", lambda r: " ".join(f"{w}:{n}" for w, n in sorted(r.widths.items()))),
    ("rows used", lambda r: f"{100 * r.used:.0f} %"),
    ("memory per slot", lambda r: size(r.slot_bytes)),
]
_COLUMNS: list[Column] = [
    *_SPEED,
    ("ms/step", lambda r: f"{r.ms_per_step:.2f}" if r.ms_per_step else ""),
    ("tokens/step", lambda r: f"{r.tokens_per_step:.2f}" if r.ms_per_step else ""),
    ("upload", _phase("upload")),
    ("launch", _phase("compute")),
    ("read+wait", _phase("read")),
    ("host", _phase("host")),
    ("replayed", lambda r: "" if r.replay_rate is None else f"{100 * r.replay_rate:.0f} %"),
]
