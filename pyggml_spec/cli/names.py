"""Maps argument names in library messages (in backticks) to options: "raise `n_ctx`" becomes "raise -c"."""

import re

import click

from .options import load_options

_EVERY = click.command(load_options()(lambda **_: None))  # arguments shared by all commands
_NAME = re.compile(r"`(\w+)`")


def in_options(text: str, command: click.Command | None = None) -> str:
    """``text`` with options instead of arguments, of ``command`` (default: the running one), else of any command."""
    if command is None:
        context = click.get_current_context(silent=True)
        command = context.command if context is not None else None
    names = {"spec": "--spec-type", **_names(_EVERY), **(_names(command) if command is not None else {})}
    return _NAME.sub(lambda match: names.get(match[1], match[0]), text)


def _names(command: click.Command) -> dict[str, str]:
    """Options by argument name and by long name; for a group, of all its commands."""
    if isinstance(command, click.Group):
        return {name: option for one in command.commands.values() for name, option in _names(one).items()}
    options = [p for p in command.params if isinstance(p, click.Option)]
    long = {name.removeprefix("--").replace("-", "_"): p.opts[0] for p in options for name in p.opts if name.startswith("--")}
    return {**long, **{p.name: p.opts[0] for p in options if p.name}}
