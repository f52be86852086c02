"""pyspec rm"""

import click

from ..hub import remove
from .help import Command
from .terminal import say, size


@click.command("rm", cls=Command)
@click.argument("names", metavar="USER/MODEL[:QUANT]...", nargs=-1, required=True)
def command(names: tuple[str, ...]):
    """Deletes models from the caches that `pyspec list` shows; without QUANT all files of a repository."""
    for name in names:
        for path, nbytes in remove(name):
            say(f"deleted {path.name} ({size(nbytes)})")
