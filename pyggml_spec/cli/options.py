"""Options that several commands share, named as people already type them."""

import click


def target_options(command):
    """-m, -md, --device, -t, -c: which pair, where, and how much context."""
    for option in reversed(
        [
            click.option("-m", "--model", "target", type=click.Path(), help="Target GGUF. Without it, the embedded pair runs."),
            click.option("-md", "--model-draft", "draft", type=click.Path(), help="Drafter GGUF (dflash) made for the target."),
            click.option("--device", help="Device name, as `pyspec devices` lists it. Default: the first GPU, or the CPU."),
            click.option("-t", "--threads", type=click.IntRange(1, 512), help="CPU threads. Default: the cores of this process, at most 16."),
            click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(1, 1 << 24), help="Context in tokens. Default: 4096 or the model's own."),
        ]
    ):
        command = option(command)
    return command


graphs_option = click.option("--no-graphs", "graphs", is_flag=True, flag_value=False, default=True, help="No CUDA graph replay: shows what it is worth.")
