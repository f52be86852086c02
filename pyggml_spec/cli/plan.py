"""pyspec plan"""

import sys

import click

from ..load_options import LoadOptions
from ..tools.plan import Checked, NoPlan, Plan, check, plan, plan_everywhere
from .help import GroupedCommand, flag, option
from .main import EXIT_CHECK
from .options import load_options
from .terminal import json_line, size

_PURPOSES = {
    "weights": "weights", "draft_weights": "drafter weights", "kv": "K/V", "draft_kv": "drafter K/V", "recurrent": "recurrent state",
    "compute": "compute buffers",
}  # fmt: skip
TOLERATED = 0.01


@click.command("plan", cls=GroupedCommand)
@load_options(
    "llama.cpp",
    "split",
    "experts",
    "drafting",
    "caches",
    "pictures",
    memory="none, as for a run without --prefix-cache",
    device="Plan for this device only, or for a split over several. Default: every device.",
)
@option("--slots", "Sequences at once, each with a context of its own (Session.concurrent).", type=click.IntRange(1), shown=1)
@flag("--check checked", "Then load it, generate a little, and compare. Exit code 3 if the plan is more than 1 % off.")
@flag("--json as_json", "One JSON object per device.")
def command(target, draft, options: LoadOptions, slots: int, checked: bool, as_json: bool):  # fmt: skip
    """Counts the bytes that a pair takes, without loading it, and the longest context that fits. Exit code 3 if no device has room.

    What a driver takes for itself (some hundred MiB with CUDA) is not counted.
    """
    if checked:
        found = check(target, draft, options, slots=slots)
        click.echo(json_line(found.as_dict())) if as_json else _show_checked(found)
        sys.exit(EXIT_CHECK if found.error > TOLERATED else 0)
    plans: list[Plan | NoPlan] = (
        [plan(target, draft, options, slots=slots)] if options.device is not None else plan_everywhere(target, draft, options, slots=slots)
    )
    for one in plans:
        click.echo(json_line(one.as_dict())) if as_json else _show(one)
    if not any(isinstance(one, Plan) and one.fits for one in plans):
        sys.exit(EXIT_CHECK)


def _show(one: Plan | NoPlan) -> None:
    if isinstance(one, NoPlan):
        click.echo(f"{one.device}: cannot run it: {one.reason}")
        return
    click.echo(f"{one.device}, context {one.n_ctx}: {'fits' if one.fits else 'DOES NOT FIT'}, {size(one.total)} of {size(one.free)} free")
    kv, roles = f"{size(one.kv_per_token)} per token, drafter included", one.compute_by_role
    details = {
        "kv": kv,
        "draft_kv": one.draft_kv_type,
        "compute": ", ".join(f"{name} {size(nbytes)}" for name, nbytes in roles.items() if nbytes),
    }
    rows = [(part.layers, part.total, f"of {size(part.free)} free{'' if part.fits else ', WHICH IS TOO MUCH'}") for part in one.split]
    rows += [(name, one.memory[key], details.get(key, "")) for key, name in _PURPOSES.items() if key in one.memory]
    if one.slots_memory:
        parts = ", ".join(f"{name} {size(one.slots_memory[key])}" for key, name in _PURPOSES.items() if key in one.slots_memory)
        rows.append((f"{one.slots} slots", sum(one.slots_memory.values()), f"{size(one.per_slot)} each; {parts}"))
    pages = ", of which two layers at a time are copied for prompts" if one.copied else ", as pages of the file"
    others = [("encoder", one.encoder, "of images, without its own buffers"), ("prefix cache", one.prefix_memory, "at most, for shared prompt prefixes"), ("in host memory", one.host_bytes, f"experts{pages}"),
              ("for copies", one.copied, "of the weights' memory")]  # fmt: skip
    for name, nbytes, text in rows + [row for row in others if row[1]]:
        click.echo(f"  {name:<16} {size(nbytes):>10}  {text}".rstrip())
    types = sorted(one.weights_by_type.items(), key=lambda item: -item[1])
    click.echo(f"  tensors by type: {', '.join(f'{name} {size(nbytes)}' for name, nbytes in types)}")
    if one.largest_context:
        trained = " (the trained one)" if one.largest_context == one.trained_context else ""
        click.echo(f"  longest context that fits: {one.largest_context}{trained}")
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
        more = size(max(0, one.taken - one.total))
        click.echo(f"  the device has {size(one.taken)} less free than before: {more} for the driver, its kernels and their buffers")
