"""pyspec plan"""

import sys

import click

from ..load_options import LoadOptions
from ..tools.plan import Checked, NoPlan, Plan, check, plan, plan_everywhere
from .help import GroupedCommand
from .main import EXIT_CHECK
from .options import planning
from .tables import json_line
from .terminal import size

_PURPOSES = {
    "weights": "weights",
    "draft_weights": "drafter weights",
    "kv": "K/V",
    "draft_kv": "drafter K/V",
    "recurrent": "recurrent state",
    "compute": "compute buffers",
}


TOLERATED = 0.01


@click.command("plan", cls=GroupedCommand)
@planning("Plan for this device only, or for a split over several. Default: every device.", "none, as for a run without --prefix-cache")
@click.option(
    "--slots",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Sequences at once, each with a context of its own (Session.concurrent).",
)
@click.option(
    "--check", "checked", is_flag=True, help="Then load it, generate a little, and compare. Exit code 3 if the plan is more than 1 % off."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per device.")
def command(target, draft, options: LoadOptions, slots: int, checked: bool, as_json: bool):
    """Counts the bytes that a pair takes, without loading it, and the longest context that fits. Exit code 3 if no device has room.

    What a driver takes for itself (some hundred MiB with CUDA) is not counted.
    """
    if checked:
        found = check(target, draft, options, slots=slots)
        click.echo(json_line(found.as_dict())) if as_json else _show_checked(found)
        sys.exit(EXIT_CHECK if found.error > TOLERATED else 0)
    plans = (
        [plan(target, draft, options, slots=slots)] if options.device is not None else plan_everywhere(target, draft, options, slots=slots)
    )
    for one in plans:
        if as_json:
            click.echo(json_line(one.as_dict()))
        else:
            _show(one)
    if not any(isinstance(one, Plan) and one.fits for one in plans):
        sys.exit(EXIT_CHECK)


def _show(one: Plan | NoPlan) -> None:
    if isinstance(one, NoPlan):
        click.echo(f"{one.device}: cannot run it: {one.reason}")
        return
    click.echo(f"{one.device}, context {one.n_ctx}: {'fits' if one.fits else 'DOES NOT FIT'}, {size(one.total)} of {size(one.free)} free")
    for part in one.split:
        room = "" if part.fits else ", WHICH IS TOO MUCH"
        click.echo(f"  {part.layers:<16} {size(part.total):>10}  of {size(part.free)} free{room}")
    for key, name in _PURPOSES.items():
        if key in one.memory:
            click.echo(f"  {name:<16} {size(one.memory[key]):>10}  {_detail(one, key)}".rstrip())
    if one.slots_memory:
        parts = ", ".join(f"{name} {size(one.slots_memory[key])}" for key, name in _PURPOSES.items() if key in one.slots_memory)
        click.echo(f"  {f'{one.slots} slots':<16} {size(sum(one.slots_memory.values())):>10}  {size(one.per_slot)} each; {parts}")
    if one.prefix_memory:
        click.echo(f"  {'prefix cache':<16} {size(one.prefix_memory):>10}  at most, for shared prompt prefixes")
    if one.host_bytes:
        pages = ", of which two layers at a time are copied for prompts" if one.copied else ", as pages of the file"
        click.echo(f"  {'in host memory':<16} {size(one.host_bytes):>10}  experts{pages}")
    if one.copied:
        click.echo(f"  {'for copies':<16} {size(one.copied):>10}  of the weights' memory")
    types = sorted(one.weights_by_type.items(), key=lambda item: -item[1])
    click.echo(f"  tensors by type: {', '.join(f'{name} {size(nbytes)}' for name, nbytes in types)}")
    if one.largest_context:
        click.echo(
            f"  longest context that fits: {one.largest_context}"
            + (" (the trained one)" if one.largest_context == one.trained_context else "")
        )
    else:
        less = "less --prefix-memory, " if one.prefix_memory else ""
        click.echo(f"  no context fits; use {less}a smaller quantisation or another device")


def _show_checked(one: Checked) -> None:
    _show(one.plan)
    click.echo(f"loaded; bytes {'planned':>22} {'allocated':>15} {'off by':>10}")
    rows = [(name, one.plan.memory.get(key, 0), one.memory.get(key, 0)) for key, name in _PURPOSES.items()]
    rows += [(f"slots: {name}", one.plan.slots_memory.get(key, 0), one.slots_memory.get(key, 0)) for key, name in _PURPOSES.items()]
    for name, planned, allocated in [*(row for row in rows if any(row[1:])), ("all", one.planned, one.total)]:
        click.echo(f"  {name:<22} {planned:>15} {allocated:>15} {100 * abs(planned - allocated) / max(1, allocated):>8.2f} %")
    if one.taken is not None:
        more = one.taken - one.total
        click.echo(
            f"  the device has {size(one.taken)} less free than before: {size(max(0, more))} for the driver, its kernels and their buffers"
        )


def _detail(one: Plan, key: str) -> str:
    if key == "kv":
        return f"{size(one.kv_per_token)} per token, drafter included"
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in one.compute_by_role.items()) if key == "compute" else ""
