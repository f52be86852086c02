"""llama.cpp options that map to ours, hidden from `--help`, so that its command lines can be pasted."""

from typing import Any

import click

from ..engine.options import AtMost
from ..errors import PyspecError
from ..ggml.device import pick_devices
from ..gguf_io import GGUFFile
from ..loading import DEMO_TARGET


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


LLAMA_CPP = [
    click.option("-ngl", "--gpu-layers", "--n-gpu-layers", "gpu_layers", type=_Layers(), hidden=True),
    click.option(
        "-ngld", "--spec-draft-ngl", "--gpu-layers-draft", "--n-gpu-layers-draft", "draft_gpu_layers", type=_Layers(), hidden=True
    ),
    click.option("-fa", "--flash-attn", type=click.Choice(["on", "off", "auto"]), hidden=True),
    click.option("--spec-draft-n-max", "--draft-max", "--draft-n", "--draft", "n_max", type=click.IntRange(1, 1023), hidden=True),
]


def translated(values: dict[str, Any], target: str | None) -> None:
    """-ngl, -ngld, -fa and --spec-draft-n-max become ``device``, ``tensor_split`` and ``draft_width``."""
    names = "gpu_layers", "draft_gpu_layers", "flash_attn", "n_max"
    if names[0] not in values:
        return
    gpu_layers, draft_gpu_layers, flash_attn, n_max = (values.pop(name) for name in names)
    if flash_attn == "off":
        raise click.UsageError("attention is always flash attention; leave out -fa off")
    if n_max is not None:
        if values["draft_width"] not in (None, n_max + 1):
            raise click.UsageError(
                f"--spec-draft-n-max {n_max} and --draft-width {values['draft_width']} contradict each other: the width includes the last token"
            )
        values["draft_width"] = values["draft_width"] or AtMost(n_max + 1)
    if gpu_layers == 0:
        if values["device"] not in (None, "CPU"):
            raise click.UsageError(f"-ngl 0 and --device {values['device']} contradict each other")
        values["device"] = "CPU"
    elif gpu_layers is not None:
        _place_layers(gpu_layers, values, target)
    if draft_gpu_layers == 0 and values["device"] != "CPU":
        raise click.UsageError(
            "-ngld 0 would put the drafter on another device than the target; leave it out, or use --device CPU for both"
        )


def _place_layers(asked: int, values: dict[str, Any], target: str | None) -> None:
    """Layers for the CPU if fewer than all are offloaded: the first ones, as in llama.cpp, which counts the head as a layer."""
    with GGUFFile(target if target is not None else DEMO_TARGET) as file:
        there = file.get(f"{file.get('general.architecture', str)}.block_count", int, 0)
    on_cpu, found = there + 1 - asked, pick_devices(values["device"])
    if on_cpu <= 0 or all(device.kind == "cpu" for device in found):
        return
    if len(found) > 1 or values.get("tensor_split") is not None or on_cpu >= there:
        raise PyspecError(f"-ngl {asked} would leave {on_cpu} of {there} layers in host memory; with several devices give the CPU's share: "
                          "--device CPU,GPU --tensor-split")  # fmt: skip
    values["device"], values["tensor_split"] = f"CPU,{found[0].name}", [on_cpu, there - on_cpu]
