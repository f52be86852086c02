"""pyspec convert"""

import click

from ..tools.convert import convert_drafter
from ..tools.quants import TYPES
from .help import PATH, Command, flag, option
from .terminal import progress_line, say, size


@click.command("convert", cls=Command)
@click.argument("source", type=PATH)
@option("-m --model target", "GGUF of the drafter's target; provides the tokenizer.", type=PATH, required=True)
@option("-o --output out", "GGUF to write.", type=PATH, required=True)
@option("--type kind", f"Type of the matrices: {', '.join(TYPES)}.", shown="q8_0", metavar="TYPE")
@flag("--force replace", "Replace an existing output.")
@option("-t --threads", "Quantiser threads. Default: the cores of this process, at most 16.", type=click.IntRange(1, 512))
def command(source: str, target: str, out: str, kind: str, replace: bool, threads: int | None):
    """Converts a DFlash, JetSpec, DSpark, EAGLE-3 or P-EAGLE drafter. SOURCE is its folder (config.json, *.safetensors) or one safetensors file.

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
