"""pyspec compare"""

import json
import sys

import click

from ..tools.compare import compare_logits
from .main import EXIT_CHECK
from .terminal import say


@click.command("compare")
@click.option("--logits", "file", type=click.Path(), required=True, metavar="FILE", help="Target GGUF to compare on.")
@click.option("--tokens", default=64, show_default=True, help="Random tokens to feed to both engines.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random tokens.")
@click.option("--tolerance", default=1e-10, show_default=True, help="Largest NMSE that passes; 0 asks for bit-equality.")
@click.option("--device", help="Device for both engines. Default: the first GPU, or the CPU.")
@click.option("-t", "--threads", type=click.IntRange(1, 512), help="CPU threads for both engines.")
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def command(file: str, tokens: int, seed: int, tolerance: float, device: str | None, threads: int | None, as_json: bool):
    """Is this engine right for your file? Feeds the same tokens to pyspec and to llama.cpp and compares all logits. Exit code 3 if not."""
    result = compare_logits(file, tokens, seed, device, threads)
    passed = result.nmse <= tolerance
    click.echo(f"tokens          {result.tokens}")
    click.echo(f"NMSE            {result.nmse:.3g}{'  (bit-equal)' if result.max_abs == 0 else ''}")
    click.echo(f"max |diff|      {result.max_abs:.3g}")
    click.echo(f"argmax agrees   {100 * result.argmax_agree:.2f} % of rows")
    click.echo(f"greedy agrees   {100 * result.greedy_agree:.0f} % of 64 tokens")
    if as_json:
        click.echo(json.dumps({**result.as_dict(), "tolerance": tolerance, "passed": passed}))
    if not passed:
        say(f"pyspec: the NMSE of {result.nmse:.3g} is above the tolerance of {tolerance:g}; on a GPU, compare with --device CPU to tell a kernel from a bug")
        sys.exit(EXIT_CHECK)
