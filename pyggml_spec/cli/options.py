"""The options of loading: one declaration per field of LoadOptions, and what several commands share. Names that llama.cpp has keep their names."""

import math
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ..cache.kv_types import MOST_CONTEXT, TYPES
from ..errors import PyspecError
from ..gguf_io import GGUFFile
from ..load_options import LoadOptions
from ..loading import DEMO_TARGET
from ..models.placement import ExpertOptions, overridden
from ..models.rope import RopeOptions
from ..speculation.methods import methods
from .hub import HUB, fetched
from .llama_cpp import LLAMA_CPP, translated


class Finite(click.FloatRange):
    """No NaN, which every comparison of a range lets through, and no infinity."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number", param, ctx)


class OffloadRows(click.IntRange):
    """``offload_prompts``: rows, "auto", or None for off."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value, param, ctx):
        words = {"off": None, "auto": "auto"}
        if value in words:
            return words[value]
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither auto nor off, nor a number of rows from 1 up", param, ctx)
        return super().convert(value, param, ctx)


class Proportions(click.ParamType):
    """Numbers separated by commas, or by slashes as llama-bench has them."""

    name = "N,N"

    def convert(self, value, param, ctx):
        try:
            return [float(part) for part in value.replace("/", ",").split(",")] if isinstance(value, str) else value
        except ValueError:
            return self.fail(f"{value!r} is not a list of proportions, like 3,1", param, ctx)


def _cache_type(field: str, *names: str, text: str) -> Callable:
    return click.option(*names, field, type=click.Choice(TYPES), metavar="TYPE", default="f16", show_default=True, help=text)


def _draft_cache_type(rows: str) -> Callable:
    names = f"-ct{rows}d", f"--draft-cache-type-{rows}", f"--cache-type-{rows}-draft", f"--spec-draft-type-{rows}"
    return _cache_type(f"draft_cache_type_{rows}", *names, text=f"The same for the drafter's {rows.upper()} rows.")


_ROPE = {
    "--rope-freq-base": "freq_base", "--rope-freq-scale": "freq_scale", "--yarn-orig-ctx": "orig_ctx", "--yarn-ext-factor": "ext_factor",
    "--yarn-attn-factor": "attn_factor", "--yarn-beta-slow": "beta_slow", "--yarn-beta-fast": "beta_fast",
}  # fmt: skip
DEVICE = "Device name, as `pyspec devices` lists it; several, separated by commas, share the layers. Default: the first GPU, or the CPU."
CONTEXT = "that too, or as much as memory has room for; the first line of the output shows which"
PREFIX_MEMORY = "1024, or an eighth of what is free if that is less"

KERNELS = click.option(
    "--kernels",
    type=click.Choice(["native", "ggml", "own"]),
    help="Kernels for matrix products on a CPU. Default: native on x86 with AVX2; ggml elsewhere, which equals llama.cpp bit for bit. "
    "own: deprecated name of native.",
)
CACHE_TYPE_K = _cache_type("cache_type_k", "-ctk", "--cache-type-k", text=f"What K rows are stored as: {', '.join(TYPES)}.")
CACHE_TYPE_V = _cache_type("cache_type_v", "-ctv", "--cache-type-v", text="The same for V rows.")


def _files(device: str = DEVICE, context: str = CONTEXT) -> list[Callable]:
    return [
        click.option("-m", "--model", "target", type=click.Path(), help="Target GGUF. Without it, the embedded pair runs."),
        click.option("-md", "--model-draft", "--spec-draft-model", "draft", type=click.Path(), multiple=True,
                     help="Drafter GGUF (dflash, eagle3, gemma4-assistant, or an MTP layer) made for the target. Twice for one that drafts blocks and one that drafts chains."),
        click.option("--device", "-dev", help=device),
        click.option("-t", "--threads", type=click.IntRange(1, 512),
                     help="CPU threads, fixed. Default: as many as other work leaves cores for, at most 16."),
        KERNELS,
        click.option("-c", "--ctx-size", "n_ctx", type=click.IntRange(0, MOST_CONTEXT),
                     help=f"Context in tokens; 0 for what the model was trained with. Default: {context}."),
        *HUB,
    ]  # fmt: skip


