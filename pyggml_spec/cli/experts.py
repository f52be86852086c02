"""pyspec experts"""

from pathlib import Path

import click

from ..api import load
from ..models.placement import ExpertOptions
from .help import PATH, flag, option
from .options import file_text, load_options
from .run import check_place, write_atomically
from .terminal import progress_line, say, size, table

FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.9)


@click.group("experts")
def command():
    """Profiles of routed experts, which decide what stays on the device."""


@command.command("profile", short_help="Profiles router choices on a text.")
@load_options()
@option("-f --file text_file", "Text like that of the intended use.", type=PATH, required=True)
@option("-o --output", "Default: MODEL.experts.json, where --expert-residency looks for it.", type=PATH)
@flag("--on-device", "Keep all experts on the device while profiling. Default: in host memory, so that any model can be profiled.")
def profile_command(target, draft, options, text_file, output, on_device):
    """Profiles router choices on a text and prints the expected hit rate of each residency.

    The hit rates are those of the last quarter of the text, with the hot experts chosen by the first three.
    """
    from ..tools.experts import expert_bytes, profile

    if draft is not None:
        raise click.UsageError("a profile needs the target only; leave out -md")
    if target is None:
        raise click.UsageError("name the target with -m; the embedded one has no routed experts")
    text = file_text(text_file, "text")
    path = Path(output or f"{target}.experts.json")
    check_place(path, "profile")
    experts = ExpertOptions(0 if on_device else -1, count=True)
    with progress_line() as progress:
        with load(target, options=options, progress=progress, experts=experts) as session:
            tokens = session.tokenizer.encode(text, False)
            result = profile(session, tokens, lambda done, total: progress("profile", done, total))
            sizes = [expert_bytes(session, fraction) for fraction in FRACTIONS]
    write_atomically(path, result.routing.to_json(), "profile")
    say(f"{result.routing.tokens} tokens, {len(result.routing.counts)} layers with experts: {path}")
    cells = [(str(f), f"{100 * result.hit_rate(f):.1f} %", size(nbytes)) for f, nbytes in zip(FRACTIONS, sizes, strict=True)]
    click.echo(table(("residency", "hit rate", "experts on the device"), cells))
