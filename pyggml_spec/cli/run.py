"""pyspec run"""

import json
import os
import sys
import tempfile
from pathlib import Path

import click

from ..errors import ContextError, PyspecError
from ..session import load
from .main import EXIT_CHECK, EXIT_INTERRUPT
from .options import target_options
from .report import engaged_line, footer
from .terminal import Interrupt, TextOut, progress_line, say

DEMO_PROMPT = "def quicksort(items):\n"


@click.command("run")
@target_options
@click.option("-p", "--prompt", help="Prompt text.")
@click.option("-f", "--file", "prompt_file", type=click.Path(), help="File with the prompt text.")
@click.option("-n", "--predict", "max_tokens", type=click.IntRange(0), help="Tokens to generate. Default: until the end token; 256 for the embedded pair.")
@click.option("--draft-width", type=click.IntRange(2, 1024), help="Rows per verified block. Default: chosen while running.")
@click.option("--mode", type=click.Choice(["speculative", "plain", "reference"]), help="Default: speculative if there is a drafter.")
@click.option("--reference-shape", "reference", is_flag=True, help="Same as --mode reference: plain decoding on the W-wide graph.")
@click.option("--require-spec", is_flag=True, help="Exit with 3 unless drafts were verified.")
@click.option("--stop", multiple=True, help="Text that ends the generation; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end token.")
@click.option("--special", is_flag=True, help="Recognise control tokens in the prompt text.")
@click.option("--stats", "stats_file", type=click.Path(), help="Write the statistics as one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No engaged line and no footer.")
def command(target, draft, device, threads, n_ctx, prompt, prompt_file, max_tokens, draft_width, mode, reference, require_spec, stop, ignore_eos,
            special, stats_file, quiet):  # fmt: skip
    """Generates text greedily. The text goes to stdout; everything else goes to stderr."""
    text = _prompt(prompt, prompt_file, embedded=target is None)
    if target is None and max_tokens is None:
        max_tokens = 256
    mode = "reference" if reference else mode
    with progress_line() as progress:
        session = load(target, draft, device=device, threads=threads, n_ctx=n_ctx, draft_width=draft_width, progress=progress)
    with session, Interrupt() as interrupt:
        if not quiet:
            say(engaged_line(session.engaged(), mode))
        if target is None and not quiet:
            say("prompt: " + json.dumps(text if len(text) < 60 else text[:57] + "..."))
        stats = _stream(session, text, max_tokens, mode, stop, ignore_eos, special, interrupt, stats_file)
        if not quiet:
            plain_ms = session.calibrate_plain() if stats.steps and stats.stop_reason != "interrupt" else None
            say(footer(stats, plain_ms, session.control.reason() if session.control is not None else ""))
    if stats.stop_reason == "interrupt":
        sys.exit(EXIT_INTERRUPT)
    if require_spec and not stats.drafted:
        say("pyspec: --require-spec was given, but no draft was verified: " + ("there is no drafter, give one with -md" if draft is None and target else f"the mode was {stats.mode}"))
        sys.exit(EXIT_CHECK)


def _prompt(prompt: str | None, prompt_file: str | None, embedded: bool) -> str:
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give the prompt with -p or with -f, not with both")
    if prompt is not None:
        return prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if prompt_file is not None:
        try:
            return Path(prompt_file).read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise PyspecError(f"the prompt file {prompt_file} cannot be read: {error.strerror}") from None
    if not sys.stdin.isatty() and (piped := sys.stdin.buffer.read()):
        return piped.decode("utf-8", "replace")
    if embedded:
        return DEMO_PROMPT
    raise ContextError("there is no prompt: give one with -p, -f or on standard input")


def _stream(session, text, max_tokens, mode, stop, ignore_end, special, interrupt, stats_file):
    out, stats = TextOut(), session.new_stats()
    try:
        with progress_line() as progress:
            events = session.steps(
                text, max_tokens, mode=mode, stop=stop, ignore_end=ignore_end, special=special, interrupted=interrupt,
                prefill_progress=lambda done, total: progress("prefill", done, total),
            )  # fmt: skip
            first = next(events)
        stats = first.stats
        out.write(first.text)
        for event in events:
            out.write(event.text)
        if sys.stdout.isatty():
            out.write("\n")
    finally:
        if stats_file is not None:
            write_atomically(Path(stats_file), json.dumps(stats.as_dict(), indent=1) + "\n")
    return stats


def write_atomically(path: Path, text: str) -> None:
    """Writes beside the file and renames: a reader never sees half of it."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise PyspecError(f"the statistics cannot be written to {path}: {error.strerror}") from None
