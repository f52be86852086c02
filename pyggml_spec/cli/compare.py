"""pyspec compare"""

import math
import sys

import click

from ..errors import PyspecError
from .help import PATH, Command, flag, option
from .main import EXIT_CHECK
from .options import CACHE_TYPES, KERNELS, text_of, with_options
from .terminal import json_line, printable, progress_line, say

# NMSE. ggml-cuda: 4e-6 on the embedded target, up to 1e-5 on tiny models. Native kernels sum in another order, which can flip the 8-bit
# rounding of activations: 9e-5, and 5e-3 on a small model that amplifies it, where ROUNDING_TIMES what rounding does passes.
GGML_ON_CPU, GGML_ELSEWHERE, OWN, ROUNDING_TIMES = 1e-10, 1e-4, 1e-3, 4
EQUAL, ROUNDING, AMPLIFIED, DIFFERS = "equal", "rounding", "amplified", "differs"
_VERDICTS = {
    EQUAL: "equal bit for bit: this engine computes what llama.cpp computes",
    ROUNDING: "equal to rounding: the NMSE of {nmse} is within the tolerance of {tolerance}. Both sum the same products in another order, so near-ties may resolve differently. On a CPU, --kernels ggml gives llama.cpp's bits",
    AMPLIFIED: "equal to rounding: this model amplifies it. The NMSE is {nmse}, and llama.cpp's own logits change by {rounding} where a norm of the first layer changes by a few millionths. On a CPU, --kernels ggml gives llama.cpp's bits",
    DIFFERS: "differs: the NMSE of {nmse} is above the tolerance of {tolerance}, so rounding does not explain it and texts will differ from llama.cpp's. Compare with --device CPU --kernels ggml: if that is equal, a kernel of this device is wrong; if not, fetch the file again, and report it with the output of `pyspec inspect`",
}


@click.command("compare", cls=Command)
@option("--logits file", "Target GGUF to run in both engines.", type=PATH, metavar="FILE")
@option("--nodes", "Target GGUF to run in both engines: the first node whose values differ.", type=PATH, metavar="FILE")
@option("--weights files", "Two GGUFs of one model; A is the reference.", type=PATH, nargs=2, metavar="A B")
@option("--tokens", "Tokens per comparison: random ids, and the start of a text.", shown=64)
@option("-p --prompt", "Text to compare on. Default: prose, code and a table.")
@option("-f --file text_file", "File with that text.", type=PATH)
@option("--seed", "Seed of the random tokens.", type=click.IntRange(0), shown=0)
@option(
    "--tolerance",
    "Largest NMSE that passes; 0 requires bit-equality. Default: 1e-10 with ggml's kernels on the CPU, 1e-4 on a GPU, 1e-3 with native kernels, or four times what rounding alone does to this model.",
    type=click.FloatRange(0),
)
@option("--device", "Device for both engines. Default: the first GPU, or the CPU.")
@option("-t --threads", "CPU threads for both engines.", type=click.IntRange(1, 512))
@KERNELS
@with_options(CACHE_TYPES)
@flag("--json as_json", "The last line is one JSON object.")
def command(file, nodes, files, tokens, prompt, text_file, seed, tolerance, device, threads, as_json, **types):  # fmt: skip
    """Checks this engine against llama.cpp, or one file against another. Exit code 3 if they differ.

    --logits feeds random ids and a text to pyspec and llama.cpp, compares all logits and ends with a verdict: equal bit for bit, equal to
    rounding, or different. --nodes prints the first node of the graph that differs, with ggml's kernels. --weights compares two files
    tensor by tensor.
    """
    if tolerance is not None and math.isnan(tolerance):
        raise click.UsageError("--tolerance is nan, but it has to be a number from 0 up")
    if sum(given is not None for given in (file, nodes, files)) != 1:
        raise click.UsageError("name one of --logits FILE, --nodes FILE and --weights A B")
    options = {"device": device, "threads": threads, **types}
    if nodes is not None:
        passed = _nodes(nodes, tokens, seed, tolerance or 0.0, device, threads, as_json)
    elif files:
        passed = _weights(files[0], files[1], as_json)
    else:
        passed = _logits(file, tokens, seed, text_of("prompt", prompt, text_file), tolerance, options, as_json)
    if not passed:
        sys.exit(EXIT_CHECK)


