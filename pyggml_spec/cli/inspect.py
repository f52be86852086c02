"""pyspec inspect"""

from collections import Counter

import click

from ..tools.inspect import compare_vocabularies, inspect_file
from .help import PATH, Command, flag, option
from .options import in_options
from .terminal import json_line, printable, size

WIDEST = 60  # longer names shift their own line only


@click.command("inspect", cls=Command)
@click.argument("file", type=PATH)
@option("--target", "How well FILE, a small model, knows the vocabulary of this target.", type=PATH)
@option("--tensors/--no-tensors", "List the tensors.", default=True)
@flag("--json as_json", "One JSON object.")
def command(file: str, target: str | None, tensors: bool, as_json: bool):
    """Shows a GGUF's metadata and tensors, and how pyspec uses it."""
    seen = inspect_file(file)
    vocabulary = {} if target is None else {"vocabulary": compare_vocabularies(target, file)}
    if as_json:
        click.echo(json_line(seen.as_dict() | vocabulary))
        return
    parts = f"{size(seen.nbytes)}, {len(seen.tensors)} tensors, {seen.parameters / 1e6:.1f}M parameters"
    click.echo(f"{seen.path}: GGUF version {seen.version}, {parts}")
    click.echo(in_options(seen.verdict, click.Command("run")))  # the options of commands that run the file, not --target of this one
    for said in vocabulary.values():
        click.echo(f"as a drafter of {target}: {said}")
    for why, count in Counter(seen.unused.values()).items():
        click.echo(f"not used: {count} tensor{'s' * (count > 1)}, {why}")
    for pair in seen.drafters:
        why = f"; {pair.refused}" if pair.refused else "" if pair.gguf else ", to be converted (pyspec convert)"
        click.echo(f"a public {pair.method} drafter for {pair.target}, which has this shape: {pair.drafter}{why}")
    click.echo()
    metadata = {printable(key): value for key, value in seen.metadata.items()}
    width = min(WIDEST, max(map(len, metadata), default=0))
    for key, value in metadata.items():
        click.echo(f"{key:<{width}}  {value}")
    if tensors and seen.tensors:
        click.echo()
        width = min(WIDEST, max(len(printable(name)) for name, *_ in seen.tensors))
        for name, kind, shape, nbytes in seen.tensors:
            click.echo(f"{printable(name):<{width}}  {kind:<6} {'x'.join(map(str, shape)):<16} {size(nbytes):>10}")
    click.echo()
    click.echo("  ".join(f"{kind} {size(nbytes)}" for kind, nbytes in sorted(seen.bytes_by_type.items())))
