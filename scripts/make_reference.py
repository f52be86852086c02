#!/usr/bin/env python3
"""Writes docs/reference/cli.md from the commands and docs/reference/api.md from the docstrings.

    make_reference.py           write both
    make_reference.py --check   exit code 1 if one of them is not what would be written (CI)

The API comes from the source text: nothing is imported for it, and the pages are the same on every Python.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from pyggml_spec.cli.help import OWN, GroupedCommand, grouped
from pyggml_spec.cli.main import cli

ROOT = Path(__file__).parents[1]
PACKAGE, OUT = ROOT / "pyggml_spec", ROOT / "docs" / "reference"
NOTE = "<!-- Written by scripts/make_reference.py: do not edit. -->\n\n"
SECTIONS = ("Args", "Attributes", "Raises")
MADE_ELSEWHERE = ("Session", "ConcurrentSession", "Handle")  # constructors that are not for users
MORE = {  # what else is meant to be used, by module
    "configuration": ("Configuration",),
    "chat": ("chat_template",),
    "sampling.sampler": ("TokenLogprob",),
    "text.stream": ("LineLimits",),
    "text.template": ("ChatTemplate",),
    "sampling.recommended": ("recommended", "chosen"),
    "arguments": ("GenerateOptions", "RequestOptions"),
    "speculation.synthetic": ("SyntheticAcceptance",),
    "doctor.examine": ("examine",),
    "doctor.report": ("Report", "Check"),
    "tools.bench": ("bench", "BenchOptions", "BenchRow", "Repeated"),
    "tools.bench_prompts": ("bench_prompts", "PromptsOptions", "PromptsRow"),
    "tools.prompts": ("Prompt", "read_prompts", "included_prompts"),
    "tools.compare": ("compare_logits", "Comparison"),
    "tools.compare_weights": ("compare_weights", "WeightComparison", "TensorDifference"),
    "tools.convert": ("convert_drafter", "Conversion"),
    "tools.drafters": ("find_drafters", "Candidate"),
    "tools.inspect": ("inspect_file", "Inspection"),
    "tools.plan": ("plan", "plan_everywhere", "Plan", "NoPlan"),
}


missing: list[str] = []  # what should be described and is not


# -- commands


def cli_page() -> str:
    parts = ["# Command line\n", f"{NOTE}{' '.join(cli.help.split())}\n", _exit_codes()]
    context = click.Context(cli, info_name="pyspec")
    for name in cli.list_commands(context):
        parts += _command(cli.get_command(context, name), f"pyspec {name}")
    return "\n".join(parts)


def _exit_codes() -> str:
    text = ast.get_docstring(_module("cli.main")).split("Exit codes: ")[1]
    return "Exit codes: " + " ".join(text.split()) + "\n"


def _command(command: click.Command, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"## {path}\n\n```\n{path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    yield "\n\n".join(" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n")) + "\n"
    if not command.help:
        missing.append(f"{path} has no help")
    for title, options in grouped(command.params).items() if isinstance(command, GroupedCommand) else {OWN: command.params}.items():
        rows = [o for o in options if isinstance(o, click.Option) and not o.hidden]
        if rows:
            yield f"| {title.lower()} | value | |\n|---|---|---|"
            yield "".join(f"| {_cell(_names(o))} | {_cell(_value(o))} | {_cell(_help(o, path))} |\n" for o in rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from _command(command.get_command(context, name), f"{path} {name}")


def _names(option: click.Option) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _value(option: click.Option) -> str:
    kind = option.type
    if option.is_flag:
        return ""
    if isinstance(kind, click.Choice) and not option.metavar:
        return " \\| ".join(kind.choices)
    name = option.metavar or {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}.get(kind.name, kind.name.upper())
    low, high = getattr(kind, "min", None), getattr(kind, "max", None)
    limits = f", {low:g} to {high:,}" if None not in (low, high) else f", {low:g} or more" if low is not None else ""
    return " ".join([name] * option.nargs) + limits


def _help(option: click.Option, path: str) -> str:
    if not option.help:
        missing.append(f"{path} {option.opts[-1]} has no help")
    return (
        f"{option.help or ''} Default: {option.default}.".strip()
        if option.show_default and option.default is not None
        else option.help or ""
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("\\|", "|").replace("|", "\\|").split())


# -- docstrings


def api_page() -> str:
    init = _module("")
    lazy = next(ast.literal_eval(node.value) for node in init.body if isinstance(node, ast.Assign) and node.targets[0].id == "_LAZY")
    errors = [alias.name for node in init.body if isinstance(node, ast.ImportFrom) and node.module == "errors" for alias in node.names]
    wanted: dict[str, list[str]] = {}
    for name in sorted(lazy, key=lambda name: (name != "load", name != "Session", name.lower())):
        wanted.setdefault(lazy[name], []).append(name)
    page = f"# Python API\n\n{NOTE}Everything in the first part is in `pyggml_spec` itself; the second part names the module.\n"
    parts = [page, "## pyggml_spec\n"]
    for module, names in wanted.items():
        parts += [_definition(module, name) for name in names]
    parts += ["### Errors\n", "Every message is a sentence that names the value and the remedy.\n"]
    parts += [f"* `{name}`: {_first_line('errors', name)}" for name in errors]
    for module, names in MORE.items():
        parts += [f"\n## pyggml_spec.{module}\n", *(_definition(module, name) for name in names)]
    return "\n".join(parts).rstrip() + "\n"


def _module(name: str) -> ast.Module:
    path = PACKAGE.joinpath(*name.split(".")) if name else PACKAGE
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text("utf-8"))


def _find(module: str, name: str) -> ast.AST:
    for node in _module(module).body:
        if getattr(node, "name", None) == name:
            return node
    sys.exit(f"make_reference.py: pyggml_spec.{module} has no {name}; correct the list in this script")


def _first_line(module: str, name: str) -> str:
    return _doc(_find(module, name), name).partition("\n")[0]


def _doc(node: ast.AST, name: str) -> str:
    text = ast.get_docstring(node) or ""
    if not text:
        missing.append(f"{name} has no docstring")
    return text


def _definition(module: str, name: str) -> str:
    node = _find(module, name)
    if not isinstance(node, ast.ClassDef):
        return f"### {name}\n\n{_call(name, _arguments(node), node.returns)}\n{_markdown(_doc(node, name))}"
    init = next((n for n in node.body if getattr(n, "name", None) == "__init__"), None)
    members = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and not n.name.startswith("_")]
    arguments = _fields(node) or (_arguments(init) if init is not None and name not in MADE_ELSEWHERE else [])
    out = [f"### {name}\n", *([_call(name, arguments)] if arguments else []), _markdown(_doc(node, name))]
    if init is not None and ast.get_docstring(init):
        out.append(_markdown(ast.get_docstring(init)))
    properties = [n for n in members if "property" in map(ast.unparse, n.decorator_list)]
    if properties:
        out += ["Properties:\n", *(_property(n, name) for n in properties), ""]
    for member in members:
        if member not in properties and (member.name != "as_dict" or ast.get_docstring(member)):
            title = f"{name}.{member.name}"
            call = ("await " if isinstance(member, ast.AsyncFunctionDef) else "") + member.name
            out.append(f"#### {title}\n\n{_call(call, _arguments(member), member.returns)}\n{_markdown(_doc(member, title))}")
    return "\n".join(out)


def _property(node: ast.FunctionDef, owner: str) -> str:
    kind = f" ({ast.unparse(node.returns)})" if node.returns else ""
    return f"* `{node.name}`{kind}: {' '.join(_markdown(_doc(node, f'{owner}.{node.name}')).split())}"


def _fields(node: ast.ClassDef) -> list[str]:
    """Of a dataclass, as the arguments of its constructor."""
    if not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        return []
    items = [n for n in node.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")]
    return [_argument(n.target.id, n.annotation, _made_by_factory(n.value)) for n in items]


def _made_by_factory(value: ast.expr | None) -> ast.expr | None:
    """What ``field(default_factory=...)`` makes, or ``value``."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return value
    factory = next(k.value for k in value.keywords if k.arg == "default_factory")
    return factory.body if isinstance(factory, ast.Lambda) else ast.Call(factory, [], [])


