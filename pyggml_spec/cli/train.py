"""pyspec train"""

try:  # before ggml: torch with CUDA, imported after it, crashes the process
    import torch
except ImportError:
    torch = None
from typing import Any

import click

from ..errors import TrainingError
from .help import PATH, GroupedCommand, option
from .options import load_options
from .terminal import Interrupt, progress_line, say, size

METHODS = "dflash", "eagle3", "mtp"
MISSING = "training needs torch, which is not installed: pip install torch"


@click.command("train", cls=GroupedCommand, words="files of prompts and texts are given with --data")
@option("-o --output out", "Drafter GGUF to write; a card (.md) is written with it.", type=PATH, required=True)
@option(
    "--data",
    "File or folder of prompts (JSON lines), chats, records of `serve --record`, or plain text. Prompts are answered, and plain text is continued, by the target itself. May be given several times.",
    type=PATH,
    multiple=True,
    required=True,
)
@option("--from start", "Drafter to go on from, with a tenth of the learning rate. Default: a new one.", type=PATH)
@option("--replay", "With --from: other texts, mixed in as a fifth of all, against forgetting.", type=PATH, multiple=True)
@option(
    "--method",
    "Of a new drafter: dflash, eagle3, or mtp where the architecture has MTP layers.",
    type=click.Choice(METHODS),
    shown="dflash",
    metavar="METHOD",
)
@option(
    "--minutes",
    "Minutes of training at most: it ends when acceptance no longer rises. Answers come before.",
    type=click.FloatRange(0, min_open=True),
    shown=20.0,
)
@option("--layers", "Of a new drafter. Default: 4 (targets below 16 layers: 2); 1 of eagle3.", type=click.IntRange(1, 64))
@option("--block", "Rows of a DFlash block, the last token included.", type=click.IntRange(2, 64), shown=8)
@option("--draft-ff", "Width of a new drafter's feed-forward part. Default: the target's.", type=click.IntRange(32))
@option("--type kind", "Type of the drafter's matrices in the file.", shown="q8_0", metavar="TYPE")
@option("--answer-tokens", "At most so many tokens per answer.", type=click.IntRange(8), shown=256)
@option(
    "--answers",
    "At most so many tokens of answers. Default: 8 million by torch, if memory holds their hidden states; 3 million by the engine.",
    type=click.IntRange(1000),
)
@option("--slots", "Answers at once.", type=click.IntRange(1, 256), shown=64)
@option("--text-tokens context", "At most so many tokens per text.", type=click.IntRange(32), shown=768)
@option("--rate", "Peak learning rate. Default: 0.002, with --from 0.0002.", type=click.FloatRange(0, min_open=True))
@option("--batch-tokens", "Tokens per step of training. Default: 16384 on a GPU, 1024 on a CPU.", type=click.IntRange(64))
@option(
    "--features",
    "Hidden states from torch, from the engine, or from torch where both agree.",
    type=click.Choice(["auto", "torch", "engine"]),
    shown="auto",
)
@option("--torch-device", "Where torch computes: cuda or cpu. Default: a GPU if torch sees one.", metavar="NAME")
@option("--seed", "Of weights, order and sampled answers.", type=click.IntRange(0), shown=0)
@click.option("--resume", is_flag=True, help="Go on with an interrupted training; its answers and state are in OUTPUT.train.")
@click.option("--force", "replace", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@load_options()
def command(target: str | None, draft: Any, options: Any, out: str, as_json: bool, **values: Any):
    """Trains a drafter for a GGUF on the file's own answers, on one GPU or, slowly, on a CPU.

    Ctrl-C writes the best drafter so far; --resume goes on.
    """
    if torch is None:
        raise TrainingError(MISSING)
    if target is None:
        from ..loading import DEMO_TARGET

        target = str(DEMO_TARGET)
    if draft:
        raise click.UsageError("-md names a drafter to run; the one to go on from is given with --from")
    if values["replay"] and values["start"] is None:
        raise click.UsageError("--replay is for --from: give all texts of a new drafter with --data")
    from ..train.blank import Shape
    from ..train.train import TrainOptions, train
    from ..train.train import as_json as line

    shape = Shape(values.pop("method"), values.pop("layers") or 0, values.pop("block"), values.pop("draft_ff") or 0)
    values |= {name: values[name] or 0 for name in ("rate", "batch_tokens", "answers")}
    with Interrupt() as interrupt, progress_line() as progress:

        def report(state: Any) -> None:
            best = f", {state.best:.2f} tokens/step" if state.best else ""
            said = f"training: {state.tokens_per_second:,.0f} tokens/s, loss {state.loss:.3f}{best}"
            progress("training", round(1000 * state.done), 1000, said)

        done = train(
            target, out, TrainOptions(shape=shape, **values), options, progress=progress, report=report, say=say, interrupted=interrupt
        )
    if as_json:
        click.echo(line(done))
    else:
        by = ", ".join(f"{name} {value:.2f}" for name, value in sorted(done.score.categories.items()))
        click.echo(
            f"{done.path}: {size(done.nbytes)}; {done.score.tokens_per_step:.2f} tokens per step on held-out prompts ({by}), before {done.before.tokens_per_step:.2f}"
        )
    for note in done.notes:
        say(f"note: {note}")
    if interrupt.asked:
        say("stopped: this is the best drafter so far; --resume goes on")
