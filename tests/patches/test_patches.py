"""The patch set fits the tree it was made for, and what does not fit is named and leaves the tree alone."""

import importlib
import os
import platform
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import llama_cpp
import numpy as np
import pytest
from click.testing import CliRunner
from gguf_io.build import Model
from random_gguf.archs import WRITERS
from random_gguf.described import write_described
from random_gguf.model import Shape

from pyggml_spec import patching as patches
from pyggml_spec.cli.patches import command
from pyggml_spec.errors import PatchError
from pyggml_spec.ggml.device import SWITCHES
from pyggml_spec.pin import COMPILER_FIX
from pyggml_spec.tools.compare import Comparison

pytestmark = pytest.mark.slow
SERIES = patches.series()
SCRIPTS = Path(__file__).parents[2] / "scripts"


def contents(tree: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_every_prefix_of_the_series_applies(tree: Path):
    alone = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    for patch in SERIES:
        done = subprocess.run(["git", "apply", patch.path], cwd=tree, env=alone, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.path.name}: {done.stderr}"


def test_trees_and_sdists_that_are_others(tree, tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # git skips files inside another repository, silently
    patches.apply(tree, SERIES[:1])
    assert "llama_perf_counters" in (tree / "include" / "llama.h").read_text()
    with pytest.raises(PatchError, match="no llama.cpp source tree"):
        patches.check(tmp_path)
    (tmp_path / patches.SDIST).write_bytes(b"\x1f\x8b not an archive")
    with pytest.raises(PatchError, match="cannot be unpacked"):
        patches.unpack(tmp_path / patches.SDIST, tmp_path)


def test_commands(tree: Path, tmp_path: Path):
    listed = CliRunner().invoke(command, ["list"])
    assert listed.exit_code == 0 and all(patch.path.name in listed.output for patch in SERIES)
    assert f"0 applied, {len(SERIES)} applicable" in CliRunner().invoke(command, ["check", str(tree)]).output
    assert CliRunner().invoke(command, ["apply", str(tree)]).exit_code == 0
    assert f"{len(SERIES)} applied, 0 applicable" in CliRunner().invoke(command, ["check", str(tree)]).output
    refused = CliRunner().invoke(command, ["check", str(tmp_path)])
    assert refused.exit_code == 3 and "no llama.cpp source tree" in refused.output


NEEDED = {}  # numbers of all patches that one needs; it names earlier ones
for patch in SERIES:
    named = set(re.findall(r"\d{4}", re.search(r"^Needs: (.*)$", patch.path.read_text(), re.MULTILINE)[1]))
    NEEDED[patch.path.name[:4]] = named.union(*(NEEDED[number] for number in named))


@pytest.mark.parametrize("patch", SERIES, ids=lambda patch: patch.path.stem)
def test_applies_on_what_it_needs_alone(patch, tree: Path):
    chosen = [other for other in SERIES if other.path.name[:4] in NEEDED[patch.path.name[:4]]] + [patch]
    assert patches.apply(tree, chosen) == chosen


def test_the_series_and_its_switches():
    folder = patches.patches_dir()
    assert sorted(patch.path.name for patch in SERIES) == sorted(path.name for path in folder.glob("*.patch"))
    # A prompt kept on disk was taken for that of other kernels: of the patches' switches only those of small batches were looked at.
    same_numbers = {"GGML_CUDA_PREFETCH", "GGML_CUDA_CAPTURE_AHEAD", "GGML_CUDA_SHARED_BESIDE"}
    same_numbers |= {"GGML_CUDA_DELTA_STEP", "GGML_CUDA_MOE_ROUTE", "GGML_CUDA_ATTENTION_ROWS"}
    same_numbers |= {"GGML_CUDA_ROPE_ROWS", "GGML_CUDA_KV_MASK", "GGML_CUDA_NARROW_MASK", "GGML_CUDA_ROTATED_ROWS"}
    read = {name for patch in SERIES for name in re.findall(r'^\+.*getenv\("(GGML_CUDA_\w+)"\)', patch.path.read_text(), re.MULTILINE)}
    assert len(read) > 8 and read - same_numbers <= set(SWITCHES)
    # Another name would be found nowhere, and no step would say so: nothing was captured ahead, no worker was asked what it computes.
    added = [line for patch in SERIES for line in patch.path.read_text().splitlines() if line.startswith("+")]
    asked = re.findall(r'proc_of\(backend, "(\w+)"\)', (SCRIPTS.parent / "csrc" / "step_graph.c").read_text())
    assert len(asked) == 3 and all(any(f'strcmp(name, "{name}") == 0' in line for line in added) for name in asked)
    read = re.findall(r'environ\.get\("(GGML_\w+)"', (SCRIPTS.parent / "pyggml_spec" / "engine" / "graph_cache.py").read_text())
    assert read and all(any(f'getenv("{name}")' in line for line in added) for name in read)


def definitions(tree: Path) -> dict[tuple[str, str], str]:
    """Structs, unions and enums of the public headers, without comments and layout."""
    found = {}
    for header in [*tree.glob("include/*.h"), *tree.glob("ggml/include/*.h")]:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
        for begin in re.finditer(r"\b(?:struct|union|enum) (\w+)\s*\{", text):
            depth, end = 1, begin.end()
            while depth:
                depth, end = depth + {"{": 1, "}": -1}.get(text[end], 0), end + 1
            found[header.name, begin[1]] = "".join(text[begin.start() : end].split())
    return found


def test_programs_built_for_the_pinned_libraries_run_on_patched_ones(unpacked, patched):
    """The extension and llama-cpp-python are compiled for structs and constants of the pristine headers."""
    before, after = definitions(unpacked), definitions(patched)
    assert len(before) > 30 and ("ggml.h", "ggml_tensor") in before and len(after) > len(before)
    assert not [name for name, text in before.items() if after.get(name) != text]


@pytest.mark.parametrize("patch", SERIES, ids=lambda patch: patch.path.stem)
def test_headers_say_what_why_and_on_what(patch):
    header = patch.path.read_text().split("diff --git", 1)[0]
    for field in ("What:", "Why:", "Moves:", "Needs:", "Test:"):
        assert re.search(rf"^{field}", header, re.MULTILINE), f"{patch.path.name} has no line {field}"
    assert patch.path.stem in (patches.patches_dir() / "README.md").read_text()


def test_patches_apply_or_nothing_does(unpacked, patched):
    before, after = contents(unpacked), contents(patched)
    assert patches.n_applied(unpacked) == 0 and patches.apply(patched) == []
    assert contents(unpacked) == before != after == contents(patched)


def test_continues_a_tree_that_has_the_first_patches(tree, patched):
    patches.apply(tree, SERIES[:1])
    assert patches.n_applied(tree) == 1 and patches.apply(tree) == SERIES[1:]
    assert contents(tree).items() <= contents(patched).items()


def test_a_hunk_that_does_not_fit_is_named_and_nothing_is_written(tree):
    file = tree / "src" / "llama-memory-recurrent.cpp"
    file.write_text(file.read_text().replace("rollback <= (llama_pos) n_rs_seq", "rollback < (llama_pos) n_rs_seq"))
    before = contents(tree)
    with pytest.raises(
        PatchError, match=r"0002-\S+ does not fit .*src/llama-memory-recurrent.cpp:\d+.*0\.3\.36.*this tree has ggml 0\.25\.3"
    ):
        patches.apply(tree)
    assert contents(tree) == before


def test_models_that_llama_cpp_writes_are_equal_or_refused_for_a_reason(tmp_path, monkeypatch):
    """What `make test-patches` does with the files of llama.cpp's own test; a missing file, an unexpected refusal and a difference all count."""
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("run_patched_tests")
    shape, archs = Shape(n_layer=2, target_window=8), ("qwen3", "llama", "laguna", "qwen2")
    for name in ("qwen3-dense", "llama-dense"):
        WRITERS[name.rsplit("-", 1)[0]](tmp_path / f"{name}.gguf", shape)
    parts = Model(WRITERS["laguna"](tmp_path / "laguna-moe.gguf", shape))
    parts.tensors["output.scale"] = [(1,), 0, np.float32(2).tobytes()]
    parts.write(tmp_path / "laguna-moe.gguf")
    scaled = Model(WRITERS["qwen2"](tmp_path / "qwen2-dense.gguf", shape))
    scaled.tensors["blk.0.ffn_up.scale"] = [(1,), 0, np.full(1, 2, np.float32).tobytes()]
    scaled.write(tmp_path / "qwen2-dense.gguf")
    assert (
        script.compare(tmp_path, archs) == 2
    )  # a head of F32 has no scale in llama.cpp: that is another reason; and there is no llama-moe
    parts.tensors["blk.0.attn_gate.scale"] = parts.tensors.pop("output.scale")
    parts.write(tmp_path / "laguna-moe.gguf")
    write_described("llama", tmp_path / "llama-moe.gguf", shape, keys={"expert_count": 8, "expert_used_count": 3})
    assert script.compare(tmp_path, archs) == 0 and script.compare(tmp_path, (*archs, "granite")) == 1
    monkeypatch.setattr(script, "compare_logits", lambda *args, **more: Comparison(1e-9, 1e-4, 1.0, 1.0, 64))
    assert script.compare(tmp_path, archs) == 5


def test_a_filter_that_chooses_no_case_fails(tmp_path, monkeypatch):
    """test-backend-ops ends with 0 then: an operation that is renamed would be tested no longer."""
    monkeypatch.syspath_prepend(SCRIPTS)
    build, tool = importlib.import_module("build_patched_llamacpp"), tmp_path / "bin" / "test-backend-ops"
    monkeypatch.setattr(build, "TEST_RUNS", ["test-backend-ops test -b CPU"])
    tool.parent.mkdir()
    for passed, failed in ((0, 1), (20, 0)):
        tool.write_text(f"#!/bin/sh\necho '  {passed}/{passed} tests passed'\n")
        tool.chmod(0o755)
        assert build.test(tool.parent) == failed


def test_the_build_for_sanitizers_sets_what_sources_read(patched, monkeypatch):
    """It would be the ordinary one if a name were another, and memcheck or racecheck would report what is no error."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    options = importlib.import_module("build_patched_llamacpp").cmake_options
    ordinary, sanitized = (set(options(SimpleNamespace(cuda=True, cuda_arch="", sanitizers=wanted))) for wanted in (False, True))
    names = re.findall(r"GGML_\w+", " ".join(sanitized - ordinary))
    sources = "".join(path.read_text("utf-8") for path in (patched / "ggml" / "src" / "ggml-cuda").glob("*.cuh"))
    assert len(names) == 2 and all(re.search(rf"#if.*\b{name}\b", sources) for name in names)


def test_a_copied_tree_keeps_sources_that_are_called_build(tmp_path: Path, monkeypatch):
    """llama.cpp's cmake/build-info.cmake was left out with the folders of builds, and the copy could not be configured."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    source = tmp_path / "tree"
    for name in ("build/a.o", "build-cuda/a.o", ".git/HEAD", "CMakeLists.txt", "cmake/build-info.cmake", "common/build-info.cpp.in"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    importlib.import_module("build_patched_llamacpp").copy_tree(source, tmp_path / "copy")
    assert set(contents(tmp_path / "copy")) == {"CMakeLists.txt", "cmake/build-info.cmake", "common/build-info.cpp.in"}


HERE = Path(__file__).parent
LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
FLAGS = ["c++", "-std=c++17", "-O3", "-w", "-march=native", "-mamx-tile", "-mamx-int8", "-D_GNU_SOURCE"]
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX is x86's")


def macros() -> str:
    return subprocess.run([*FLAGS, "-dM", "-E", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True).stdout


# what ggml does, on bytes that can be told apart; a copy of them stands in for the instruction, which few processors have
CONFIGURE = """
#include <immintrin.h>
#include <cstdint>
#include <cstdio>
struct Config { uint8_t palette = 0, start = 0, reserved[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; };
extern "C" { char seen[64]; }
__attribute__((noinline)) void configure() {
    alignas(64) Config c = {};
    c.palette = 1;
    for (int i = 0; i < 8; i++) { c.bytes[i] = i < 2 ? 64 : 32; c.rows[i] = i < 2 ? 8 : 16; }
    %s
    _tile_loadconfig(&c);
}
int main() { configure(); for (char c : seen) printf("%%d ", c); }
"""
STORED = [1, *[0] * 15, 64, 0, 64, 0, *[32, 0] * 6, *[0] * 16, 8, 8, *[16] * 6, *[0] * 8]
COPY = "subq $256, %rsp\nmovdqu %xmm0, (%rsp)\n" + "".join(
    f"movdqu {{at}}+{256 + i}(%rsp), %xmm0\nmovdqu %xmm0, seen+{i}(%rip)\n" for i in range(0, 64, 16)
)


COPY += "movdqu (%rsp), %xmm0\naddq $256, %rsp"


def stored(folder: Path, *flags: str, before: str = "") -> list[int]:
    """The 64 bytes that ``_tile_loadconfig`` finds when this compiler has optimised its caller."""
    source, assembly, program = folder / "configure.cpp", folder / "configure.s", folder / "configure"
    source.write_text(CONFIGURE % before)
    subprocess.run([*FLAGS, "-fno-pie", "-fno-stack-protector", *flags, "-S", source, "-o", assembly], check=True)
    text, n = re.subn(r"ldtilecfg\s+(-?\d*)\(%rsp\)", lambda m: COPY.format(at=m[1] or 0), assembly.read_text())
    assert n == 1, "the instruction is not where the test expects it"
    assembly.write_text(text)
    subprocess.run(["c++", "-no-pie", assembly, "-o", program], check=True)
    return [int(word) for word in subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()]


@x86
def test_the_configuration_is_stored_whole(tmp_path, patched):
    """GCC 12.2 stored none of the rows and columns: "Illegal instruction" with the first product on every processor with AMX."""
    assert stored(tmp_path, "-include", str(COMPILER_FIX)) == STORED
    # 0011's line, as it stands in the patched tree.
    kernels = (patched / "ggml/src/ggml-cpu/amx/mmq.cpp").read_text()
    line = re.search(r'^ *(__asm__ volatile\("" :: "m"\(tc\)\);)\n#endif\n *_tile_loadconfig\(&tc\);', kernels, re.MULTILINE)
    assert stored(tmp_path, before=line[1].replace("tc", "c")) == STORED
    # It goes before every C++ file of the build: no header is read for it, on no compiler's account.
    command = ["c++", "-mno-amx-tile", "-E", "-P", "-x", "c++", "-include", str(COMPILER_FIX), "/dev/null"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""


@x86
def test_patched_kernels_are_right_at_every_shape(tmp_path, patched):
    """One block of inputs and 32 rows were added to what lay in memory (0012): gemma4's per-layer projections, NMSE 0.004 to 0.3 and NaN."""
    if "__AVX512VNNI__" not in macros() or "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor cannot run the kernels around the tiles")
    program, source = tmp_path / "amx_products", patched / "ggml/src/ggml-cpu/amx/mmq.cpp"
    folders = [f"-I{patched}/ggml/{name}" for name in ("src/ggml-cpu", "src", "include")]
    libraries = [f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}", "-lggml-base", "-lggml-cpu"]
    command = [*FLAGS, "-O1", "-include", HERE / "amx_tiles.h", *folders, HERE / "amx_products.cpp", source, *libraries, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(lines) == 280 and not [line for line in lines if not float(line[4]) < 1e-3]
