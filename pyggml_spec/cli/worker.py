"""pyspec worker"""

import click

from .help import Command
from .terminal import say


@click.command("worker", cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(1, 65535), default=50052, show_default=True, help="Port to listen at.")
@click.option("--device", help="Devices to serve, comma-separated. Default: the GPUs, or the CPU.")
@click.option("-t", "--threads", type=click.IntRange(1, 512), help="CPU threads. Default: the cores of this process, at most 16.")
@click.option("--programs", type=click.IntRange(1, 64), default=1, show_default=True, help="Clients at a time, each with its own process.")
@click.option("--cache/--no-cache", default=False, help="Cache weights in the user's cache folder, so that they are sent once.")
def command(host, port, device, threads, programs, cache):
    """Serves this machine's devices to other machines: `--device RPC:HOST:PORT` there.

    One client at a time, or --programs; others wait. There is no encryption and no authentication: docs/workers.md shows how to use SSH.
    """
    from ..tools.worker import Worker

    Worker(host, port, device, threads, cache, programs, say).serve()
