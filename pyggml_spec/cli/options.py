"""Options that several commands share, named as people already type them."""

import math
import re
from functools import wraps
from pathlib import Path

import click

from ..cache.kv_types import MOST_CONTEXT, TYPES
from ..errors import PyspecError
from .hub import hub_options
from .llama_cpp import llama_cpp_options

kernels_option = click.option(
    "--kernels",
    type=click.Choice(["native", "ggml", "own"]),
    help="Kernels for matrix products on a CPU. Default: native on x86 with AVX2; ggml elsewhere, which equals llama.cpp bit for bit. "
    "own: deprecated name of native.",
)


def target_options(
    command,
    device: str = "Device name, as `pyspec devices` lists it; several, separated by commas, share the layers. Default: the first GPU, or the CPU.",
    context: str = "that too, or as much as memory has room for; the first line says which",
):
    """-m, -md, -hf, -hfd, --device, -t, --kernels, -c: which pair, where, and how much context.

    ``device``: help of --device; ``context``: the default of -c.
    """
    command = hub_options(command)
    for option in reversed(
        [
            click.option("-m", "--model", "target", type=click.Path(), help="Target GGUF. Without it, the embedded pair runs."),
            click.option(
                "-md",
                "--model-draft",
                "--spec-draft-model",
                "draft",
                type=click.Path(),
                multiple=True,
                help="Drafter GGUF (dflash, eagle3, gemma4-assistant, or an MTP layer) made for the target. Twice for one that drafts blocks and one that drafts chains.",
            ),
            click.option("--device", "-dev", help=device),
            click.option(
                "-t",
                "--threads",
                type=click.IntRange(1, 512),
                help="CPU threads, always so many. Default: as many as other work leaves cores for, at most 16.",
            ),
            kernels_option,
            click.option(
                "-c",
                "--ctx-size",
                "n_ctx",
                type=click.IntRange(0, MOST_CONTEXT),
                help=f"Context in tokens; 0 for what the model was trained with. Default: {context}.",
            ),
        ]
    ):
        command = option(command)
    return command


