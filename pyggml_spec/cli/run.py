"""pyspec run"""

import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import click

from ..api import load
from ..errors import ContextError, PyspecError
from ..files import replacing
from ..load_options import LoadOptions
from ..speculation.calibrate import Waiting
from ..speculation.ngram import LOOKUPS
from .help import PATH, GroupedCommand, flag, option
from .main import EXIT_CHECK, EXIT_ERROR, EXIT_INTERRUPT
from .options import LIMIT, TokenLimit, argument_text, check_prefix, escape_option, file_text, loading, unescaped
from .report import configuration_line, footer
from .sampling import sampling_options, take_sampling
from .terminal import Interrupt, TextOut, json_line, progress_line, say

DEMO_PROMPT = "def quicksort(items):\n"
PLAIN_STEPS = 192  # that the footer's plain speed is the mean of, at most: 0.15 s of the embedded pair, whose pace on a virtual machine changes within less


@click.command("run", cls=GroupedCommand, words="the prompt is given with -p")
@loading
@option("-p --prompt", "Prompt text.")
@option("-f --file prompt_file", "File with the prompt text.", type=PATH)
@option(
    LIMIT,
    "Tokens to generate; -1 for no limit but the context. Default: until the end token; 256 for the embedded pair.",
    type=TokenLimit(0),
)
@option(
    "--image --audio images",
    "Picture or sound before the prompt, or where the prompt has <__media__>; may be given several times.",
    type=PATH,
    multiple=True,
)
@sampling_options
@option("--logprobs logprobs_file", "Write the model's log probability of every token, one JSON object per line.", type=PATH)
@option("--n-probs", "How many most likely tokens --logprobs adds to each. Default: 5", type=click.IntRange(0, 1024))
@option("--mode", "Default: speculative if anything drafts.", type=click.Choice(["speculative", "plain", "reference"]))
@flag("--reference-shape reference", "Same as --mode reference: plain decoding on the W-wide graph.")
@flag("--require-spec", "Exit with 3 unless drafts were verified.")
@option("--stop", "Text that ends the generation; may be given several times.", multiple=True)
@flag("--ignore-eos", "Go on after the end token.")
@escape_option
@flag("-no-cnv --no-conversation raw", "The prompt is meant as raw text: no note about `pyspec chat`.")
@flag("--special -sp", "Recognise control tokens in the prompt text.")
@option("--stats stats_file", "Write the statistics as one JSON object.", type=PATH)
@flag("-q --quiet", "No configuration line and no footer.")
def command(target, draft, options, prompt, prompt_file, images, max_tokens, mode, reference, require_spec, stop, ignore_eos,
            special, escaped, raw, stats_file, logprobs_file, n_probs, quiet, **more):  # fmt: skip
    """Generates text. The text goes to stdout; everything else goes to stderr.

    Without a sampling option decoding is greedy. With one of temperature, top-k, top-p, min-p, typical, samplers or seed, the others are
    what the model file recommends, or llama.cpp's defaults: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05.
    """
    wanted = take_sampling(more, logprobs=None if logprobs_file is None else 5 if n_probs is None else n_probs)
    if reference and mode not in (None, "reference"):
        raise click.UsageError(f"--reference-shape is --mode reference, so --mode {mode} contradicts it; give one of them")
    if mode == "speculative" and options.spec == ["none"]:
        raise click.UsageError("--mode speculative needs drafts, and --spec-type none takes them away; leave one of them out")
    if ignore_eos and wanted.constrained:
        raise click.UsageError("--ignore-eos would go on after the end of what the text has to match; leave one of them out")
    if n_probs is not None and logprobs_file is None:
        raise click.UsageError(f"--n-probs {n_probs} limits what --logprobs writes; give a file with --logprobs")
    if "" in stop:
        raise click.UsageError("--stop is empty, and an empty text ends nothing; give a text, or leave it out")
    _check_outputs(stats_file, logprobs_file)
    check_prefix(options, memory=False)
    if options.prefix_cache is None:
        options = replace(options, prefix_memory=0)  # nothing is kept in memory for a single request
    text = _prompt(prompt, prompt_file, embedded=target is None)
    text = unescaped(text) if escaped else text
    if target is None and max_tokens is None:
        max_tokens = 256
    mode = "reference" if reference else mode
    with progress_line() as progress:
        session = load(target, draft, options, progress)
    with session, Interrupt() as interrupt:
        sampling, notes = wanted.sampling(session.target.file)
        content = with_images(session, text, images, special) if images else text
        if not quiet:
            say(configuration_line(session.configuration(), mode, sampling.describe(), notes))
        if not quiet and not raw and any(key.startswith("tokenizer.chat_template") for key in session.target.file.metadata):
            say("note: the prompt is continued as raw text, although this model has a chat template: `pyspec chat`, or -cnv, talks with it")
        if target is None and not quiet:
            say("prompt: " + json.dumps(text if len(text) < 60 else text[:57] + "..."))
        generation = {"mode": mode, "sampling": sampling, "stop": stop, "ignore_end": ignore_eos, "special": special}
        stats, failed = _stream(session, content, max_tokens, interrupt, stats_file, logprobs_file, generation)
        if not quiet:
            with Waiting(session.runner) as waiting:
                measured = bool(stats.steps) and stats.stop_reason != "interrupt"
                middle = stats.prompt_tokens + stats.emitted // 2  # the mean depth of the text's steps
                plain_ms = session.calibrate_plain(PLAIN_STEPS, middle) if measured else None
            say(footer(stats, plain_ms, waiting.much))
    if failed is not None:
        say(f"pyspec: {failed}")
    if stats.stop_reason == "interrupt":
        sys.exit(EXIT_INTERRUPT)
    if failed is not None:
        sys.exit(EXIT_ERROR)
    if require_spec and not (stats.drafted and stats.mode == "speculative"):  # the reference mode fills its blocks with copies
        say(f"pyspec: --require-spec was given, but no draft was verified: {_why_no_draft(session, stats, options)}")
        sys.exit(EXIT_CHECK)


