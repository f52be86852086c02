"""pyspec pull"""

import click

from ..hub import fetch, fetch_pair
from .help import Command, option
from .terminal import progress_line


@click.command("pull", cls=Command)
@click.argument("repo", metavar="USER/MODEL[:QUANT]")
@option("-hff --hf-file", "This file of the repository, instead of QUANT.", metavar="NAME")
@option("--draft", "The drafter of this repository, too. Default: the one that the model's own repository has.", metavar="USER/MODEL")
def command(repo: str, hf_file: str | None, draft: str | None):
    """Downloads a model from the Hugging Face hub, with its drafter, and prints the paths. `-hf` of other commands finds it without the network."""
    with progress_line() as progress:
        paths = (
            [*fetch_pair(repo, file=hf_file, progress=progress)]
            if draft is None
            else [fetch(repo, file=hf_file, progress=progress), fetch(draft, drafter=True, progress=progress)]
        )
    for path in paths:
        if path is not None:
            click.echo(path)
