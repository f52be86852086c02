"""docs/troubleshooting.md says what the doctor says: each check by its name, each remedy in the doctor's words."""

import ast
import re
from pathlib import Path

import pytest

from pyggml_spec import doctor
from pyggml_spec.cli.doctor import command
from pyggml_spec.cli.options import in_options
from pyggml_spec.doctor import files, precision, readings, running, split, trees
from pyggml_spec.doctor.examine import Effort

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "troubleshooting.md").read_text("utf-8").replace("*", "").split())
REMEDY = {"Check": 3, "_Check": 3, "check": 2, "Sweep": 3, "_same": 4, "_verdict": 4}  # which argument it is; `check` is a partial of Check
NAME = {"Check": 0, "_Check": 0, "Sweep": 0, "_same": 0, "partial": 1}
SHORT = 12  # characters of words between two values that need no place of their own


def calls():
    for path in Path(doctor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            yield node
            if isinstance(node, ast.Tuple) and len(node.elts) == 4 and "." in str(getattr(node.elts[1], "value", "")):  # (check, key, ...)
                yield ast.Call(ast.Name("Check"), node.elts, [])


def texts(node) -> list[str]:
    """The texts of an expression, without the values in between."""
    found = [n.value.strip(" ,:;.") for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [text for text in found if len(text) >= SHORT]


def assigned(node: ast.Assign):
    """(name, value) of ``a = 1`` and ``a, b = 1, 2``."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from ((t.id, v) for t, v in zip(target.elts, node.value.elts) if isinstance(t, ast.Name))
        elif isinstance(target, ast.Name):
            yield target.id, node.value


def remedies() -> list[str]:
    out = []
    for node in calls():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REMEDY:
            given = node.args[REMEDY[node.func.id] :][:1] + [k.value for k in node.keywords if k.arg == "remedy"]
            out += [text for value in given for text in texts(value)]
        if isinstance(node, ast.Assign):
            out += [text for name, value in assigned(node) if name in ("remedy", "edit", "again") for text in texts(value)]
    return sorted(set(out))


def names() -> list[str]:
    out = {
        "drafter quantisation",
        "target quantisation",
        "template and thinking",
        "drafter weights",
        "target weights",
    }  # given as variables
    for node in calls():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAME and len(node.args) > NAME[node.func.id]:
            name = node.args[NAME[node.func.id]]
            out |= {name.value} if isinstance(name, ast.Constant) and isinstance(name.value, str) else set()
    return sorted(out)


def test_the_doctors_words_were_found():
    assert len(remedies()) > 40 and len(names()) > 25 and "speed-up" in names()


@pytest.mark.parametrize("remedy", remedies())
def test_every_remedy_is_on_the_page(remedy):
    """In the words of `pyspec doctor`."""
    assert in_options(remedy, command) in PAGE


@pytest.mark.parametrize("name", names())
def test_every_check_is_on_the_page(name):
    assert f"**{name}**" in (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").replace("\n", " ")


def test_limits_on_the_page_are_the_doctors():
    page, effort = " ".join((ROOT / "docs" / "doctor.md").read_text("utf-8").split()), Effort()
    for words in (
        f"positions of these texts ({effort.prompts * effort.blocks} by default)", f"rises by {readings.MIN_GAIN:g} nats",
        f"{4 * readings.MIN_GAIN:g} nats suffice", f"up to {files.SCANNED >> 20} and {files.SCANNED_TARGET >> 20} Mi values each",
        f"acceptance falls by {precision.LOSS_FAIL:.0%}".replace("%", " %"), f"{1 - running.AGREES:.0%} fewer accepted".replace("%", " %"),
        f"a tree of {trees.ROWS} rows",
    ):  # fmt: skip
        assert words in page
    assert (readings.MIN_Z, running.REPEATS, running.MATTERS, split.DEAR, split.WORTH) == (3, 4, 0.8, 0.1, 0.1)  # in words


def test_the_table_of_what_is_measured_has_every_check_and_no_other():
    rows = [line.split("|")[1].strip() for line in (ROOT / "docs" / "doctor.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    broken = {"drafter", "pair", "target", "generation"}  # what nothing can be measured of
    assert {name for row in rows[1:] for name in row.split(", ")} == set(names()) - broken


def test_the_page_names_no_check_that_there_is_not():
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").replace("\n", " ")
    assert set(re.findall(r"\*\*([^*]+)\*\*", page)) == set(names())
