"""pyspec devices"""

import json

import click

from ..ggml.device import devices
from .terminal import size


@click.command("devices")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(as_json: bool):
    """Lists the devices that this build of llama-cpp-python offers."""
    for d in devices():
        if as_json:
            click.echo(json.dumps(d.__dict__))
        else:
            click.echo(f"{d.name:<12} {d.kind:<6} {size(d.memory_free):>10} free of {size(d.memory_total):>10}  {d.description}")
