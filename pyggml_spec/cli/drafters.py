"""pyspec drafters"""

import click

from ..tools.drafters import CACHE, FOLDER, HUB, OWN, Candidate, find_drafters
from .help import PATH, Command, flag
from .options import in_options
from .terminal import json_line, printable

_TITLES = {
    OWN: "in the target's file", FOLDER: "in its folder", CACHE: "in the caches of the hub and of llama.cpp", HUB: "published for this shape",
}  # fmt: skip


@click.command("drafters", cls=Command)
@click.argument("target", type=PATH)
@flag("--json as_json", "One JSON object per drafter.")
def command(target: str, as_json: bool):
    """Lists drafters for a target: in its file, its folder, the caches, and published ones; whether they fit, and how to run them.

    Checkpoints of one shape have one list: a GGUF does not say which checkpoint it was made of.
    """
    found = find_drafters(target)
    if as_json:
        for one in found:
            click.echo(json_line(one.as_dict()))
        return
    for where, title in _TITLES.items():
        for i, one in enumerate([one for one in found if one.where == where]):
            if not i:
                click.echo(f"{title}:")
            _show(one)
    if not found:
        click.echo(
            "none is known for this shape; n-grams draft without a file (--spec-type suffix), and so does a small model of its family (-md)"
        )


def _show(one: Candidate) -> None:
    method = f", {one.method}" if one.method else ""
    verdict = "" if one.fits else "does not fit: " if one.where != HUB else "does not run here: "
    said = f": {verdict}{in_options(one.said, click.Command('run'))}" if one.said else ""
    click.echo(f"  {printable(one.name)}{method}{said}")
    for line in one.commands:
        click.echo(f"    {printable(line)}")
