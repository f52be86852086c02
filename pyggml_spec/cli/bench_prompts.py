"""pyspec bench --prompts"""

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ..api import Session
from ..chat import CONTINUE, chat_template
from ..ggml.library import versions
from ..speculation.calibrate import Waiting
from ..tools.bench_prompts import PromptsOptions, PromptsRow, bench_prompts, summary
from ..tools.prompts import CATEGORIES, INCLUDED, Prompt, parse_prompts, prompt_file
from .main import EXIT_INTERRUPT
from .report import BUSY
from .terminal import Column, Interrupt, json_line, progress_line, say, written

_PIECE = 8 << 20  # bytes hashed at a time


def chosen_prompts(name: str) -> tuple[list[Prompt], dict]:
    """The prompts of a file or the included ones, and a description of the file. Raises PyspecError: as ``read_prompts``."""
    included = name == "all" or name in CATEGORIES
    path = INCLUDED if included else Path(name)
    data = prompt_file(path)
    prompts = [p for p in parse_prompts(data, path) if not included or name in ("all", p.category)]
    return prompts, {"file": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "prompts": len(prompts)}


def measure(
    session: Session, chosen: tuple[list[Prompt], dict], options: PromptsOptions, interrupt: Interrupt, output: str, as_json: bool
) -> int:
    """Measures ``chosen_prompts`` and prints; returns the exit code. After Ctrl-C complete runs are printed."""
    prompts, source = chosen
    if not options.sampling.is_greedy and options.sampling.seed is None:
        options = replace(options, sampling=replace(options.sampling, seed=0))
    template, _ = chat_template(session)
    with progress_line() as progress:
        about = _conditions(session, source, options, progress)
        origin = "none: messages are continued as one text" if template.source == CONTINUE else "the target's"
        about["template"] = {"origin": origin, "sha256": hashlib.sha256(template.source.encode("utf-8", "replace")).hexdigest()}
        with Waiting(session.runner) as waiting:
            rows = bench_prompts(session, prompts, options, template, interrupted=interrupt, progress=progress)
    about["costs_ms"] = session.costs
    click.echo(written(rows, _COLUMNS, output))
    if output == "md":
        click.echo("".join(f"\n* {name}: {value if isinstance(value, str) else json_line(value)}" for name, value in about.items()))
    elif output == "jsonl":
        click.echo(json_line({"conditions": about}))
    elif not as_json:
        say("conditions: " + json_line(about))
    if as_json:
        click.echo(json_line({"conditions": about, "rows": [row.as_dict() for row in rows]}))
    if waiting.much:
        say(BUSY)
    if any(row.runs and not row.acceptance for row in rows):
        why = "because plain decoding was expected to be faster, or texts are too short to try a block; --draft-width W measures it anyway"
        say(f"acceptance is empty where no draft was verified, {why}")
    if interrupt.asked:
        say(f"stopped after {len(rows[0].runs)} of {options.repetitions} runs")
    return EXIT_INTERRUPT if interrupt.asked else 0


def conditions(session: Session) -> dict[str, Any]:
    """What speeds depend on."""
    backend = session.backend
    return {"versions": versions(), "device": backend.device.description, "threads": backend.threads, "kernels": backend.kernels}


def session_files(session: Session) -> dict[str, Path]:
    """The files of the target and the drafters."""
    methods = session.drafter.methods if session.drafter is not None else ()
    drafters = {f"drafter {at + 1}" if at else "drafter": method.file.path for at, method in enumerate(methods)}
    return {"target": session.target.file.path, **drafters}


def _conditions(session: Session, source: dict, options: PromptsOptions, progress) -> dict:
    """Everything needed to reproduce the figures."""
    return {
        "command": " ".join(["pyspec", *sys.argv[1:]]).encode("utf-8", "replace").decode(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **conditions(session),
        **{name: _noted(path, progress) for name, path in session_files(session).items()},
        "prompts": source,
        "context": session.runner.options.n_ctx,
        "width": "chosen while running" if session.costs else session.runner.options.width,
        "kv_type": session.configuration().kv_type,
        "tokens": options.tokens,
        "runs": options.repetitions,
        "sampling": options.sampling.describe(),
        "seeds": options.seeds,
    }


def _noted(path: Path, progress) -> dict:
    digest, size, done = hashlib.sha256(), os.path.getsize(path), 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            progress(f"checksum of {path.name}", done := done + len(piece), size)
    return {"file": path.name, "bytes": size, "sha256": digest.hexdigest()}


def _figure(name: str, form: str, of: str = "mean", scale: float = 1.0) -> Callable[[PromptsRow], str]:
    def cell(row: PromptsRow) -> str:
        value = summary(getattr(row, name))[of]
        return "" if value is None else format(scale * value, form)

    return cell


_COLUMNS: list[Column] = [
    ("category", lambda row: row.category),
    ("thinking", lambda row: {None: "-", True: "on", False: "off"}[row.thinking]),
    ("prompts", lambda row: str(row.prompts)),
    ("runs", lambda row: str(len(row.runs))),
    ("acceptance %", _figure("acceptance", ".1f", scale=100)),
    ("deviation", _figure("acceptance", ".1f", "deviation", 100)),
    ("tokens/step", _figure("tokens_per_step", ".2f")),
    ("deviation", _figure("tokens_per_step", ".2f", "deviation")),
    ("plain tok/s", _figure("plain_speed", ".1f")),
    ("speculative tok/s", _figure("speed", ".1f")),
    ("speedup", _figure("speedup", ".2f")),
    ("deviation", _figure("speedup", ".2f", "deviation")),
]