MEDIA = "<__media__>"  # llama.cpp's mark of a picture in a prompt


def with_images(session, text: str, images: Sequence[str], special: bool):
    """The prompt with pictures and sounds at MEDIA, or before the text."""
    texts = text.split(MEDIA) if MEDIA in text else [*[""] * len(images), text]
    if len(texts) != len(images) + 1:
        raise click.UsageError(
            f"the prompt has {len(texts) - 1} times {MEDIA}, and there are {len(images)} of --image and --audio; give one for each"
        )
    parts = [texts[0], *(part for image, after in zip(images, texts[1:], strict=True) for part in (Path(image), after))]
    return session.picture_prompt(*parts, special=special)


def _check_outputs(stats_file: str | None, logprobs_file: str | None) -> None:
    """Refuses, before a model is loaded, files that could not be written when the text is out."""
    for what, path in (("statistics", stats_file), ("log probabilities", logprobs_file)):
        if path is not None:
            check_place(Path(path), what)
    files = {os.path.realpath(path) for path in (stats_file, logprobs_file) if path is not None}
    if stats_file and logprobs_file and len(files) == 1 and all(os.path.isfile(path) or not os.path.exists(path) for path in files):
        # devices and pipes take both in turn
        raise click.UsageError(f"--stats and --logprobs both name {stats_file}, and one would replace the other; name two files")


def _why_no_draft(session, stats, options: LoadOptions) -> str:
    spec, no_spec = options.spec, options.no_spec
    if not session.methods:
        if spec == ["none"]:
            return "--spec-type none takes all drafts away; leave it out"
        if no_spec:
            return f"nothing is left that drafts without {', '.join(no_spec)}; leave --no-spec out, or give another drafter with -md"
        return "there is no drafter, give one with -md"
    if stats.mode != "speculative":
        return f"the mode was {stats.mode}"
    if not stats.steps:
        return f"the text ended with its first token ({stats.stop_reason})"
    if all(method in LOOKUPS for method in session.methods):
        more = ", or leave --no-spec out" if no_spec else ""
        return f"only {' and '.join(session.methods)} could draft, and nothing in the text repeated where that pays; give a drafter with -md{more}"
    return stats.width_reason or "no step had room for a draft"


def _prompt(prompt: str | None, prompt_file: str | None, embedded: bool) -> str:
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("give the prompt with -p or with -f, not with both")
    if prompt is not None:
        return argument_text(prompt)
    if prompt_file is not None:
        return file_text(prompt_file, "prompt file")
    if sys.stdin is not None and not sys.stdin.isatty() and (piped := sys.stdin.buffer.read()):
        return piped.decode("utf-8", "replace")
    if embedded:
        return DEMO_PROMPT
    raise ContextError("there is no prompt: give one with -p, -f or on standard input")


