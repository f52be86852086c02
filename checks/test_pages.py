"""The pages tell the truth: commands exist and run, code runs, files and tests that are named are there, generated pages are what the code says."""

import ast
import json
import os
import re
import shlex
import statistics
from pathlib import Path

import click
import pytest

from pyggml_spec.cli.foreign import KNOWN
from pyggml_spec.cli.main import cli
from pyggml_spec.engine.stats import BatchStats, Stats
from pyggml_spec.models.registry import TARGETS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "patches" / "README.md", *sorted((ROOT / "docs" / "benchmarks").glob("**/*.md"))]
GUIDE = ROOT / "docs" / "guide.md"
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in CODE.findall(page.read_text("utf-8")) if kind == language]


def commands(page: Path) -> list[str]:
    """Lines of a shell that call pyspec, comments taken off."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [re.sub(r" +# .*", "", line) for line in lines if re.match(r"(printf .*\| )?pyspec ", line)]


def arguments(line: str) -> list[str]:
    words = shlex.split(line[line.index("pyspec ") :])[1:]
    return words[: next((i for i, word in enumerate(words) if word in ("|", ">", "<")), len(words))]


@pytest.mark.parametrize("page, line", [(page.name, line) for page in PAGES for line in commands(page)])
def test_commands_have_the_options_that_pages_give_them(page, line):
    command, words = cli, arguments(line)
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"{page}: there is no command {name}"
    command.make_context(name, words)


def test_the_map_names_every_folder_and_no_other():
    """What is in a folder, each module's first line says."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"(\w+)/(?= )", text[text.index("## The map") : text.index("## Structures that matter")]))
    package = ROOT / "pyggml_spec"
    folders = {path.parent.name for path in package.glob("*/__init__.py")} | {"csrc", "patches"}
    assert named == folders - {"__pycache__"}


