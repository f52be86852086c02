"""pyspec patches"""

import click

from .. import patching as tool
from ..errors import PatchError
from .main import EXIT_CHECK
from .terminal import say


@click.group("patches")
def command():
    """The patch set for builds of llama.cpp; see patches/README.md."""


@command.command("list")
def list_():
    """Lists the patches in order."""
    for patch in tool.series():
        click.echo(f"{patch.path.name:<40} {patch.title}")
    click.echo(f"made for {tool.MADE_FOR}; in {tool.patches_dir()}")


@command.command("check", short_help="Dry run on the llama.cpp source tree in DIR.")
@click.argument("tree", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.pass_context
def check(ctx, tree: str):
    """Dry run on the llama.cpp source tree in DIR; exit code 3 if a patch does not apply."""
    try:
        left = tool.check(tree)
    except PatchError as error:
        say(str(error))
        ctx.exit(EXIT_CHECK)
    click.echo(f"{len(tool.series()) - len(left)} applied, {len(left)} applicable")
    for patch in left:
        click.echo(f"{patch.path.name}: {len(patch.files)} files")


@command.command("apply")
@click.argument("tree", metavar="DIR", type=click.Path(exists=True, file_okay=False))
def apply(tree: str):
    """Applies the missing patches of the series to DIR: all or none."""
    left = tool.apply(tree)
    click.echo("nothing to do, all patches are applied" if not left else f"applied {', '.join(patch.path.name for patch in left)}")
