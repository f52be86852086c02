"""pyspec devices"""

import click

from ..ggml.device import build_notes, devices
from ..ggml.library import unloaded_gpu_library
from .help import Command, flag
from .terminal import json_line, say, size


@click.command("devices", cls=Command)
@flag("--json as_json", "One JSON object per line.")
def command(as_json: bool):
    """Lists the devices of this build of llama-cpp-python."""
    found = devices()
    for d in found:
        line = f"{d.name:<12} {d.kind:<6} {size(d.memory_free):>10} free of {size(d.memory_total):>10}  {d.description}"
        click.echo(json_line(vars(d)) if as_json else line)
    if all(d.kind in ("cpu", "accel") for d in found):
        why = unloaded_gpu_library() or "see docs/install.md for a GPU build"
        say(f"note: this build of llama-cpp-python finds no GPU, so everything runs on the CPU; {why}")
    for device in found:
        for note in build_notes(device):
            say(f"note: {device.name}: {note}")