SPLIT = [
    click.option("-sm", "--split-mode", type=click.Choice(["none", "layer", "row", "tensor"]), hidden=True),
    click.option("-ts", "--tensor-split", type=Proportions(),
                 help="How many layers each device of --device gets, in proportion. Default: by free memory; a CPU gets what GPUs have no room for."),
]  # fmt: skip
_ROPE_OPTIONS = [
    click.option("--rope-scaling", type=click.Choice(["none", "linear", "yarn"]),
                 help="How positions are stretched. Default: as in the model file. --rope-freq-base, --rope-freq-scale, --yarn-orig-ctx, "
                      "--yarn-ext-factor, --yarn-attn-factor, --yarn-beta-slow and --yarn-beta-fast are taken too."),
    click.option("--rope-scale", type=click.FloatRange(0, min_open=True), metavar="N", help="Stretch the context to N times its length."),
    *(click.option(option, f"rope_{name}", type=click.IntRange(0, 1 << 30) if name == "orig_ctx" else click.FloatRange(0), hidden=True)
      for option, name in _ROPE.items()),
]  # fmt: skip
_GRAPHS = [
    click.option(
        "--no-graphs", "graphs", is_flag=True, flag_value=False, default=True, help="No CUDA graph replay: shows what it is worth."
    )
]
_EXPERTS = [
    click.option("-ot", "--override-tensor", multiple=True, hidden=True),
    click.option("-cmoe", "--cpu-moe", is_flag=True, help="Keep all routed experts in host memory."),
    click.option("-ncmoe", "--n-cpu-moe", type=click.IntRange(0), metavar="N",
                 help="Keep the routed experts of the first N layers in host memory."),
    click.option("--expert-residency", type=Finite(0, 1), metavar="F",
                 help="Keep the hottest fraction F of each layer's experts on the device."),
    click.option("--expert-profile", type=click.Path(), help="Routing profile (pyspec experts profile). Default: MODEL.experts.json."),
    click.option("--offload-prompts", type=OffloadRows(), metavar="ROWS",
                 help="Chunks of prompts of so many rows or more compute on the device, with copies of the experts or layers that are in host memory; "
                      "auto: from where that is faster, which is measured. Default: off."),
]  # fmt: skip
_DRAFTING = [
    click.option("--spec-type", metavar="LIST",
                 help="Drafting methods, separated by commas: draft-dflash, draft-mtp, draft-eagle3, draft-dspark, and one of suffix, ngram-simple, ngram-map-k, ngram-mod; none for plain decoding. "
                      "Default: what -md names, or else the model's own MTP layer. Of several, the one with most tokens per millisecond drafts each step."),
    click.option("--no-spec", multiple=True, metavar="TYPE", help="Exclude this drafting method. May be given several times."),
    click.option("--draft-vocab", type=click.IntRange(64), metavar="N",
                 help="Draft none but the first N tokens of the vocabulary: the drafter's head takes less time. The text stays the same."),
    click.option("--draft-width", type=click.IntRange(2, 1024), help="Rows per verified block. Default: chosen while running."),
]  # fmt: skip
_CACHES = [CACHE_TYPE_K, CACHE_TYPE_V, _draft_cache_type("k"), _draft_cache_type("v")]
_PREFIX_FILES = [
    click.option(
        "--prefix-cache",
        type=click.Path(),
        help="Folder that keeps computed prompts: shared prompt prefixes are reused by later processes.",
    ),
    click.option("--prefix-disk", type=click.IntRange(0), metavar="MIB", help="What the folder may take. Default: 8192."),
]


def _prefixes(memory: str) -> list[Callable]:
    return [
        click.option("--prefix-memory", "-cram", "--cache-ram", type=click.IntRange(0), metavar="MIB",
                     help=f"What the prefix cache may take on the device. Default: {memory}."),
        click.option("-ub", "--ubatch-size", "chunk", type=click.IntRange(1, 4096), default=512, show_default=True,
                     help="Prompt tokens per pass; prompts are reused in whole passes."),
    ]  # fmt: skip