def spec_options(command):
    """--spec-type, --no-spec, --draft-vocab: the keyword arguments ``spec``, ``no_spec`` and ``draft_vocab`` as ``load`` takes them."""

    @wraps(command)
    def wrapped(*args, spec_type, no_spec, **more):
        names = None if spec_type is None else [name.strip() for name in spec_type.split(",") if name.strip()]
        if names == []:
            raise click.UsageError(f"--spec-type {spec_type!r} names no way of drafting; name one, or none for plain decoding")
        if names is not None or no_spec:
            from ..speculation.methods import methods  # `pyspec --help` needs no ggml

            try:
                methods(names, no_spec)
            except PyspecError as error:
                raise click.UsageError(str(error)) from None
        return command(*args, spec=names, no_spec=no_spec, **more)

    for option in (
        click.option(
            "--draft-vocab",
            type=click.IntRange(64),
            metavar="N",
            help="Draft none but the first N tokens of the vocabulary: the drafter's head takes less time. The text stays the same.",
        ),
        click.option("--no-spec", multiple=True, metavar="TYPE", help="Do not draft in this way. May be given several times."),
        click.option(
            "--spec-type",
            metavar="LIST",
            help="Ways of drafting, separated by commas: draft-dflash, draft-mtp, draft-eagle3, draft-dspark, and one of suffix, ngram-simple, ngram-map-k, ngram-mod; none for plain decoding. "
            "Default: what -md names, or else the model's own MTP layer. Of several, the one with most tokens per millisecond drafts each step.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


class Finite(click.FloatRange):
    """No NaN, which every comparison of a range lets through, and no infinity."""

    def convert(self, value, param, ctx):
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number", param, ctx)


UNLIMITED = 1 << 30  # tokens; more than any context holds


class TokenLimit(click.IntRange):
    """How many tokens to generate; llama.cpp's -1 and -2 set no limit but the context."""

    def convert(self, value, param, ctx):
        return UNLIMITED if value in ("-1", "-2") else super().convert(value, param, ctx)

    def _describe_range(self) -> str:
        return f"-1 or {super()._describe_range()}"


graphs_option = click.option(
    "--no-graphs", "graphs", is_flag=True, flag_value=False, default=True, help="No CUDA graph replay: shows what it is worth."
)


def _overridden(given: tuple[str, ...], target: str | None) -> tuple[int, ...]:
    """The layers whose experts -ot puts into host memory."""
    pairs = [part.rpartition("=") for text in given for part in text.split(",")]
    if not all(pattern and buffer for pattern, _, buffer in pairs):
        raise click.UsageError(f"-ot {','.join(given)} is not a list of PATTERN=CPU")
    from ..api import DEMO_TARGET
    from ..gguf_io import GGUFFile  # `pyspec --help` needs no ggml
    from ..models.placement import overridden

    with GGUFFile(target if target is not None else DEMO_TARGET) as file:
        return overridden(file, [(pattern, buffer) for pattern, _, buffer in pairs])


class OffloadRows(click.IntRange):
    """``offload_prompts`` as ``load`` takes it."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value, param, ctx):
        words = {"off": None, "auto": "auto"}
        if value in words:
            return words[value]
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither auto nor off, nor a number of rows from 1 up", param, ctx)
        return super().convert(value, param, ctx)


def expert_options(command):
    """--cpu-moe, --n-cpu-moe, --expert-residency, --expert-profile: the keyword argument ``experts`` as ``load`` takes it; --offload-prompts:
    ``offload_prompts``."""

    @wraps(command)
    def wrapped(*args, cpu_moe, n_cpu_moe, expert_residency, expert_profile, override_tensor, **more):
        layers = _overridden(override_tensor, more.get("target")) if override_tensor else ()
        asked = cpu_moe or n_cpu_moe is not None or expert_residency is not None or layers
        if expert_profile is not None and expert_residency is None:
            raise click.UsageError("--expert-profile says which experts are hot, so it needs --expert-residency")
        if cpu_moe and (n_cpu_moe is not None or expert_residency is not None):
            raise click.UsageError("--cpu-moe keeps all experts in host memory; leave out --n-cpu-moe and --expert-residency")
        if not asked:
            return command(*args, experts=None, **more)
        from ..models.placement import ExpertOptions  # `pyspec --help` needs no ggml

        profile = Path(expert_profile) if expert_profile is not None else None
        hosted = -1 if cpu_moe else n_cpu_moe or 0
        return command(*args, experts=ExpertOptions(hosted, expert_residency, profile, layers=layers), **more)

    for option in reversed(
        [
            click.option("-ot", "--override-tensor", multiple=True, hidden=True),
            click.option("-cmoe", "--cpu-moe", is_flag=True, help="Keep all routed experts in host memory."),
            click.option(
                "-ncmoe",
                "--n-cpu-moe",
                type=click.IntRange(0),
                metavar="N",
                help="Keep the routed experts of the first N layers in host memory.",
            ),
            click.option(
                "--expert-residency",
                type=Finite(0, 1),
                metavar="F",
                help="Keep the hottest fraction F of each layer's experts on the device.",
            ),
            click.option(
                "--expert-profile", type=click.Path(), help="Routing profile (pyspec experts profile). Default: MODEL.experts.json."
            ),
            click.option(
                "--offload-prompts",
                type=OffloadRows(),
                metavar="ROWS",
                help="Chunks of prompts of so many rows or more compute on the device, with copies of the experts or layers that are in host memory; "
                "auto: from where that is faster, which is measured. Default: off.",
            ),
        ]
    ):
        wrapped = option(wrapped)
    return wrapped


def _cache_type(names: str, meaning: str):
    return click.option(*names.split(), type=click.Choice(TYPES), metavar="TYPE", default="f16", show_default=True, help=meaning)


def cache_type_options(command):
    """-ctk, -ctv: keyword arguments as ``load`` takes them."""
    command = _cache_type("-ctv --cache-type-v", "The same for V rows.")(command)
    return _cache_type("-ctk --cache-type-k", f"What K rows are stored as: {', '.join(TYPES)}.")(command)


def draft_cache_type_options(command):
    """-ctkd, -ctvd: the same for the drafter; the longer names are ours and those of llama.cpp's tools, old and new."""
    for rows in "vk":
        names = f"-ct{rows}d --draft-cache-type-{rows} --cache-type-{rows}-draft --spec-draft-type-{rows} draft_cache_type_{rows}"
        command = _cache_type(names, f"The same for the drafter's {rows.upper()} rows.")(command)
    return command


chunk_option = click.option("-ub", "--ubatch-size", "chunk", type=click.IntRange(1, 4096), default=512, show_default=True,
                            help="Prompt tokens per pass; prompts are reused in whole passes.")  # fmt: skip


class Proportions(click.ParamType):
    """Numbers separated by commas, or by slashes as llama-bench has them."""

    name = "N,N"

    def convert(self, value, param, ctx):
        try:
            return [float(part) for part in value.replace("/", ",").split(",")] if isinstance(value, str) else value
        except ValueError:
            return self.fail(f"{value!r} is not a list of proportions, like 3,1", param, ctx)


def split_options(command):
    """-ts, -sm: the keyword argument ``tensor_split`` as ``load`` takes it."""

    @wraps(command)
    def wrapped(*args, split_mode, **more):
        if split_mode in ("row", "tensor"):
            raise click.UsageError(
                f"-sm {split_mode} would split each product over the devices; here whole layers are on one device each: leave it out"
            )
        if split_mode == "none" and "," in (more["device"] or ""):
            raise click.UsageError(f"-sm none and --device {more['device']} contradict each other")
        return command(*args, **more)

    for option in (
        click.option("-sm", "--split-mode", type=click.Choice(["none", "layer", "row", "tensor"]), hidden=True),
        click.option(
            "-ts",
            "--tensor-split",
            type=Proportions(),
            help="How many layers each device of --device gets, in proportion. Default: by free memory; a CPU gets what GPUs have no room for.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def rope_options(command):
    """--rope-scaling and its companions: the keyword argument ``rope`` as ``load`` takes it."""
    names = {
        "--rope-freq-base": "freq_base", "--rope-freq-scale": "freq_scale", "--yarn-orig-ctx": "orig_ctx", "--yarn-ext-factor": "ext_factor",
        "--yarn-attn-factor": "attn_factor", "--yarn-beta-slow": "beta_slow", "--yarn-beta-fast": "beta_fast",
    }  # fmt: skip

    @wraps(command)
    def wrapped(*args, rope_scaling, rope_scale, **more):
        given = {name: value for name in names.values() if (value := more.pop(f"rope_{name}")) is not None}
        if rope_scale is not None:
            if "freq_scale" in given:
                raise click.UsageError("--rope-scale and --rope-freq-scale say the same thing; give one of them")
            if not 1e-9 <= rope_scale <= 1e9:  # NaN is not
                raise click.UsageError(f"--rope-scale is {rope_scale:g}, but it has to be a number from 1e-09 to 1e+09")
            given["freq_scale"] = 1.0 / rope_scale
        if rope_scaling == "none" and given.get("freq_scale", 1.0) not in (0, 1):
            which = "--rope-scale" if rope_scale is not None else "--rope-freq-scale"
            raise click.UsageError(f"--rope-scaling none stretches nothing, so {which} would do nothing; leave one of them out")
        if rope_scaling is None and not given:
            return command(*args, rope=None, **more)
        from ..models.rope import RopeOptions  # `pyspec --help` needs no ggml

        try:
            rope = RopeOptions(rope_scaling, **given)
        except PyspecError as error:
            said = {name: option for option, name in names.items()} | ({"freq_scale": "--rope-scale"} if rope_scale is not None else {})
            raise click.UsageError(re.sub(r"`(\w+)`", lambda match: said[match[1]], str(error))) from None
        return command(*args, rope=rope, **more)

    for option, name in names.items():
        kind = click.IntRange(0, 1 << 30) if name == "orig_ctx" else click.FloatRange(0)
        wrapped = click.option(option, f"rope_{name}", type=kind, hidden=True)(wrapped)
    scale = click.FloatRange(0, min_open=True)
    wrapped = click.option("--rope-scale", type=scale, metavar="N", help="Stretch the context to N times its length.")(wrapped)
    return click.option(
        "--rope-scaling",
        type=click.Choice(["none", "linear", "yarn"]),
        help="How positions are stretched. Default: as the model file says. --rope-freq-base, --rope-freq-scale, --yarn-orig-ctx, "
        "--yarn-ext-factor, --yarn-attn-factor, --yarn-beta-slow and --yarn-beta-fast are taken too.",
    )(wrapped)


def loading_options(command):
    """How a pair is loaded, beside ``target_options``: what every command takes that generates."""
    for options in (
        draft_cache_type_options,
        cache_type_options,
        spec_options,
        expert_options,
        graphs_option,
        llama_cpp_options,
        split_options,
        rope_options,
    ):
        command = options(command)
    return command


def prefix_memory_option(default: str):
    """--prefix-memory; ``default``: what it says about that."""
    return click.option(
        "--prefix-memory",
        "-cram",
        "--cache-ram",
        type=click.IntRange(0),
        metavar="MIB",
        help=f"What the prefix cache may take on the device. Default: {default}.",
    )


def prefix_options(command):
    """--prefix-cache and its limits."""
    for option in reversed(
        [
            click.option(
                "--prefix-cache",
                "prefix_cache",
                type=click.Path(),
                help="Folder that keeps computed prompts: what begins alike starts sooner.",
            ),
            click.option("--prefix-disk", type=click.IntRange(0), metavar="MIB", help="What the folder may take. Default: 8192."),
            prefix_memory_option("1024, or an eighth of what is free if that is less"),
            chunk_option,
        ]
    ):
        command = option(command)
    return command


def take_prefix(values: dict, keep_memory: bool = False) -> None:
    """Turns what ``prefix_options`` added to ``values`` into what ``load`` takes: bytes, and no copies in memory for a single request."""
    if values["prefix_cache"] == "":
        raise click.UsageError("the name that --prefix-cache gives is empty; name a folder")
    for name in ("prefix_disk",) if keep_memory else ("prefix_disk", "prefix_memory"):
        if values["prefix_cache"] is None and values[name]:
            raise click.UsageError(
                f"--{name.replace('_', '-')} is a limit of the prefix cache, and without --prefix-cache there is none here"
            )
    for name in ("prefix_disk", "prefix_memory"):
        values[name] = values[name] << 20 if values[name] is not None else None
    if values["prefix_cache"] is None and not keep_memory:
        values["prefix_memory"] = 0


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
