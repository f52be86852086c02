"""pyspec worker"""

import click

from .help import Command, option
from .terminal import say


@click.command("worker", cls=Command)
@option("--host", "Address to listen at.", shown="127.0.0.1")
@option("--port", "Port to listen at.", type=click.IntRange(1, 65535), shown=50052)
@option("--device", "Devices to serve, comma-separated. Default: the GPUs, or the CPU.")
@option("-t --threads", "CPU threads. Default: the cores of this process, at most 16.", type=click.IntRange(1, 512))
@option("--programs", "Clients at a time, each with its own process.", type=click.IntRange(1, 64), shown=1)
@option("--cache/--no-cache", "Cache weights in the user's cache folder, so that they are sent once.", default=False)
def command(host, port, device, threads, programs, cache):
    """Serves this machine's devices to other machines: `--device RPC:HOST:PORT` there.

    One client at a time, or --programs; others wait. There is no encryption and no authentication: docs/workers.md shows how to use SSH.
    """
    from ..tools.worker import Worker

    Worker(host, port, device, threads, cache, programs, say).serve()