def opening(command: Callable) -> Callable:
    """Files, device, threads, kernels and context: for commands that do not generate."""
    return _with(_files())(command)


def opening_split(command: Callable) -> Callable:
    """The same with a split over several devices."""
    return _with([*_files(), *SPLIT])(command)


def loading(command: Callable) -> Callable:
    """All of LoadOptions, for commands that answer prompts."""
    return _with(
        [
            *_files(),
            *LLAMA_CPP,
            *SPLIT,
            *_ROPE_OPTIONS,
            *_GRAPHS,
            *_EXPERTS,
            *_DRAFTING,
            *_CACHES,
            *_PREFIX_FILES,
            *_prefixes(PREFIX_MEMORY),
        ]
    )(command)


def measuring(context: str) -> Callable[[Callable], Callable]:
    """Without the prefix cache; ``context``: the default of -c."""
    return _with([*_files(context=context), *LLAMA_CPP, *SPLIT, *_ROPE_OPTIONS, *_GRAPHS, *_EXPERTS, *_DRAFTING, *_CACHES])


def planning(device: str, memory: str) -> Callable[[Callable], Callable]:
    """What decides about memory; help of --device, and the default of --prefix-memory."""
    return _with([*_files(device), *LLAMA_CPP, *SPLIT, *_EXPERTS, *_DRAFTING, *_CACHES, *_prefixes(memory)])


def _with(declared: list[Callable]) -> Callable[[Callable], Callable]:
    """Gives a command these options; it gets ``target``, ``draft`` and ``options``, a LoadOptions, in their place."""

    def decorate(command: Callable) -> Callable:
        @wraps(command)
        def wrapped(*args: Any, **values: Any) -> Any:
            files = fetched(values)
            options = _load_options(values, files[0])
            return command(*args, target=files[0], draft=files[1], options=options, **values)

        for option in reversed(declared):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _load_options(values: dict[str, Any], target: str | None) -> LoadOptions:
    """Takes the options of loading out of ``values``."""
    translated(values, target)
    _check_split(values)
    taken: dict[str, Any] = {}
    if "spec_type" in values:
        taken["spec"] = _spec(values.pop("spec_type"), values["no_spec"])
    if "cpu_moe" in values:
        taken["experts"] = _experts(values, target)
    if "rope_scaling" in values:
        taken["rope"] = _rope(values)
    if values.get("prefix_cache") == "":
        raise click.UsageError("the name that --prefix-cache gives is empty; name a folder")
    for name in LoadOptions.__dataclass_fields__:
        if name in values:
            taken[name] = values.pop(name)
    for name in ("prefix_disk", "prefix_memory"):
        if taken.get(name) is not None:
            taken[name] <<= 20
    return LoadOptions(**taken)


def _spec(given: str | None, excluded: tuple[str, ...]) -> list[str] | None:
    names = None if given is None else [name.strip() for name in given.split(",") if name.strip()]
    if names == []:
        raise click.UsageError(f"--spec-type {given!r} names no drafting method; name one, or none for plain decoding")
    try:
        methods(names, excluded)
    except PyspecError as error:
        raise click.UsageError(str(error)) from None
    return names


def _check_split(values: dict[str, Any]) -> None:
    mode = values.pop("split_mode", None)
    if mode in ("row", "tensor"):
        raise click.UsageError(
            f"-sm {mode} would split each product over the devices; here whole layers are on one device each: leave it out"
        )
    if mode == "none" and "," in (values["device"] or ""):
        raise click.UsageError(f"-sm none and --device {values['device']} contradict each other")


def _experts(values: dict[str, Any], target: str | None) -> ExpertOptions | None:
    names = "cpu_moe", "n_cpu_moe", "expert_residency", "expert_profile", "override_tensor"
    all_of_them, first, residency, profile, overrides = (values.pop(name) for name in names)
    layers = _overridden(overrides, target) if overrides else ()
    if profile is not None and residency is None:
        raise click.UsageError("--expert-profile selects the hot experts, so it needs --expert-residency")
    if all_of_them and (first is not None or residency is not None):
        raise click.UsageError("--cpu-moe keeps all experts in host memory; leave out --n-cpu-moe and --expert-residency")
    if not (all_of_them or first is not None or residency is not None or layers):
        return None
    return ExpertOptions(-1 if all_of_them else first or 0, residency, Path(profile) if profile is not None else None, layers=layers)


