"""pyspec build"""

import shutil
from pathlib import Path

import click

from .. import building, rpc_library
from ..errors import BuildError
from ..pin import LLAMA_CPP_PYTHON, installed_libraries, pip_command
from .help import Command
from .terminal import progress_line, say


@click.command("build", cls=Command)
@click.option("--cuda", is_flag=True, help="For NVIDIA GPUs; needs CUDA's compiler.")
@click.option("--arch", metavar="LIST", help="GPUs to build for, like 90, 86;89 or native. Default: this machine's, without one all.")
@click.option(
    "--patches/--no-patches", "patched", default=None, help="With the patches that `pyspec patches list` names. Default: with --cuda."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write the wheel to DIR and install nothing.")
@click.option("--rpc", is_flag=True, help="Only the RPC library for `pyspec worker` and remote devices; seconds.")
@click.option("--fresh", is_flag=True, help="Build even if the same build is cached.")
def command(cuda: bool, arch: str | None, patched: bool | None, out: Path | None, rpc: bool, fresh: bool):
    """Builds the llama-cpp-python that this package needs, and replaces the installed libraries.

    Optimised for this machine's processor; takes minutes, half an hour with --cuda. Libraries are replaced atomically after a test run: a
    failed or interrupted build leaves the environment unchanged. Without --cuda the build is for CPUs only.
    """
    if rpc:
        if cuda or arch is not None or patched is not None or out is not None:
            raise click.UsageError("--rpc builds a library of its own that fits every build: give it alone, or with --fresh")
        say(f"installed in {_rpc(fresh)}")
        return
    if arch is not None and not cuda:
        raise click.UsageError("--arch names GPUs: add --cuda")
    libraries = installed_libraries()
    if out is None and libraries is None:
        raise BuildError(f"llama-cpp-python {LLAMA_CPP_PYTHON} is not installed in this environment; run: {pip_command()}")
    if out is None and cuda and building.driver_version() is None:
        raise BuildError(
            "this machine has no NVIDIA driver, so a CUDA build would not start; give --out to build a wheel for another machine"
        )
    plan = building.plan(cuda, arch, cuda if patched is None else patched)
    say(f"llama-cpp-python {LLAMA_CPP_PYTHON} for {plan.description}")
    wheel = None if fresh else building.kept_wheel(plan.key)
    if wheel is None:
        wheel = _build(plan)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        click.echo(shutil.copy2(wheel, out / wheel.name))
        return
    assert libraries is not None
    building.install(wheel, libraries, plan.note)
    say(
        f"installed in {libraries}; `pyspec devices` lists devices, `pyspec build` goes back to CPUs only"
        if cuda
        else f"installed in {libraries}"
    )


def _rpc(fresh: bool) -> Path:
    try:
        return rpc_library.build(fresh)
    except BuildError as error:
        for line in error.log:
            say(line)
        raise


def _build(plan: building.Plan) -> Path:
    try:
        with progress_line() as progress:
            return plan.build(lambda done, total: progress("building", done, total or 1))
    except BuildError as error:
        for line in error.log:
            say(line)
        raise
