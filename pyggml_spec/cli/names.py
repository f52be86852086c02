"""The library speaks of arguments, in backticks; the command line of its options: "raise `n_ctx`" is said as "raise -c" here."""

import re

import click

from .options import target_options

_EVERY = click.command(target_options(lambda **_: None))  # what every command calls its arguments
_NAME = re.compile(r"`(\w+)`")


def in_options(text: str, command: click.Command | None = None) -> str:
    """``text`` with options in the place of arguments: those of ``command`` (the running one), and for the others what every command calls them."""
    if command is None:
        context = click.get_current_context(silent=True)
        command = context.command if context is not None else None
    names = {"spec": "--spec-type", **_names(_EVERY), **(_names(command) if command is not None else {})}
    return _NAME.sub(lambda match: names.get(match[1], match[0]), text)


def _names(command: click.Command) -> dict[str, str]:
    """The options by the arguments that they become, and by their own long names; those of all commands of a group."""
    if isinstance(command, click.Group):
        return {name: option for one in command.commands.values() for name, option in _names(one).items()}
    options = [p for p in command.params if isinstance(p, click.Option)]
    long = {name.removeprefix("--").replace("-", "_"): p.opts[0] for p in options for name in p.opts if name.startswith("--")}
    return {**long, **{p.name: p.opts[0] for p in options if p.name}}
