"""pyspec worker"""

import click

from .help import Command
from .terminal import say


@click.command("worker", cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(1, 65535), default=50052, show_default=True, help="Port to listen at.")
@click.option("--device", help="Devices to serve, with commas between them. Default: the GPUs, or the CPU.")
@click.option("-t", "--threads", type=click.IntRange(1, 512), help="CPU threads. Default: the cores of this process, at most 16.")
@click.option(
    "--programs", type=click.IntRange(1, 64), default=1, show_default=True, help="Programs at a time, each in a process of its own."
)
@click.option("--cache/--no-cache", default=False, help="Keep weights in the user's cache, so that they are sent once.")
def command(host, port, device, threads, programs, cache):
    """Serves this machine's devices to other machines: `--device RPC:HOST:PORT` there.

    One program at a time, or --programs; others wait. Nothing is encrypted and nobody is asked for a key: docs/workers.md says how to go through SSH.
    """
    from ..tools.worker import Worker

    Worker(host, port, device, threads, cache, programs, say).serve()
