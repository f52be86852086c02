"""pyspec convert"""

import click

from ..tools.convert import convert_drafter
from ..tools.quants import TYPES
from .help import Command
from .terminal import progress_line, say, size


@click.command("convert", cls=Command)
@click.argument("source", type=click.Path())
@click.option("-m", "--model", "target", type=click.Path(), required=True, help="GGUF of the drafter's target; provides the tokenizer.")
@click.option("-o", "--output", "out", type=click.Path(), required=True, help="GGUF to write.")
@click.option("--type", "kind", default="q8_0", show_default=True, metavar="TYPE", help=f"Type of the matrices: {', '.join(TYPES)}.")
@click.option("--force", "replace", is_flag=True, help="Replace an existing output.")
@click.option("-t", "--threads", type=click.IntRange(1, 512), help="Quantiser threads. Default: the cores of this process, at most 16.")
def command(source: str, target: str, out: str, kind: str, replace: bool, threads: int | None):
    """Converts a DFlash, DSpark or EAGLE-3 drafter. SOURCE is its folder (config.json, *.safetensors) or one safetensors file.

    An interrupted run leaves no file.
    """
    with progress_line() as progress:
        done = convert_drafter(source, target, out, kind, replace=replace, threads=threads, progress=progress)
    types = ", ".join(f"{count} {name}" for name, count in sorted(done.types.items()))
    block = f"block {done.block_size}, mask token {done.mask_token}, " if done.block_size is not None else ""
    among = f", vocabulary of {done.draft_vocab} tokens" if done.draft_vocab is not None else ""
    click.echo(f"{done.path}: {size(done.nbytes)}, tensors: {types}; {block}inputs of target layers {list(done.target_layers)}{among}")
    for note in done.notes:
        say(f"note: {note}")
