"""llama.cpp options that map to ours, hidden from `--help`, so that its command lines can be pasted."""

from functools import wraps

import click

from ..errors import PyspecError


def llama_cpp_options(command):
    """-ngl, -ngld, -fa, --spec-draft-n-max: they set ``device`` and ``draft_width``."""

    @wraps(command)
    def wrapped(*args, gpu_layers, draft_gpu_layers, flash_attn, n_max, **more):
        if flash_attn == "off":
            raise click.UsageError("attention is always flash attention; leave out -fa off")
        if n_max is not None:
            from ..engine.options import AtMost

            if more["draft_width"] not in (None, n_max + 1):
                raise click.UsageError(
                    f"--spec-draft-n-max {n_max} and --draft-width {more['draft_width']} contradict each other: the width includes the last token"
                )
            more["draft_width"] = more["draft_width"] or AtMost(n_max + 1)
        if gpu_layers == 0:
            if more["device"] not in (None, "CPU"):
                raise click.UsageError(f"-ngl 0 and --device {more['device']} contradict each other")
            more["device"] = "CPU"
        elif gpu_layers is not None:
            _place_layers(gpu_layers, more)
        if draft_gpu_layers == 0 and more["device"] != "CPU":
            raise click.UsageError(
                "-ngld 0 would put the drafter on another device than the target; leave it out, or use --device CPU for both"
            )
        return command(*args, **more)

    for option in (
        click.option("-ngl", "--gpu-layers", "--n-gpu-layers", "gpu_layers", type=_Layers(), hidden=True),
        click.option(
            "-ngld", "--spec-draft-ngl", "--gpu-layers-draft", "--n-gpu-layers-draft", "draft_gpu_layers", type=_Layers(), hidden=True
        ),
        click.option("-fa", "--flash-attn", type=click.Choice(["on", "off", "auto"]), hidden=True),
        click.option("--spec-draft-n-max", "--draft-max", "--draft-n", "--draft", "n_max", type=click.IntRange(1, 1023), hidden=True),
    ):
        wrapped = option(wrapped)
    return wrapped


class _Layers(click.ParamType):
    """A number of layers, or one of llama.cpp's words for all of them (None)."""

    name = "N"

    def convert(self, value, param, ctx):
        if value in ("all", "auto", "-1"):
            return None
        try:
            layers = int(value)
        except ValueError:
            layers = -1
        return layers if layers >= 0 else self.fail(f"{value!r} is not a number of layers", param, ctx)


def _place_layers(asked: int, more: dict) -> None:
    """Layers for the CPU if fewer than all are offloaded: the first ones, as in llama.cpp, which counts the head as a layer."""
    from ..api import DEMO_TARGET
    from ..ggml.devices import pick_devices
    from ..gguf_io import GGUFFile

    with GGUFFile(more["target"] if more["target"] is not None else DEMO_TARGET) as file:
        there = file.get(f"{file.get('general.architecture', str)}.block_count", int, 0)
    on_cpu, found = there + 1 - asked, pick_devices(more["device"])
    if on_cpu <= 0 or all(device.kind == "cpu" for device in found):
        return
    if len(found) > 1 or more.get("tensor_split") is not None or on_cpu >= there:
        raise PyspecError(f"-ngl {asked} would leave {on_cpu} of {there} layers in host memory; with several devices give the CPU's share: --device CPU,GPU --tensor-split")  # fmt: skip
    more["device"], more["tensor_split"] = f"CPU,{found[0].name}", [on_cpu, there - on_cpu]