def _stream(session, text, max_tokens, interrupt, stats_file, logprobs_file, options):
    """Writes the text as it comes. Returns the statistics, and the error if a file could not be written."""
    out, stats, bars, probabilities = TextOut(), session.new_stats(), ExitStack(), []
    try:
        with bars:
            progress = bars.enter_context(progress_line())
            events = session.steps(
                text, max_tokens, interrupted=interrupt, prefill_progress=lambda done, total: progress("prefill", done, total),
                stats=stats, **options,
            )  # fmt: skip
            with closing(events):  # before the session closes, whatever happens
                for event in events:
                    bars.close()
                    probabilities += [json_line(_probability(session.tokenizer, p)) + "\n" for p in event.logprobs]
                    out.write(event.text)
        if out.is_terminal:
            out.write("\n")
    finally:  # also after an error: the statistics up to it
        failed = write_stats(stats_file, stats)
        failed = _written("log probabilities", logprobs_file, "".join(probabilities)) or failed
    return stats, failed


def _probability(tokenizer, p) -> dict:
    def named(token: int, logprob: float) -> dict:
        return {"token": token, "text": tokenizer.piece(token, special=True).decode("utf-8", "replace"), "logprob": logprob}

    return {**named(p.token, p.logprob), "top": [named(*pair) for pair in p.top]}


def write_stats(path: str | None, stats) -> PyspecError | None:
    """Writes the statistics file, if one is named, as ``_written``."""
    return _written("statistics", path, json_line(stats.as_dict(), indent=1) + "\n")


def _written(what: str, path: str | None, text: str) -> PyspecError | None:
    """Returns the error instead of raising it: the generated text counts more."""
    try:
        if path is not None:
            write_atomically(Path(path), text, what)
    except PyspecError as error:
        return error
    return None


_DESCRIPTOR = re.compile(r"/dev/(?P<name>stdout|stderr)|(?:/dev/fd|/proc/self/fd)/(?P<number>\d{1,9})")


def check_place(path: Path, what: str) -> None:
    """Whether a file can be there, as far as that can be known before it is written: an hour of computing should not end with this
    sentence. Raises PyspecError: it cannot."""
    folder = os.path.dirname(path) or "."
    # devices, pipes and what was opened already are written into
    replaced = not _DESCRIPTOR.fullmatch(os.path.abspath(path)) and (os.path.isfile(path) or not os.path.exists(path))
    if os.path.isdir(path):
        why = "that is a folder; name a file"
    elif not os.path.isdir(folder):
        why = f"there is no folder {folder}; make it, or name another file"
    elif _is_model(path):
        why = "that is a GGUF file, which it would take the place of; name another file"
    elif replaced and not os.access(folder, os.W_OK | os.X_OK):
        why = f"the folder {folder} cannot be written; name another file"
    else:
        return
    raise PyspecError(f"the {what} cannot be written to {path}: {why}")


def _is_model(path: Path) -> bool:
    """`--stats model.gguf -m model.gguf` is typed easily, and the file took hours to fetch."""
    try:
        if path.is_file():  # to open a pipe would wait
            with path.open("rb") as file:
                return file.read(4) == b"GGUF"
    except OSError:
        pass
    return False


def write_atomically(path: Path, text: str, what: str = "statistics") -> None:
    """Writes a temporary file and renames it, so that no reader sees half of it. /dev/stderr and its like are written into."""
    if "\0" in str(path):
        raise PyspecError(f"the {what} cannot be written to {str(path)!r}: a file name has no zero bytes")
    try:
        if descriptor := _DESCRIPTOR.fullmatch(os.path.abspath(path)):
            name = descriptor["name"]
            with open(os.dup({"stdout": 1, "stderr": 2}[name] if name else int(descriptor["number"])), "w", encoding="utf-8") as file:
                file.write(text)
            return
        if path.exists() and not (path.is_file() or path.is_dir()):  # a device or a pipe must not be replaced by a file
            path.write_text(text, "utf-8")
            return
        with replacing(path, 0o666) as file:
            file.write(text.encode())
    except OSError as error:
        raise PyspecError(f"the {what} cannot be written to {path}: {error.strerror}") from None
