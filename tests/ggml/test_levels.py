"""Every level of our kernels gives the same bits, the one for ARM under emulation: the file of a level and a small program, without the package.

The ARM level needs a cross compiler and an emulator (Debian: gcc-aarch64-linux-gnu, qemu-user), or an ARM machine; it is untimed.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyggml_spec.ggml.kernels import ALL_LEVELS, levels
from pyggml_spec.pin import installed_libraries

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
X86 = {  # file, name in C, flags, features of the processor
    "avx2": ("level_avx2.c", "pgs_level_avx2", AVX2),
    "avxvnni": ("level_avxvnni.c", "pgs_level_avxvnni_evex", AVX512),
    "avx512vnni": ("level_avx512vnni.c", "pgs_level_avx512vnni", AVX512),
}
ARM = ("level_neondot.c", "pgs_level_neondot", ["-march=armv8.2-a+dotprod"])
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 processor to compare with")


def build(folder: Path, compiler: str, level: tuple[str, str, list[str]], *flags: str) -> Path:
    source, name, of_level = level
    parts = [HERE / "level_bits.c", ROOT / "csrc" / "cpu" / source]
    return compiled(folder / name, compiler, parts, f"-DLEVEL={name}", *of_level, *flags)


def compiled(program: Path, compiler: str, parts: list[Path], *flags: str) -> Path:
    # the extension has -O3, which takes eight times as long to compile; without -ffast-math the bits are the same
    options = ["-std=gnu11", "-Og", "-ffp-contract=off", *flags, "-I", ROOT / "csrc", "-I", headers()]
    subprocess.run([str(part) for part in (compiler, *options, *parts, "-lm", "-o", program)], check=True)
    return program


def headers() -> Path:
    libraries = installed_libraries()
    assert libraries is not None
    return next(path.parent for path in libraries.parents[1].glob("**/include/ggml.h"))


def output(*command: object) -> bytes:
    done = subprocess.run(list(map(str, command)), capture_output=True, check=False)
    assert done.returncode == 0, "a row has other bits beside others than alone" if done.returncode == 1 else done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def avx2(tmp_path_factory) -> bytes:
    return output(build(tmp_path_factory.mktemp("level"), "cc", X86["avx2"]))


WIDEST = levels()[0].name if levels() else ""


@pytest.mark.slow
@x86
@pytest.mark.skipif(WIDEST not in X86 or WIDEST == "avx2", reason="this processor has one level")
def test_the_program_gives_the_bits_of_the_widest_level(avx2, tmp_path):
    """What it computes is compared between levels in test_kernels.py; here it is the program that is right."""
    assert output(build(tmp_path, "cc", X86[WIDEST])) == avx2


@pytest.mark.slow
@x86
def test_rounding_by_avx2_gives_the_bits_of_plain_c(tmp_path):
    found = [output(compiled(tmp_path / "x", "cc", [HERE / "rounding_bits.c"], *AVX2, *how)) for how in ([], ["-DPLAIN_ROUNDING"])]
    assert len(found[0]) > 10_000_000 and found[0] == found[1]


def cross() -> tuple[str, str] | None:
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    return (compiler, emulator) if shutil.which(compiler) and shutil.which(emulator) else None


@pytest.mark.slow
@x86
@pytest.mark.skipif(cross() is None, reason="the level for ARM needs gcc-aarch64-linux-gnu and qemu-user here")
def test_the_level_for_arm(avx2, tmp_path):
    """With -fsanitize=undefined it is right, too; emulated, that takes a minute."""
    compiler, emulator = cross()
    assert output(emulator, build(tmp_path, compiler, ARM, "-static")) == avx2


def test_every_level_is_named_and_built():
    files = {path.name for path in (ROOT / "csrc" / "cpu").glob("level_*.c")}
    assert {source for source, *_ in (*X86.values(), ARM)} == files and {*X86, "neondot", "none"} == set(ALL_LEVELS)
    assert set(re.findall(r"level_\w+\.c", (ROOT / "CMakeLists.txt").read_text())) == files
