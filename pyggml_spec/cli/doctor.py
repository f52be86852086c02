"""pyspec doctor"""

import shutil
import sys
import textwrap

import click

from ..doctor import FAIL, NOT_APPLICABLE, OK, WARN, Check, Report, examine
from ..errors import PyspecError
from ..gguf_io.safetensors import parse_json
from .help import Command
from .main import EXIT_CHECK
from .names import in_options
from .options import opening_split
from .tables import json_line
from .terminal import printable, progress_line, say

_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red", NOT_APPLICABLE: "bright_black"}
_MAX_PROMPTS = 1 << 24


@click.command("doctor", cls=Command)
@opening_split
@click.option("--prompts", "prompts_file", type=click.Path(), metavar="FILE", help='JSON lines with a "prompt" each. Default: Python code.')
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def command(target, draft, options, prompts_file, as_json):
    """Measures known causes of low acceptance and missing speed. Exit code 3 if a check fails.

    The target continues some prompts, and the drafter drafts at many positions of these texts: with the file's hyper-parameters, and with
    others that files often get wrong. A value that raises acceptance is reported with a remedy.
    """
    prompts = _prompts(prompts_file) if prompts_file is not None else None
    with progress_line() as progress:
        report = examine(target, draft, device=options.device, threads=options.threads, kernels=options.kernels, n_ctx=options.n_ctx, prompts=prompts,
                         tensor_split=options.tensor_split, progress=progress)  # fmt: skip
    if as_json:
        click.echo(json_line(report.as_dict()))
    else:
        _show(report)
    if report.failed:
        say(f"pyspec: {len(report.failed)} of {len(report.checks)} checks failed, the first is {report.failed[0].name!r}")
        sys.exit(EXIT_CHECK)


def _prompts(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_PROMPTS + 1)
    except OSError as error:
        raise PyspecError(f"the prompt file {path} cannot be read: {error.strerror}") from None
    out = []
    for i, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        value = parse_json(line, f"line {i} of {path}", _MAX_PROMPTS)
        if not isinstance(value.get("prompt"), str):
            raise PyspecError(f'line {i} of {path} has no text named "prompt"; give one JSON object per line, like {{"prompt": "..."}}')
        out.append(value["prompt"])
    return out


def _show(report: Report) -> None:
    width = max(len(check.name) for check in report.checks)
    columns = max(60, shutil.get_terminal_size((140, 24)).columns)
    click.echo(f"target {printable(report.target)}\ndrafter {printable(report.drafter)}\n")
    for check in report.checks:
        _show_one(check, width, columns)
    for check in report.checks:
        if check.remedy and check.verdict == FAIL:
            click.echo(f"\n{click.style(check.name, fg='red')}: {printable(in_options(check.remedy))}.")
    if not report.failed:
        warned = [check.name for check in report.checks if check.verdict == WARN]
        click.echo("\nno check failed" + (f"; see the warnings: {', '.join(warned)}" if warned else ""))


def _show_one(check: Check, width: int, columns: int) -> None:
    verdict = click.style(f"{check.verdict:<4}", fg=_COLOURS[check.verdict])
    text = printable(in_options(check.found)) + (
        f"; {printable(in_options(check.remedy))}" if check.remedy and check.verdict == WARN else ""
    )
    lines = textwrap.wrap(text, columns - width - 8) or [""]
    click.echo(f"{check.name:<{width}}  {verdict}  {lines[0]}")
    for line in lines[1:]:
        click.echo(" " * (width + 8) + line)
