"""The models of `pyspec serve --models-dir` and `--models-preset`: names, aliases, and the options that their processes get.

A preset is a table of models, as TOML or JSON; "*" has the options of all of them. Options are those of `pyspec serve`, by their long names without dashes:

    ["*"]
    ctx-size = 4096

    [small]
    model = "SmolLM2-135M-Instruct.Q4_1.gguf"
    alias = ["gpt-4o-mini"]
    pinned = true
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..drafters.names import kind_of
from ..errors import PyspecError
from ..hub import cached_files, is_later_part, is_other
from ..server.model_process import ModelSpec
from ..suggest import meant
from .foreign import options_of

EVERY = "*"
ROUTER = {  # options of the server itself: processes do not get them
    "host", "port", "api_key", "api_key_file", "drain", "max_body", "origins", "allowed_hosts", "certificate", "certificate_key", "page", "models_dir",
    "models_preset", "models_max", "models_memory", "sleep_idle", "of_router", "print_config", "alias",
}  # fmt: skip
_OWN = {"alias", "pinned", "sleep-idle-seconds"}  # keys that are the router's, not options of a process
_FILES = {"target", "draft", "hf_repo", "hf_file", "hf_repo_draft"}  # which model it is


def model_specs(command: click.Command, values: Mapping[str, Any], arguments: Sequence[str]) -> Callable[[], list[ModelSpec]]:
    """What lists the models anew, each time it is called.

    Args:
        command: `pyspec serve`; ``values``: its parameters.
        arguments: as they were given, whose options all models get.

    Raises:
        PyspecError, click.UsageError: the preset cannot be read, or has what is no option.
    """
    shared = _given(command, arguments)
    idle = values["sleep_idle"]
    if values["target"] is not None or values["hf_repo"] is not None:  # one model, which sleeps
        if values["models_dir"] or values["models_preset"]:
            raise click.UsageError("-m and -hf name one model, --models-dir and --models-preset many; leave one of them out")
        path = Path(values["target"]) if values["target"] is not None else None
        for file in (path, *map(Path, values["draft"] or ())):
            if file is not None and not file.is_file():
                raise PyspecError(f"{file} does not exist; check the path")
        names = [part.strip() for part in (values["alias"] or "").split(",") if part.strip()] or [
            path.name if path is not None else values["hf_repo"]
        ]
        one = ModelSpec(names[0], tuple(_given(command, arguments, _FILES)), path, tuple(names[1:]), None, False, idle)
        return lambda: [one]
    if values["draft"] or values["hf_repo_draft"]:
        raise click.UsageError(
            "-md and -hfd name the drafter of one model; with several, name it in the file of --models-preset, as model-draft"
        )
    if values["alias"]:
        raise click.UsageError("-a names one model; with several, give aliases in the file of --models-preset")
    preset = _preset(command, Path(values["models_preset"]), shared, idle) if values["models_preset"] is not None else []
    folders = [Path(folder) for folder in values["models_dir"]]
    for folder in folders:
        if not folder.is_dir():
            raise PyspecError(f"{folder} is no folder; name one with GGUF files by --models-dir")

    def listed() -> list[ModelSpec]:
        named = {spec.path.resolve() for spec in preset if spec.path is not None}
        taken = {name for spec in preset for name in (spec.name, *spec.aliases)}
        out = list(preset)
        for name, path in _files(folders, values["models_cached"]):
            if path.resolve() not in named and name not in taken:
                taken.add(name)
                out.append(ModelSpec(name, ("-m", str(path), *shared), path, idle_seconds=idle))
        return out

    if not listed():
        raise PyspecError("there is no model to serve: put a GGUF file into the folder of --models-dir, or name one with --models-preset")
    return listed


def _files(folders: Iterable[Path], cached: bool) -> list[tuple[str, Path]]:
    """Targets in folders, three levels deep, by their names without ".gguf"."""
    found = [path for folder in folders for depth in ("*", "*/*", "*/*/*") for path in sorted(folder.glob(f"{depth}.gguf"))]
    found += cached_files() if cached else []
    return [(path.stem, path) for path in found if kind_of(path.name) is None and not is_later_part(path.name) and not is_other(path.name)]


def _given(command: click.Command, arguments: Sequence[str], more: Iterable[str] = ()) -> list[str]:
    """The options among ``arguments`` that a model's process gets; ``more``: of _FILES."""
    context = click.Context(command)
    left = (ROUTER | _FILES) - {*more}
    values, _, order = command.make_parser(context).parse_args(list(arguments))
    out: list[str] = []
    for param in dict.fromkeys(order):
        if param.name not in left and isinstance(param, click.Option) and param.name is not None:
            for value in values[param.name] if param.multiple else [values[param.name]]:
                out += _option(param, value)
    return out


