"""pyspec bench --prompts"""

import hashlib
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import click

from ..api import Session
from ..chat import CONTINUE, chat_template
from ..ggml.library import versions
from ..speculation.calibrate import Waiting
from ..tools.bench_prompts import PromptsOptions, PromptsRow, bench_prompts
from ..tools.prompts import CATEGORIES, INCLUDED, Prompt, parse_prompts, prompt_file
from .main import EXIT_INTERRUPT
from .report import BUSY
from .tables import json_line, written
from .terminal import Interrupt, progress_line, say

_PIECE = 8 << 20  # bytes hashed at a time
_HEADER = ["category", "thinking", "prompts", "runs", "acceptance %", "deviation", "tokens/step", "deviation", "plain tok/s", "speculative tok/s", "speedup",
           "deviation"]  # fmt: skip


def chosen_prompts(name: str) -> tuple[list[Prompt], dict]:
    """The prompts of a file or the included ones, and a description of the file. Raises PyspecError: as ``read_prompts``."""
    included = name == "all" or name in CATEGORIES
    path = INCLUDED if included else Path(name)
    data = prompt_file(path)
    prompts = [p for p in parse_prompts(data, path) if not included or name in ("all", p.category)]
    return prompts, {"file": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "prompts": len(prompts)}


def modes(thinking: bool | None) -> tuple[bool, ...]:
    return (True, False) if thinking is None else (thinking,)


def measure(
    session: Session, chosen: tuple[list[Prompt], dict], options: PromptsOptions, interrupt: Interrupt, output: str, as_json: bool
) -> int:
    """Measures ``chosen_prompts`` and prints; returns the exit code. After Ctrl-C complete runs are printed."""
    prompts, source = chosen
    if not options.sampling.is_greedy and options.sampling.seed is None:
        options = replace(options, sampling=replace(options.sampling, seed=0))
    template, _ = chat_template(session)
    with progress_line() as progress:
        conditions = _conditions(session, source, options, progress)
        origin = "none: messages are continued as one text" if template.source == CONTINUE else "the target's"
        conditions["template"] = {"origin": origin, "sha256": hashlib.sha256(template.source.encode("utf-8", "replace")).hexdigest()}
        with Waiting(session.engine) as waiting:
            rows = bench_prompts(session, prompts, options, template, interrupted=interrupt, progress=progress)
    conditions["costs_ms"] = session.costs
    click.echo(written(rows, _HEADER, [_cells(row) for row in rows], output))
    if output == "md":
        click.echo(
            "\n" + "\n".join(f"* {name}: {value if isinstance(value, str) else json_line(value)}" for name, value in conditions.items())
        )
    elif output == "jsonl":
        click.echo(json_line({"conditions": conditions}))
    elif not as_json:
        say("conditions: " + json_line(conditions))
    if as_json:
        click.echo(json_line({"conditions": conditions, "rows": [row.as_dict() for row in rows]}))
    if waiting.much:
        say(BUSY)
    if any(row.runs and not row.acceptance for row in rows):
        say(
            "acceptance is empty where no draft was verified, because plain decoding was expected to be faster; --draft-width W measures it anyway"
        )
    if interrupt.asked:
        say(f"stopped after {len(rows[0].runs)} of {options.repetitions} runs")
    return EXIT_INTERRUPT if interrupt.asked else 0


def _conditions(session: Session, source: dict, options: PromptsOptions, progress) -> dict:
    """Everything needed to reproduce the figures."""
    files = {"target": session.target.file}
    for at, member in enumerate(session.drafter.methods if session.drafter is not None else ()):
        files["drafter" if at == 0 else f"drafter {at + 1}"] = member.file
    return {
        "command": " ".join(["pyspec", *sys.argv[1:]]).encode("utf-8", "replace").decode(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "device": session.backend.device.description,
        "threads": session.backend.threads,
        "kernels": session.backend.kernels,
        **{name: _noted(file.path, progress) for name, file in files.items()},
        "prompts": source,
        "context": session.engine.options.n_ctx,
        "width": "chosen while running" if session.costs else session.engine.options.width,
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


def _cells(row: PromptsRow) -> list[str]:
    seen = row.as_dict()
    mode = {None: "-", True: "on", False: "off"}[row.thinking]

    def cells(name: str, form: str, scale: float = 1.0, deviation: bool = True) -> list[str]:
        parts = (seen[name]["mean"], seen[name]["deviation"]) if deviation else (seen[name]["mean"],)
        return ["" if value is None else format(scale * value, form) for value in parts]

    figures = [cells("acceptance", ".1f", 100), cells("tokens_per_step", ".2f"), cells("plain_speed", ".1f", deviation=False),
               cells("speed", ".1f", deviation=False), cells("speedup", ".2f")]  # fmt: skip
    return [row.category, mode, str(row.prompts), str(len(row.runs)), *chain.from_iterable(figures)]