def _logits(file: str, tokens: int, seed: int, text: str | None, tolerance: float | None, options: dict, as_json: bool) -> bool:
    from ..ggml.device import pick_device
    from ..ggml.kernels import pick_level
    from ..gguf_io import GGUFFile
    from ..models.registry import CHAINS, DRAFTERS
    from ..tools.compare import TEXT, compare_logits, rounding_of_logits

    native = False
    if tolerance is None:
        kind = pick_device(options["device"]).kind
        native = pick_level(options["kernels"], kind) is not None
        tolerance = OWN if native else GGML_ON_CPU if kind == "cpu" else GGML_ELSEWHERE
    with GGUFFile(file) as opened:
        if opened.get("general.architecture", str) in (*DRAFTERS, *CHAINS):
            raise PyspecError(f"{file} is a drafter, and --logits runs targets in both engines; name the target it was made for")
    texts = {"random ids": None, "text": text or TEXT}
    found = {name: compare_logits(file, tokens, seed, text=of, **options) for name, of in texts.items()}
    for name, result in found.items():
        click.echo(f"{name}: {result.tokens} tokens")
        click.echo(f"  NMSE            {result.nmse:.3g}{'  (bit-equal)' if result.max_abs == 0 else ''}")
        click.echo(f"  max |diff|      {result.max_abs:.3g}")
        click.echo(f"  argmax agrees   {100 * result.argmax_agree:.2f} % of rows")
        click.echo(f"  greedy agrees   {100 * result.greedy_agree:.0f} % of 64 tokens")
    worst = max(found.values(), key=lambda one: one.nmse if one.nmse == one.nmse else math.inf)
    kind = EQUAL if all(one.max_abs == 0 for one in found.values()) else ROUNDING if worst.nmse <= tolerance else DIFFERS
    rounding = 0.0
    if native and kind == DIFFERS:
        above = [name for name, one in found.items() if not one.nmse <= tolerance]
        of_ggml = {key: value for key, value in options.items() if key != "kernels"}
        alone = {name: rounding_of_logits(file, tokens, seed, text=texts[name], **of_ggml) for name in above}
        kind = AMPLIFIED if all(found[name].nmse <= ROUNDING_TIMES * alone[name] for name in above) else DIFFERS
        rounding = max(alone.values())
        tolerance = max(tolerance, ROUNDING_TIMES * rounding)
    verdict = _VERDICTS[kind].format(nmse=f"{worst.nmse:.3g}", tolerance=f"{tolerance:.3g}", rounding=f"{rounding:.3g}")
    if kind != DIFFERS:
        click.echo(f"verdict: {verdict}")
    if as_json:
        both = {**found["random ids"].as_dict(), "text": found["text"].as_dict()}
        said = ROUNDING if kind == AMPLIFIED else kind
        click.echo(json_line({**both, "tolerance": tolerance, "passed": kind != DIFFERS, "verdict": said}))
    if kind == DIFFERS:
        say(f"pyspec: verdict: {verdict}")
    return kind != DIFFERS


def _nodes(file: str, tokens: int, seed: int, tolerance: float, device: str | None, threads: int | None, as_json: bool) -> bool:
    from ..tools.compare import compare_nodes

    found = compare_nodes(file, tokens, seed, device, threads)
    first = next((node for node in found if not node.nmse <= tolerance), None)
    if first is None:
        click.echo(f"all {len(found)} nodes that both graphs name have the same values")
    else:
        before = found[: found.index(first)]
        click.echo(f"{len(before)} nodes agree{f', the last is {before[-1].name}' if before else ''}")
        what = "another shape" if math.isnan(first.nmse) else f"NMSE {first.nmse:.3g}, max |diff| {first.max_abs:.3g}"
        click.echo(f"first difference: {first.name} ({what})")
    if as_json:
        click.echo(json_line({"nodes": [vars(node) for node in found], "first": first and first.name, "passed": first is None}))
    return first is None


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
        first = f"{printable(flagged[0].name)} ({printable(flagged[0].flag)})"
        say(f"pyspec: {len(flagged)} of {len(result.tensors)} tensors stand out, the first is {first}; convert or quantise the model again")
    return not flagged