def _option(param: click.Option, value: Any) -> list[str]:
    """As on a command line."""
    if not param.is_flag:
        return [param.opts[0], str(value)]
    return [param.secondary_opts[0]] if param.secondary_opts and value is False else [param.opts[0]]


def _preset(command: click.Command, path: Path, shared: Sequence[str], idle: float | None) -> list[ModelSpec]:
    try:
        data = path.read_bytes()
        tables = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except OSError as error:
        raise PyspecError(f"the preset {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PyspecError(f"the preset {path} is no {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise PyspecError(f'the preset {path} is no table of models; write [NAME] and below it model = "FILE.gguf"')
    every, out = tables.pop(EVERY, {}), []
    for name, own in tables.items():
        table = {**every, **own}
        words = [f"[{name}] of {path}"]
        aliases = table.get("alias", [])
        aliases = [aliases] if isinstance(aliases, str) else aliases
        seconds = table.get("sleep-idle-seconds", idle)
        if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
            raise PyspecError(f"{words[0]} has an alias that is no text")
        if not isinstance(table.get("pinned", False), bool):
            raise PyspecError(f"{words[0]} has pinned = {table['pinned']!r}, but it has to be true or false")
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float, type(None))):
            raise PyspecError(f"{words[0]} has sleep-idle-seconds = {seconds!r}, but it has to be a number")
        arguments = [word for key, value in table.items() if key not in _OWN for word in _words(command, key, value, path, words[0])]
        parsed = _parsed(command, [*shared, *arguments], words[0])
        target = parsed.get("target")
        if target is None and parsed.get("hf_repo") is None:
            raise PyspecError(f'{words[0]} names no model; give model = "FILE.gguf" or hf-repo = "USER/MODEL"')
        if target is not None and not Path(target).is_file():
            raise PyspecError(f"{words[0]} names the model {target}, which is not there")
        drafters = parsed.get("draft") or parsed.get("hf_repo_draft")
        drafter = None if not drafters else ", ".join(map(str, drafters)) if isinstance(drafters, tuple) else str(drafters)
        out.append(ModelSpec(
            name, (*shared, *arguments), Path(target) if target is not None else None, tuple(aliases), drafter, table.get("pinned", False),
            None if seconds is None or seconds < 0 else float(seconds),
        ))  # fmt: skip
    every_name = [name for spec in out for name in (spec.name, *spec.aliases)]
    if twice := next((name for name in every_name if every_name.count(name) > 1), None):
        raise PyspecError(f"the preset {path} has the name {twice!r} twice; give each model names of its own")
    return out


def _words(command: click.Command, key: str, value: Any, path: Path, where: str) -> list[str]:
    """An option of a preset as on a command line; files are beside the preset."""
    options = {name.removeprefix("--"): (name, param) for name, param in options_of(command).items() if name.startswith("--")}
    if key not in options or options[key][1].name in ROUTER:
        why = "is the server's, not a model's: give it to `pyspec serve`" if key in options else f"is no option{meant(key, options)}"
        raise PyspecError(f"{where} has {key}, which {why}")
    name, param = options[key]
    if param.is_flag:
        if not isinstance(value, bool):
            raise PyspecError(f"{where} has {key} = {value!r}, but it has to be true or false")
        return [name] if value else []
    values = value if isinstance(value, list) else [value]
    shown = ["on" if one is True else "off" if one is False else str(one) for one in values]
    if isinstance(param.type, click.Path):
        shown = [str(path.parent / one) for one in shown]
    return [word for one in shown for word in (name, one)]


def _parsed(command: click.Command, arguments: list[str], where: str) -> dict[str, Any]:
    try:
        return command.make_context("serve", arguments, resilient_parsing=False).params
    except click.UsageError as error:
        raise PyspecError(f"{where}: {error.format_message()}") from None
