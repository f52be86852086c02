"""The map of CONTRIBUTING.md: arrows between modules point one way. Imports for types only count too."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pyggml_spec

ROOT = Path(pyggml_spec.__file__).parent
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")}
LAYERS = (
    {"cli"},
    {"server"},
    {"train"},
    {"tools", "doctor", "chat", "concurrent", "api", "session", "configuration", "loading", "load_options"},
    {"engine", "speculation", "multi_device", "constraints", "sampling", "text", "vision"},
    {"models", "drafters", "cache"},
    {"ggml", "gguf_io"},
)


def _imports(name: str) -> Iterator[str]:
    """The modules of the package that a module names anywhere, names as in MODULES."""
    above = name.split(".")
    for node in ast.walk(ast.parse(MODULES[name].read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = above[: len(above) - node.level + (MODULES[name].name == "__init__.py")]
            inside = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield next(m for m in (f"{inside}.{alias.name}".strip("."), inside, "__init__") if m in MODULES)


@pytest.fixture(scope="module")
def imports():
    return {name: set(_imports(name)) - {name, "__init__"} for name in MODULES if name != "__init__"}


def test_no_module_is_imported_by_what_it_imports(imports):
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_layer_imports_one_above(imports):
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    folders = {name: name.split(".")[0] for name in MODULES}
    arrows = {(name, used) for name, all_used in imports.items() for used in all_used}
    assert len(arrows) > 200
    assert not [a for a in arrows if layer.get(folders[a[0]], -1) > layer.get(folders[a[1]], 9)]
