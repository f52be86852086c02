"""pyspec ps"""

import json
from urllib.error import URLError
from urllib.request import urlopen

import click

from ..errors import PyspecError
from .help import Command, option
from .terminal import size

SECONDS = 5


@click.command("ps", cls=Command)
@option("--url", "Where `pyspec serve` listens.", shown="http://127.0.0.1:8080")
def command(url: str):
    """Lists the models of a running server, loaded and sleeping ones."""
    where = url.rstrip("/").removesuffix("/v1")
    where = where if "://" in where else f"http://{where}"
    try:
        with urlopen(f"{where}/v1/models", timeout=SECONDS) as response:
            models = json.load(response)["data"]
    except (URLError, OSError, ValueError, KeyError) as error:
        raise PyspecError(
            f"no server answers at {where} ({getattr(error, 'reason', error)}); start one by `pyspec serve`, or name another by --url"
        ) from None
    for one in models:
        meta, more = one.get("meta") or {}, one.get("pyspec") or {}
        memory = f"{size(more['planned_bytes'])} in memory" if more.get("planned_bytes") else ""
        drafter = f"drafter {meta['drafter']}" if meta.get("drafter") else ""
        parts = [
            f"{one['id']:<40}",
            f"{(one.get('status') or {}).get('value', 'loaded'):<9}",
            f"{size(meta['size']) if meta.get('size') else '':>10}",
            memory,
            drafter,
            f"process {more['pid']}" if more.get("pid") else "",
        ]
        click.echo("  ".join(part for part in parts if part).rstrip())
