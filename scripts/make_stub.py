"""Writes ``pyggml_spec/_native.pyi``: what the compiled extension offers, with the types that its C declarations have.

    make_stub.py           write it
    make_stub.py --check   exit code 1 if it is not what would be written (make lint)

A pointer to a struct is a class of its own, so a graph handed in for a tensor is found by the type checker. ``make .venv/.ready``
compiles the extension again after a change in ``csrc/``.
"""

import sys
from pathlib import Path

from pyggml_spec import _native

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "pyggml_spec" / "_native.pyi"

HEAD = '''\
"""Written by scripts/make_stub.py from the compiled extension."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")

class CData: ...

class Array(CData, Generic[_T]):
    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Array[_T]: ...
    def __setitem__(self, index: int, value: _T) -> None: ...
    def __iter__(self) -> Iterator[_T]: ...
    def __len__(self) -> int: ...

class FFI:
    NULL: Any
    def new(self, cdecl: str, init: Any = None) -> Any: ...
    def cast(self, cdecl: str, source: Any) -> Any: ...
    def string(self, cdata: CData, maxlen: int = -1) -> bytes: ...
    def buffer(self, cdata: CData, size: int = -1) -> memoryview: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...
    def from_buffer(self, cdecl_or_buffer: Any, python_buffer: Any = None, require_writable: bool = False) -> Any: ...
    def callback(self, cdecl: str, python_callable: Any) -> Any: ...
    def release(self, cdata: CData) -> None: ...
    def typeof(self, cdecl: Any) -> Any: ...
    def sizeof(self, cdecl: Any) -> int: ...
    def memmove(self, dest: Any, src: Any, n: int) -> None: ...
    def gc(self, cdata: _T, destructor: Any, size: int = 0) -> _T: ...
'''


def structs(ffi) -> dict[str, object]:
    """Every struct that a typedef or a tag names, by the name of its class."""
    typedefs, tags, _ = ffi.list_types()
    names = [*(f"struct {tag}" for tag in tags), *typedefs]
    types = [ffi.typeof(name) for name in names]
    found = [t.item if t.kind == "pointer" else t for t in types]
    return {class_name(t): t for t in found if t.kind == "struct"}


def class_name(ctype) -> str:
    return ctype.cname.removeprefix("struct ")


def python_type(ctype, given: bool = False) -> str:
    """The type of a value that C gives, or (``given``) that Python hands in."""
    kind = ctype.kind
    if kind in ("void", "enum"):
        return {"void": "None", "enum": "int"}[kind]
    if kind == "primitive":
        return {"float": "float", "double": "float", "_Bool": "bool"}.get(ctype.cname, "int")
    if kind == "struct":
        return class_name(ctype)
    if kind == "pointer" and ctype.item.kind == "struct":
        return class_name(ctype.item)
    if given:
        return "Any"  # cffi takes buffers, tuples and lists for most of them
    if kind == "array" or (kind == "pointer" and ctype.item.kind != "void" and ctype.item.cname != "char"):
        return f"Array[{python_type(ctype.item)}]"
    return "CData"


def fields(ffi, ctype) -> list[str]:
    """The lines of a struct's class body; none for an opaque struct."""
    try:
        ffi.sizeof(ctype)  # also completes the fields: cffi asserts that they are, and ends the process
    except ffi.error:
        return []
    return [f"    {name}: {python_type(field.type)}\n" for name, field in ctype.fields]


def member(ffi, lib, name: str) -> str:
    value = getattr(lib, name)
    if isinstance(value, int):
        return f"    {name}: int\n"
    signature = ffi.typeof(value)
    given = "".join(f", a{i}: {python_type(arg, given=True)}" for i, arg in enumerate(signature.args))
    slash = ", /" if given else ""
    return f"    def {name}(self{given}{slash}) -> {python_type(signature.result)}: ...\n"


def stub() -> str:
    """The stub's text, in the formatter's layout."""
    ffi, lib = _native.ffi, _native.lib
    classes = []
    for name, ctype in sorted(structs(ffi).items()):
        body = fields(ffi, ctype)
        classes.append(f"class {name}(CData):\n{''.join(body)}" if body else f"class {name}(CData): ...\n")
    members = [member(ffi, lib, name) for name in sorted(dir(lib))]
    return "\n".join([HEAD, *classes, "class Lib:\n" + "".join(members), "ffi: FFI\nlib: Lib\n"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            0 if STUB.read_text("utf-8") == stub() else f"{STUB.relative_to(ROOT)} is not that of the extension: run scripts/make_stub.py"
        )
    STUB.write_text(stub(), "utf-8")
    sys.stdout.write(f"{STUB.relative_to(ROOT)}\n")
