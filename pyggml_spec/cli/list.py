"""pyspec list"""

from datetime import UTC, datetime

import click

from ..hub import cached_models
from .help import Command, flag
from .terminal import json_line, say, size


@click.command("list", cls=Command)
@flag("--json as_json", "One JSON object per file.")
def command(as_json: bool):
    """Lists the models in the caches of the Hugging Face hub and of llama.cpp: -hf takes the names of the first column."""
    found = cached_models()
    for one in found:
        modified = datetime.fromtimestamp(one.modified, UTC)
        if as_json:
            click.echo(json_line({"name": one.name, "path": str(one.path), "size": one.size, "modified": modified.isoformat()}))
        else:
            click.echo(f"{one.name:<48} {size(one.size):>10}  {modified:%Y-%m-%d}  {one.path.name}")
    if not found:
        say("there is no model yet; `pyspec pull USER/MODEL` downloads one")
