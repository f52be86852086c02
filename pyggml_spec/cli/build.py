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
@click.option(
    "--arch", metavar="LIST", help="GPUs to build for, like 90, 86;89 or native. Default: the one of this machine, without one all."
)
@click.option(
    "--patches/--no-patches", "patched", default=None, help="With the patches that `pyspec patches list` names. Default: with --cuda."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Write the wheel there, and install nothing.")
@click.option("--rpc", is_flag=True, help="Only the library that `pyspec worker` and devices of workers need; seconds.")
@click.option("--fresh", is_flag=True, help="Build even if the same build was kept from an earlier time.")
def command(cuda: bool, arch: str | None, patched: bool | None, out: Path | None, rpc: bool, fresh: bool):
    """Builds the llama-cpp-python that this package is made for, and puts its libraries in the place of the installed ones.

    For this machine's processor; minutes, half an hour with --cuda. The libraries are exchanged in one step when they are built and have been
    started once: what fails or is interrupted leaves the environment as it was. Without --cuda it goes back to a build for the CPU alone.
    """
    if rpc:
        if cuda or arch is not None or patched is not None or out is not None:
            raise click.UsageError("--rpc builds a library of its own, which goes with every build: give it alone, or with --fresh")
        say(f"in place in {_rpc(fresh)}")
        return
    if arch is not None and not cuda:
        raise click.UsageError("--arch names GPUs: give --cuda, too")
    libraries = installed_libraries()
    if out is None and libraries is None:
        raise BuildError(f"llama-cpp-python {LLAMA_CPP_PYTHON} is not installed in this environment; run: {pip_command()}")
    if out is None and cuda and building.driver_version() is None:
        raise BuildError(
            "there is no NVIDIA driver on this machine, and without one nothing that is built with CUDA starts; give --out to get a wheel for another machine"
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
        f"in place in {libraries}; `pyspec devices` lists what it finds, `pyspec build` goes back to the CPU alone"
        if cuda
        else f"in place in {libraries}"
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
