"""pyspec compare"""

import math
import sys

import click

from ..errors import PyspecError
from .help import Command
from .main import EXIT_CHECK
from .options import cache_type_options, kernels_option
from .tables import json_line
from .terminal import printable, progress_line, say

# NMSE. ggml-cuda gives 4e-6 on the embedded target and 1e-5 at most on tiny models: fused matrices are summed otherwise. Our own kernels sum everything
# otherwise, and a last bit can flip the rounding of an activation to 8 bits: 9e-5 on the embedded target, 6e-5 where attention alone is ours.
GGML_ON_CPU, GGML_ELSEWHERE, OWN = 1e-10, 1e-4, 1e-3


@click.command("compare", cls=Command)
@click.option("--logits", "file", type=click.Path(), metavar="FILE", help="Target GGUF to run in both engines.")
@click.option("--weights", "files", type=click.Path(), nargs=2, metavar="A B", help="Two GGUFs of one model; A is the reference.")
@click.option("--tokens", default=64, show_default=True, help="Random tokens to feed to both engines.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random tokens.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    help="Largest NMSE that passes; 0 asks for bit-equality. Default: 1e-10 with ggml's kernels on the CPU, 1e-4 with those of a GPU, 1e-3 with our own.",
)
@click.option("--device", help="Device for both engines. Default: the first GPU, or the CPU.")
@click.option("-t", "--threads", type=click.IntRange(1, 512), help="CPU threads for both engines.")
@kernels_option
@cache_type_options
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def command(file, files, tokens: int, seed: int, tolerance: float | None, device: str | None, threads: int | None, as_json: bool, **types):
    """Is this engine, or this file, right? Exit code 3 if not.

    --logits feeds the same tokens to pyspec and to llama.cpp and compares all logits. --weights compares two files tensor by tensor.
    """
    if tolerance is not None and math.isnan(tolerance):
        raise click.UsageError("--tolerance is nan, but it has to be a number from 0 up")
    if (file is None) == (files is None):
        raise click.UsageError("name either --logits FILE or --weights A B")
    options = {"device": device, "threads": threads, **types}
    passed = _weights(files[0], files[1], as_json) if files else _logits(file, tokens, seed, tolerance, options, as_json)
    if not passed:
        sys.exit(EXIT_CHECK)


def _logits(file: str, tokens: int, seed: int, tolerance: float | None, options: dict, as_json: bool) -> bool:
    from ..ggml.device import pick_device
    from ..ggml.kernels import pick_level
    from ..gguf_io import GGUFFile
    from ..models.registry import CHAINS, DRAFTERS
    from ..tools.compare import compare_logits

    if tolerance is None:
        kind = pick_device(options["device"]).kind
        tolerance = OWN if pick_level(options["kernels"], kind) is not None else GGML_ON_CPU if kind == "cpu" else GGML_ELSEWHERE
    with GGUFFile(file) as opened:
        if opened.get("general.architecture", str) in (*DRAFTERS, *CHAINS):
            raise PyspecError(f"{file} is a drafter, and --logits runs targets in both engines; name the target it was made for")
    result = compare_logits(file, tokens, seed, **options)
    passed = result.nmse <= tolerance
    click.echo(f"tokens          {result.tokens}")
    click.echo(f"NMSE            {result.nmse:.3g}{'  (bit-equal)' if result.max_abs == 0 else ''}")
    click.echo(f"max |diff|      {result.max_abs:.3g}")
    click.echo(f"argmax agrees   {100 * result.argmax_agree:.2f} % of rows")
    click.echo(f"greedy agrees   {100 * result.greedy_agree:.0f} % of 64 tokens")
    if as_json:
        click.echo(json_line({**result.as_dict(), "tolerance": tolerance, "passed": passed}))
    if not passed:
        say(
            f"pyspec: the NMSE of {result.nmse:.3g} is above the tolerance of {tolerance:g}; "
            "compare with --device CPU --kernels ggml to tell a kernel from a bug"
        )
    return passed


def _weights(a: str, b: str, as_json: bool) -> bool:
    from ..tools.compare_weights import compare_weights

    with progress_line() as progress:
        result = compare_weights(a, b, progress)
    width = min(60, max(len(printable(t.name)) for t in result.tensors))
    for t in result.tensors:
        types = t.types[0] if t.types[0] == t.types[1] else f"{t.types[0]} -> {t.types[1]}"
        value = "-" if t.relative_rms is None else "equal" if t.relative_rms == 0 else f"{t.relative_rms:.3g}"
        click.echo(f"{printable(t.name):<{width}}  {types:<14} {value:>10}  {printable(t.flag)}".rstrip())
    flagged = result.flagged
    if as_json:
        click.echo(json_line({**result.as_dict(), "passed": not flagged}))
    if flagged:
        first = flagged[0]
        say(
            f"pyspec: {len(flagged)} of {len(result.tensors)} tensors stand out, the first is {printable(first.name)} "
            f"({printable(first.flag)}); convert or quantise the model again"
        )
    return not flagged
