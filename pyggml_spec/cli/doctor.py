"""pyspec doctor"""

import shutil
import sys
import textwrap

import click

from ..doctor import FAIL, NOT_APPLICABLE, OK, WARN, Report, examine
from ..errors import PyspecError
from ..gguf_io.safetensors import parse_json
from ..tools.prompts import prompt_file
from .help import PATH, Command, flag, option
from .main import EXIT_CHECK
from .options import in_options, load_options
from .terminal import json_line, printable, progress_line, say

_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red", NOT_APPLICABLE: "bright_black"}


@click.command("doctor", cls=Command)
@load_options("split")
@option("--prompts prompts_file", 'JSON lines with a "prompt" each. Default: Python code.', type=PATH, metavar="FILE")
@flag("--json as_json", "One JSON object instead of the table.")
def command(target, draft, options, prompts_file, as_json):
    """Measures known causes of low acceptance and missing speed. Exit code 3 if a check fails.

    The target continues some prompts, and the drafter drafts at many positions of these texts: with the file's hyper-parameters, and with
    others that files often get wrong. A value that raises acceptance is reported with a remedy.
    """
    prompts = _prompts(prompts_file) if prompts_file is not None else None
    fields = {name: getattr(options, name) for name in ("device", "threads", "kernels", "n_ctx", "tensor_split")}
    with progress_line() as progress:
        report = examine(target, draft, **fields, prompts=prompts, progress=progress)
    if as_json:
        click.echo(json_line(report.as_dict()))
    else:
        _show(report)
    if report.failed:
        say(f"pyspec: {len(report.failed)} of {len(report.checks)} checks failed, the first is {report.failed[0].name!r}")
        sys.exit(EXIT_CHECK)


def _prompts(path: str) -> list[str]:
    data, out = prompt_file(path), []
    for i, line in enumerate(data.splitlines(), 1):
        if line.strip():
            value = parse_json(line, f"line {i} of {path}", len(data))
            if not isinstance(value.get("prompt"), str):
                raise PyspecError(f'line {i} of {path} has no text named "prompt"; give one JSON object per line, like {{"prompt": "..."}}')
            out.append(value["prompt"])
    return out


def _show(report: Report) -> None:
    width = max(len(check.name) for check in report.checks)
    columns = max(60, shutil.get_terminal_size((140, 24)).columns)
    click.echo(f"target {printable(report.target)}\ndrafter {printable(report.drafter)}\n")
    for check in report.checks:
        text = in_options(check.found) + (f"; {in_options(check.remedy)}" if check.remedy and check.verdict == WARN else "")
        first, *more = textwrap.wrap(printable(text), columns - width - 8) or [""]
        click.echo(f"{check.name:<{width}}  {click.style(f'{check.verdict:<4}', fg=_COLOURS[check.verdict])}  {first}")
        for line in more:
            click.echo(" " * (width + 8) + line)
    for check in report.failed:
        if check.remedy:
            click.echo(f"\n{click.style(check.name, fg='red')}: {printable(in_options(check.remedy))}.")
    if not report.failed:
        warned = [check.name for check in report.checks if check.verdict == WARN]
        click.echo("\nno check failed" + (f"; see the warnings: {', '.join(warned)}" if warned else ""))