def _overridden(given: tuple[str, ...], target: str | None) -> tuple[int, ...]:
    """The layers whose experts -ot puts into host memory."""
    pairs = [part.rpartition("=") for text in given for part in text.split(",")]
    if not all(pattern and buffer for pattern, _, buffer in pairs):
        raise click.UsageError(f"-ot {','.join(given)} is not a list of PATTERN=CPU")
    with GGUFFile(target if target is not None else DEMO_TARGET) as file:
        return overridden(file, [(pattern, buffer) for pattern, _, buffer in pairs])


def _rope(values: dict[str, Any]) -> RopeOptions | None:
    scaling, scale = values.pop("rope_scaling"), values.pop("rope_scale")
    given = {name: value for name in _ROPE.values() if (value := values.pop(f"rope_{name}")) is not None}
    if scale is not None:
        if "freq_scale" in given:
            raise click.UsageError("--rope-scale and --rope-freq-scale say the same thing; give one of them")
        if not 1e-9 <= scale <= 1e9:  # NaN is not
            raise click.UsageError(f"--rope-scale is {scale:g}, but it has to be a number from 1e-09 to 1e+09")
        given["freq_scale"] = 1.0 / scale
    if scaling == "none" and given.get("freq_scale", 1.0) not in (0, 1):
        which = "--rope-scale" if scale is not None else "--rope-freq-scale"
        raise click.UsageError(f"--rope-scaling none stretches nothing, so {which} would do nothing; leave one of them out")
    if scaling is None and not given:
        return None
    try:
        return RopeOptions(scaling, **given)
    except PyspecError as error:
        named = {name: option for option, name in _ROPE.items()} | ({"freq_scale": "--rope-scale"} if scale is not None else {})
        raise click.UsageError(re.sub(r"`(\w+)`", lambda match: named[match[1]], str(error))) from None


def check_prefix(options: LoadOptions, memory: bool = True) -> None:
    """Refuses limits of a prefix cache that there is not; ``memory``: whether prefixes are kept in memory without a folder."""
    for name in ("prefix_disk",) if memory else ("prefix_disk", "prefix_memory"):
        if options.prefix_cache is None and getattr(options, name):
            raise click.UsageError(
                f"--{name.replace('_', '-')} is a limit of the prefix cache, and without --prefix-cache there is none here"
            )


UNLIMITED = 1 << 30  # tokens; more than any context holds


class TokenLimit(click.IntRange):
    """How many tokens to generate; llama.cpp's -1 and -2 set no limit but the context."""

    def convert(self, value, param, ctx):
        return UNLIMITED if value in ("-1", "-2") else super().convert(value, param, ctx)

    def _describe_range(self) -> str:
        return f"-1 or {super()._describe_range()}"


def argument_text(given: str) -> str:
    """A text from the command line, bytes that are no UTF-8 replaced."""
    return given.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def text_of(name: str, given: str | None, path: str | None) -> str | None:
    """The text of an option that can also be named as a file."""
    option = "--" + name.replace("_", "-")
    if given is not None and path is not None:
        raise click.UsageError(f"give {option} or {option}-file, not both")
    if path is None:
        return given if given is None else argument_text(given)
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError as error:
        raise PyspecError(f"the file {path} cannot be read: {error.strerror}") from None


escape_option = click.option(
    "-e/ ", "--escape/--no-escape", "escaped", default=False, help="Read \\n, \\t and the like in prompts as what they stand for."
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescaped(text: str) -> str:
    """``text`` with llama.cpp's escapes as what they stand for; others stay as they are."""

    def one(match: re.Match) -> str:
        return _ESCAPES[match[1]] if match[1] in _ESCAPES else chr(int(match[2], 16))

    return re.sub(r"\\([nrt'\"\\]|x([0-9A-Fa-f]{2}))", one, text)
