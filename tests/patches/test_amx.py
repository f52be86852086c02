"""AMX on any x86 with AVX512: ggml's kernels with tiles in plain C, and the configuration that this compiler really stores."""

import platform
import re
import subprocess
from pathlib import Path

import llama_cpp
import pytest

from pyggml_spec.pin import COMPILER_FIX

pytestmark = pytest.mark.slow
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
def test_the_configuration_is_stored_whole(tmp_path, with_headers):
    """GCC 12.2 stored none of the rows and columns: "Illegal instruction" with the first product on every processor with AMX."""
    assert stored(tmp_path, "-include", str(COMPILER_FIX)) == STORED
    # 0011's line, as it stands in the patched tree.
    patched = (with_headers / "ggml/src/ggml-cpu/amx/mmq.cpp").read_text()
    line = re.search(r'^ *(__asm__ volatile\("" :: "m"\(tc\)\);)\n#endif\n *_tile_loadconfig\(&tc\);', patched, re.MULTILINE)
    assert stored(tmp_path, before=line[1].replace("tc", "c")) == STORED
    # It goes before every C++ file of the build: no header is read for it, on no compiler's account.
    command = ["c++", "-mno-amx-tile", "-E", "-P", "-x", "c++", "-include", str(COMPILER_FIX), "/dev/null"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == ""


@x86
def test_patched_kernels_are_right_at_every_shape(tmp_path, with_headers):
    """One block of inputs and 32 rows were added to what lay in memory (0012): gemma4's per-layer projections, NMSE 0.004 to 0.3 and NaN."""
    if "__AVX512VNNI__" not in macros() or "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor cannot run the kernels around the tiles")
    program, source = tmp_path / "amx_products", with_headers / "ggml/src/ggml-cpu/amx/mmq.cpp"
    folders = [f"-I{with_headers}/ggml/{name}" for name in ("src/ggml-cpu", "src", "include")]
    libraries = [f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}", "-lggml-base", "-lggml-cpu"]
    command = [*FLAGS, "-O1", "-include", HERE / "amx_tiles.h", *folders, HERE / "amx_products.cpp", source, *libraries, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(lines) == 280
    assert not [line for line in lines if not float(line[4]) < 1e-3]
