"""pyspec bench"""

import sys
from dataclasses import fields
from typing import Any

import click
from click.core import ParameterSource

from ..api import load
from ..errors import PyspecError
from ..ggml.library import versions
from ..sampling.sampler import Sampling
from ..speculation.calibrate import Waiting
from ..speculation.synthetic import SyntheticAcceptance
from ..tools.anatomy import anatomy
from ..tools.bench import BenchOptions, Repeated, bench
from ..tools.bench_prompts import PromptsOptions
from ..tools.bench_slots import bench_slots, tokens_needed
from ..tools.split_steps import copy_speeds, split_steps
from .bench_prompts import chosen_prompts, measure, modes
from .help import GroupedCommand
from .main import EXIT_INTERRUPT
from .options import measuring
from .report import BUSY, configuration_line
from .sampling import sampler_options, take_sampling
from .tables import json_line, written
from .terminal import Interrupt, progress_line, say, size


class Rates(click.ParamType):
    name = "P[,P...]"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            rates = tuple(float(part) for part in value.split(","))
            SyntheticAcceptance.of_rates(rates)
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)
        except PyspecError as error:
            self.fail(str(error), param, ctx)
        return rates


class _Numbers(click.ParamType):
    name = "N[,N...]"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(",") if part != "")
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers", param, ctx)
        if any(n < 0 for n in numbers):
            self.fail(f"{value!r} holds a negative number", param, ctx)
        return numbers


@click.command("bench", cls=GroupedCommand)
@measuring("what the measurements need; with --prompts what the model was trained with, or as much as memory has room for")
@click.option(
    "-p", "--n-prompt", "lengths", type=_Numbers(), default="512", show_default=True, help="Prompt lengths to measure; 0 for none."
)
@click.option(
    "-n", "--n-gen", "--tokens", "tokens", type=click.IntRange(0), default=128, show_default=True, help="Tokens to generate; 0 for none."
)
@click.option(
    "-d", "--n-depth", "--depths", "depths", type=_Numbers(), default="0", show_default=True, help="Tokens in the context beforehand."
)
@click.option("-r", "--repetitions", type=click.IntRange(1), help="Measured runs of every leg. Default: 5, or 3 with --prompts.")
@click.option(
    "--synthetic-acceptance",
    "--spec-synth-len",
    "synthetic",
    type=float,
    help="Accept L tokens per full block on average, at random. The text is not valid.",
)
@click.option(
    "--spec-synth-rates",
    "rates",
    type=Rates(),
    default=(),
    help="Accept the draft of each position in this share of the blocks, at random, instead.",
)
@click.option("--slots", type=_Numbers(), help="Sequences at once: aggregate speed for each of these numbers, instead of the other tests.")
@click.option(
    "--prompts",
    metavar="FILE",
    help='Acceptance and speed on real prompts instead, by category: JSON lines with a "prompt" or "messages" each, '
    "or included ones: all, code, chat, reasoning.",
)
@click.option(
    "--think/--no-think", "thinking", default=None, help="With --prompts: one thinking mode only, if the template has one. Default: both."
)
@sampler_options
@click.option("-o", "--output", type=click.Choice(["md", "csv", "jsonl"]), default="md", show_default=True, help="Form of the rows.")
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object with everything.")
def command(
    target, draft, options, lengths, tokens, depths, repetitions, synthetic, rates, slots, prompts, thinking, output, as_json, **more,
):  # fmt: skip
    """Measures speed, or acceptance on real prompts.

    Prompt processing, plain and speculative decoding in one process, interleaved; with --prompts, plain and speculative decoding of each prompt
    in turn. --think and the sampling options go with --prompts: greedy without them, and seeds count up from --seed (0) with them.
    """
    _check_combination(prompts is not None)
    if rates and synthetic is not None:
        raise click.UsageError("--synthetic-acceptance and --spec-synth-rates both say how many drafts are accepted; give one of them")
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
            of_prompts = PromptsOptions(tokens, repetitions or 3, sampling, modes(thinking))
            sys.exit(measure(session, chosen, of_prompts, interrupt, output, as_json))
    lengths = tuple(n for n in lengths if n)
    if not lengths and not tokens:
        raise click.UsageError("there is nothing to measure: give prompt lengths (-p) or tokens to generate (-n)")
    depths = depths or (0,)
    cache_types = {field.name: getattr(options, field.name) for field in fields(options) if "cache_type" in field.name}
    measured = BenchOptions(lengths, tokens, depths, repetitions or 5, synthetic, options.draft_width, rates)
    if slots is not None and (0 in slots or not slots or not tokens):
        raise click.UsageError("--slots takes numbers from 1 up, and needs tokens to generate (-n)")
    need = tokens_needed(measured) if slots else max(depths) + max([*lengths, tokens + 8])
    with progress_line() as progress:
        session = load(target, draft, options, progress, n_ctx=options.n_ctx or max(need, 512))
    with session:
        say(configuration_line(session.configuration(), None))
        with Waiting(session.engine) as waiting:
            rows, interrupted = _measured(session, slots, measured)
        if not rows:
            sys.exit(EXIT_INTERRUPT)
        click.echo(_slots_table(rows, output) if slots else _table(rows, output))
        parts = anatomy(session, _widths(rows), max(8, depths[-1])) if tokens and not slots and not interrupted else []
        if output == "md" and parts:
            click.echo("\n" + _parts_table(parts))
        split, copies = [], []
        if parts and len(session.backends) > 1:
            copies = copy_speeds(session.engine)
            split = split_steps(session.engine, tuple(p.width for p in parts), max(8, depths[-1]), copies)
            if output == "md":
                click.echo("\n" + _split_tables(split, copies))
        if as_json:
            about = {"versions": versions(), "device": session.backend.device.description, "threads": session.backend.threads}
            about["kernels"] = session.backend.kernels
            files = {
                "target": str(session.target.file.path),
                "drafter": " and ".join(str(m.file.path) for m in session.drafter.methods) if session.drafter else None,
            }
            click.echo(json_line({**about, **files, "cache_types": cache_types, "costs_ms": session.costs, "synthetic": synthetic, "rows": [r.as_dict() for r in rows],
                                   "anatomy": [p.as_dict() for p in parts], "split": [s.as_dict() for s in split], "copies": [c.as_dict() for c in copies]}))  # fmt: skip
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
    context = click.get_current_context()
    only = (
        {"lengths", "depths", "synthetic", "rates", "slots"} if with_prompts else {"thinking", *(field.name for field in fields(Sampling))}
    )
    given = [
        p.opts[-1] for p in context.command.params if p.name in only and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)} and --prompts do not go together" if with_prompts else f"{', '.join(given)} needs --prompts"
        )