def test_there_are_commands_to_check():
    assert len(commands(GUIDE)) > 20 and commands(ROOT / "README.md") and len(blocks(GUIDE, "python")) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_pages_name_exist(page):
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:tests|scripts|docs|pyggml_spec|csrc|patches)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    tests = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests").rglob("*.py")) + "\n".join(
        p.read_text("utf-8") for p in (ROOT / "checks").glob("*.py")
    )
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def _anchor(heading: str) -> str:
    """As GitHub names a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_links_into_pages_lead_to_headings(page):
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]*)\)", page.read_text("utf-8")):
        text = ((page.parent / link) if link else page).read_text("utf-8")
        assert anchor in map(_anchor, re.findall(r"^#+ (.*)$", text, re.MULTILINE)), f"{link}#{anchor}"


def _options(group=cli) -> set[str]:
    context, found = click.Context(group), set()
    for command in (group.get_command(context, name) for name in group.list_commands(context)):
        found |= (
            _options(command)
            if isinstance(command, click.Group)
            else {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        )
    return found


def test_options_and_variables_that_pages_name_exist():
    """Those of our commands and scripts; of other programs, those named here."""
    others = {"--no-cache-dir", "--kv-unified", "--unix-socket", "--allow-requantize"}  # pip's, llama-server's, curl's, llama-quantize's
    files = [path for folder in ("pyggml_spec", "scripts", "csrc", "patches") for path in (ROOT / folder).rglob("*.*")]
    code = "\n".join(path.read_text("utf-8") for path in files if path.suffix in (".py", ".c", ".h", ".patch"))
    known = _options() | others | KNOWN.keys() | set(re.findall(r"\"(--?[a-z][\w-]+)\"", code))
    for page in EVERY:
        text = page.read_text("utf-8")
        named = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]+", " ".join(re.findall(r"`([^`\n]+)`", text))))
        assert named <= known, (page.name, named - known)
        variables = set(re.findall(r"\b(?:PYSPEC|GGML|LLAMA|HF)_[A-Z0-9_]+\b", text))
        assert not (unknown := {name for name in variables if name not in code}), (page.name, unknown)


def test_the_page_of_the_patches_names_their_switches():
    """Who looks for what a patch changed has to be able to switch it off."""
    patches = {path: path.read_text("utf-8") for path in (ROOT / "patches").glob("*.patch")}
    read = {name for text in patches.values() for name in re.findall(r'^\+.*getenv\("((?:GGML|LLAMA)_\w+)"\)', text, re.MULTILINE)}
    named = (ROOT / "patches" / "README.md").read_text("utf-8")
    assert len(read) > 20 and not [name for name in read - {"GGML_CUDA_PDL"} if f"`{name}" not in named]  # ggml's own


def _run(name: str, test: str) -> tuple[float, float]:
    """Medians of llama.cpp and pyspec in a file of docs/benchmarks."""
    data = json.loads((ROOT / "docs" / "benchmarks" / f"h200-{name}.json").read_text("utf-8"))
    if "figures" in data:
        return statistics.median(data["figures"]["llama.cpp"][test]), statistics.median(data["figures"]["pyspec"][test])
    row = next(row for row in data["rows"] if test in (row.get("work"), str(row.get("slots"))))
    return statistics.median(row["llama-server" if "slots" in row else "llama.cpp"]), statistics.median(row["pyspec"])


def test_each_row_of_the_readme_is_of_one_run():
    last, few = "gpu-series-0058", ("kernels-4B-Q4_K", "kernels-27B-Q4_K")
    runs = [(last, "27B pp4096"), (last, "35B-A3B pp4096"), (last, "35B-A3B plain"), (few[0], "tg128"), (few[0], "spec"), (few[1], "spec"),
            ("kernels-slots-27B-Q4_K", "8")]  # fmt: skip
    text = (ROOT / "README.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[2:5]] for line in text[: text.index("![")].splitlines() if line.startswith("| ")][1:]
    expected = [[f"{theirs:.0f}", f"{ours:.0f}", f"{ours / theirs:.2f}"] for theirs, ours in (_run(*run) for run in runs)]
    assert rows == expected


def test_every_architecture_is_said_to_be_supported():
    named = re.findall(r"[\w-]+", (ROOT / "docs" / "supported.md").read_text("utf-8"))
    assert not TARGETS.keys() - named


def test_every_count_is_explained():
    """`waited_s` and `grouped` were written and not documented."""
    slots = (ROOT / "docs" / "slots.md").read_text("utf-8")
    tables = (ROOT / "docs" / "statistics.md").read_text("utf-8"), slots[slots.index("## Statistics") : slots.index("## Measuring")]
    for stats, table in zip((Stats(mode="plain", device="CPU"), BatchStats()), tables, strict=True):
        named = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|")))
        assert set(named) == set(stats.as_dict())


def test_an_installation_by_hand_builds_llama_cpp_python_once():
    """In isolation pip builds what pyproject.toml requires anew: without the recipe, in minutes, and kept where `pip install` finds it later."""
    lines = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines() if re.search(r"pip install\b.* -e ", line)]
    assert lines and all("--no-build-isolation" in line for line in lines)


def test_the_commands_of_remedies_hold_where_a_folder_has_a_space(monkeypatch):
    from pyggml_spec import pin

    monkeypatch.setattr(pin, "RECIPE", Path("/a folder/recipe.cmake"))
    (setting,) = [word for word in shlex.split(pin.pip_command("-DX=1")) if word.startswith("CMAKE_ARGS=")]
    assert shlex.split(setting.removeprefix("CMAKE_ARGS=")) == ["-DCMAKE_PROJECT_INCLUDE=/a folder/recipe.cmake", "-DX=1"]


NAMED = re.compile(r"pip install[^\n]*?\bpyggml[-_.]?spec\b", re.IGNORECASE)


@pytest.mark.parametrize("folder", ["", "docs", "pyggml_spec", "scripts", "csrc", "patches", "cmake"])
def test_nothing_names_an_install_of_this_package_from_an_index(folder):
    """It is on none: another package of that name would be installed."""
    files = (ROOT / folder).rglob("*.*") if folder else ROOT.glob("*.*")
    texts = {path: path.read_text("utf-8") for path in files if path.suffix in (".py", ".md", ".toml", ".c", ".h", ".cmake", ".txt")}
    assert texts and not [path for path, text in texts.items() if NAMED.search(text)]
    assert folder not in ("docs", "pyggml_spec") or any("pip install" in text for text in texts.values())


def test_messages_name_no_install_of_this_package_from_an_index():
    from pyggml_spec.ggml import library, probe
    from pyggml_spec.pin import pip_command

    for message in (library.REMEDY, probe.REMEDY, pip_command(), pip_command("-DGGML_CUDA=on")):
        assert message.endswith(f"pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python=={library.LLAMA_CPP_PYTHON}")


def test_scripts_can_be_called_as_pages_print_them():
    for script in (ROOT / "scripts").glob("*.py"):
        assert os.access(script, os.X_OK) or not script.read_text("utf-8").startswith("#!"), f"{script}: chmod +x"


def test_types_reach_the_user():
    """py.typed is installed, and what the package exports by name is what a type checker finds in its modules."""
    import pyggml_spec

    assert (Path(pyggml_spec.__file__).parent / "py.typed").exists()
    tree = ast.parse(Path(pyggml_spec.__file__).read_text("utf-8"))
    shown = next(node for node in tree.body if isinstance(node, ast.If))  # TYPE_CHECKING: the lazy imports are invisible to a checker
    assert {(alias.name, node.module) for node in shown.body for alias in node.names} == set(pyggml_spec._LAZY.items())
    for name in pyggml_spec.__all__:
        assert getattr(pyggml_spec, name).__doc__, name