def _arguments(node: ast.FunctionDef) -> list[str]:
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    out = [_argument(arg.arg, arg.annotation, default) for arg, default in zip(positional, defaults) if arg.arg not in ("self", "cls")]
    if a.vararg:
        out.append(f"*{a.vararg.arg}")
    elif a.kwonlyargs:
        out.append("*")
    out += [_argument(arg.arg, arg.annotation, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    return out + ([f"**{a.kwarg.arg}{f': {ast.unparse(a.kwarg.annotation)}' if a.kwarg.annotation else ''}"] if a.kwarg else [])


def _argument(name: str, annotation: ast.expr | None, default: ast.expr | None) -> str:
    text = f"{name}: {ast.unparse(annotation)}" if annotation else name
    return text if default is None else f"{text} = {ast.unparse(default)}" if annotation else f"{text}={ast.unparse(default)}"


def _call(name: str, arguments: list[str], returns: ast.expr | None = None) -> str:
    """One line if it fits, otherwise one argument per line."""
    end = f") -> {ast.unparse(returns).strip(chr(39))}" if returns else ")"
    line = f"{name}({', '.join(arguments)}{end}"
    if len(line) > 120:
        line = "\n    ".join([f"{name}(", *(f"{a}," for a in arguments)]) + f"\n{end}"
    return f"```python\n{line}\n```\n"


def _markdown(doc: str) -> str:
    """A docstring with its sections as lists."""
    out, section = [], False
    for line in doc.splitlines():
        if re.fullmatch(rf"({'|'.join(SECTIONS)}):", line):
            out += ["", f"{line[:-1]}:", ""]
            section = True
        elif section and (entry := re.fullmatch(r"(?:    )?(\*{0,2}[\w.*]+(?:, \*{0,2}[\w.]+)*): (.*)", line)):
            out.append(f"* `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("     "):
            out.append("  " + line.strip())
        else:
            section = section and bool(line.strip()) and line.startswith(" ")
            out.append(line)
    return re.sub(r"\n{3,}", "\n\n", re.sub("``", "`", "\n".join(out))) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    args = parser.parse_args(arguments)
    pages = {OUT / "cli.md": cli_page(), OUT / "api.md": api_page()}
    for what in missing:
        print(f"make_reference.py: {what}", file=sys.stderr)
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]
    if args.check:
        for path in stale:
            print(f"make_reference.py: {path.relative_to(ROOT)} is stale; run scripts/make_reference.py", file=sys.stderr)
        return 1 if stale or missing else 0
    OUT.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(pages[path], "utf-8")
        print(f"{path.relative_to(ROOT)} written")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
