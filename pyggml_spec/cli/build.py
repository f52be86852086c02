"""pyspec build"""

import shutil
from pathlib import Path

import click

from .. import building, rpc_library
from ..errors import BuildError
from ..pin import LLAMA_CPP_PYTHON, installed_libraries, pip_command
from .help import Command, flag, option
from .terminal import progress_line, say


@click.command("build", cls=Command)
@flag("--cuda", "For NVIDIA GPUs; needs CUDA's compiler.")
@option("--arch", "GPUs to build for, like 90, 86;89 or native. Default: this machine's, without one all.", metavar="LIST")
@option("--patches/--no-patches patched", "With the patches that `pyspec patches list` names. Default: with --cuda.", default=None)
@option("--out", "Write the wheel to DIR and install nothing.", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@flag("--rpc", "Only the RPC library for `pyspec worker` and remote devices; seconds.")
@flag("--fresh", "Build even if the same build is cached.")
def command(cuda: bool, arch: str | None, patched: bool | None, out: Path | None, rpc: bool, fresh: bool):
    """Builds the llama-cpp-python that this package needs, and replaces the installed libraries.

    Optimised for this machine's processor; takes minutes, half an hour with --cuda. Libraries are replaced atomically after a test run: a
    failed or interrupted build leaves the environment unchanged. Without --cuda the build is for CPUs only.
    """
    try:
        if not rpc:
            _build(cuda, arch, patched, out, fresh)
        elif cuda or arch is not None or patched is not None or out is not None:
            raise click.UsageError("--rpc builds a library of its own that fits every build: give it alone, or with --fresh")
        else:
            say(f"installed in {rpc_library.build(fresh)}")
    except BuildError as error:
        for line in error.log:
            say(line)
        raise


def _build(cuda: bool, arch: str | None, patched: bool | None, out: Path | None, fresh: bool) -> None:
    if arch is not None and not cuda:
        raise click.UsageError("--arch names GPUs: add --cuda")
    libraries = installed_libraries()
    if out is None and libraries is None:
        raise BuildError(f"llama-cpp-python {LLAMA_CPP_PYTHON} is not installed in this environment; run: {pip_command()}")
    if out is None and cuda and building.driver_version() is None:
        hint = "give --out to build a wheel for another machine"
        raise BuildError(f"this machine has no NVIDIA driver, so a CUDA build would not start; {hint}")
    plan = building.plan(cuda, arch, cuda if patched is None else patched)
    say(f"llama-cpp-python {LLAMA_CPP_PYTHON} for {plan.description}")
    wheel = None if fresh else building.kept_wheel(plan.key)
    if wheel is None:
        with progress_line() as progress:
            wheel = plan.build(lambda done, total: progress("building", done, total or 1))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        click.echo(shutil.copy2(wheel, out / wheel.name))
        return
    assert libraries is not None
    building.install(wheel, libraries, plan.note)
    say(f"installed in {libraries}" + ("; `pyspec devices` lists devices, `pyspec build` goes back to CPUs only" if cuda else ""))