def _widths(rows) -> tuple[int, ...]:
    """Plain decoding, and the width that most speculative steps had."""
    used = [max(r.widths, key=r.widths.get) for r in rows if r.widths]
    return tuple(sorted({1, *used}))


def _parts_table(parts) -> str:
    lines = ["| step | ms | commit | draft | verify | host | nodes | moved | of copy bandwidth |", "|" + "---|" * 9]
    for p in parts:
        name = f"width {p.width}" if p.width > 1 else "plain"
        lines.append(
            f"| {name} | {p.step_ms:.2f} | {p.commit_ms:.2f} | {p.draft_ms:.2f} | {p.verify_ms:.2f} | {p.host_ms:.2f} "
            f"| {p.nodes} | {size(p.bytes)} | {100 * p.bandwidth_share:.0f} % |"
        )
    return "\n".join(lines)


def _split_tables(steps, copies) -> str:
    lines = ["| step | ms | device | layers | computes | copies | moved | copying | waits |", "|" + "---|" * 9]
    for step in steps:
        name = f"width {step.width}" if step.width > 1 else "plain"
        for d in step.devices:
            lines.append(
                f"| {name} | {step.step_ms:.2f} | {d.device} | {d.layers} | {d.compute_ms:.2f} ms | {d.copies} | {size(d.copied_bytes)} "
                f"| {d.copy_ms:.3f} ms | {100 * d.waits:.0f} % |"
            )
    lines += ["", "| copies | 4 KiB | large ones | how |", "|" + "---|" * 4]
    for c in copies:
        speed = f"{c.bandwidth / 1e9:.1f} GB/s" if c.bandwidth else "no memory to measure it"
        lines.append(f"| {c.source} to {c.target} | {c.small_us:.0f} us | {speed} | {c.way} |")
    return "\n".join(lines)


def _slots_table(rows, output: str) -> str:
    header = ["test", "tok/s", "deviation", "per sequence", "ms/step", "tokens/step", "widths", "rows used", "memory per slot"]
    cells = []
    for r in rows:
        widths = " ".join(f"{w}:{n}" for w, n in sorted(r.widths.items()))
        steps = [f"{r.mean / r.slots:.1f}", f"{r.ms_per_step:.2f}", f"{r.tokens_per_step:.2f}"]
        cells.append([r.test, f"{r.mean:.1f}", f"{r.deviation:.1f}", *steps, widths, f"{100 * r.used:.0f} %", size(r.slot_bytes)])
    return written(rows, header, cells, output)


def _table(rows, output: str) -> str:
    header = ["test", "tok/s", "deviation", "ms/step", "tokens/step", "upload", "launch", "read+wait", "host", "replayed"]
    cells = []
    for r in rows:
        us = r.phases_us
        phases = [f"{us[k]:.0f} us" for k in ("upload", "compute", "read", "host")] if us else [""] * 4
        steps = [f"{r.ms_per_step:.2f}", f"{r.tokens_per_step:.2f}"] if r.ms_per_step else ["", ""]
        replayed = "" if r.replay_rate is None else f"{100 * r.replay_rate:.0f} %"
        cells.append([r.test, f"{r.mean:.1f}", f"{r.deviation:.1f}", *steps, *phases, replayed])
    return written(rows, header, cells, output)
