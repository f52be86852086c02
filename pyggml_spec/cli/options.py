"""The options of loading, by fields of LoadOptions, and what several commands share. Names that llama.cpp has keep their names."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click

from ..cache.kv import MOST_CONTEXT, TYPES
from ..engine.options import AtMost
from ..errors import PyspecError
from ..ggml.device import pick_devices
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief
from ..load_options import AUTO, LoadOptions
from ..loading import DEMO_TARGET
from ..models.placement import ExpertOptions, overridden
from ..models.rope import RopeOptions
from ..speculation.methods import NONE, listed, methods
from ..speculation.synthetic import SyntheticAcceptance
from .help import PATH, flag, option
from .terminal import progress_line

# -- kinds of values


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


class Numbers(click.ParamType):
    """Numbers separated by commas, or by slashes as llama-bench has them, as a tuple. ``refused``: what is wrong with them, if anything."""

    def __init__(self, name: str, what: str, of: type = float, refused: Callable[[tuple], str] = lambda numbers: "") -> None:
        self.name, self.what, self.of, self.refused = name, what, of, refused

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        try:
            parts = value.replace("/", ",").split(",")
            numbers = tuple(self.of(part) for part in parts if part or self.of is float)
        except ValueError:
            return self.fail(f"{value!r} is not a list of {self.what}", param, ctx)
        why = self.refused(numbers)
        return self.fail(why.replace("{}", repr(value)), param, ctx) if why else numbers


class Layers(click.ParamType):
    """A number of layers, or one of llama.cpp's words for all of them (None)."""

    name = "N"

    def convert(self, value, param, ctx):
        if value in ("all", "auto", "-1"):
            return None
        return int(value) if str(value).isdecimal() else self.fail(f"{value!r} is not a number of layers", param, ctx)


def _wrong_rates(rates: tuple[float, ...]) -> str:
    try:
        SyntheticAcceptance.of_rates(rates)
    except PyspecError as error:
        return str(error)
    return ""


LIMIT = "-n --predict --n-predict max_tokens"
UNLIMITED = 1 << 30  # tokens; more than any context holds


class TokenLimit(click.IntRange):
    """How many tokens to generate; llama.cpp's -1 and -2 set no limit but the context."""

    def convert(self, value, param, ctx):
        return UNLIMITED if value in ("-1", "-2") else super().convert(value, param, ctx)

    def _describe_range(self) -> str:
        return f"-1 or {super()._describe_range()}"


# -- options of loading


def _cache_type(names: str, text: str, shown: str | None = "f16") -> Callable:
    return option(names, text, type=click.Choice(TYPES), metavar="TYPE", shown=shown)


def _draft_cache_type(rows: str) -> Callable:
    names = f"-ct{rows}d --draft-cache-type-{rows} --cache-type-{rows}-draft --spec-draft-type-{rows} draft_cache_type_{rows}"
    default = "Default: f16; without -ctkd and -ctvd q8_0, on NVIDIA GPUs whose kernels read that as it lies"
    return _cache_type(names, f"The same for the drafter's {rows.upper()} rows. {default}.", None)


_ROPE = {
    "--rope-freq-base": "freq_base", "--rope-freq-scale": "freq_scale", "--yarn-orig-ctx": "orig_ctx", "--yarn-ext-factor": "ext_factor",
    "--yarn-attn-factor": "attn_factor", "--yarn-beta-slow": "beta_slow", "--yarn-beta-fast": "beta_fast",
}  # fmt: skip
DEVICE = "Device name, as `pyspec devices` lists it; several, separated by commas, share the layers. Default: the first GPU, or the CPU."
CONTEXT = "that too, or as much as memory has room for; the first line of the output shows which"
PREFIX_MEMORY = "1024, or an eighth of what is free if that is less"

KERNELS = option(
    "--kernels",
    "Kernels for matrix products on a CPU. Default: native on x86 with AVX2; ggml elsewhere, which equals llama.cpp bit for bit. "
    "own: deprecated name of native.",
    type=click.Choice(["native", "ggml", "own"]),
)
CACHE_TYPES = [
    _cache_type("-ctk --cache-type-k cache_type_k", f"What K rows are stored as: {', '.join(TYPES)}."),
    _cache_type("-ctv --cache-type-v cache_type_v", "The same for V rows."),
]
_HUB = [
    option("-hf -hfr --hf-repo", "Target from the Hugging Face hub (USER/MODEL). Default of QUANT: Q4_K_M, else Q8_0, else the first file.",
           metavar="REPO[:QUANT]"),
    option("-hff --hf-file", "This file of the repository, instead of QUANT.", metavar="NAME"),
    option("-hfd -hfrd --hf-repo-draft --spec-draft-hf hf_repo_draft",
           "The same for the drafter; prefers files named dflash-*, dspark-*, eagle3-* or mtp-*.", metavar="REPO[:QUANT]"),
]  # fmt: skip
_GROUPS: dict[str, list[Callable]] = {
    "llama.cpp": [  # options that map to ours
        option("-ngl --gpu-layers --n-gpu-layers gpu_layers", type=Layers()),
        option("-ngld --spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft draft_gpu_layers", type=Layers()),
        option("-fa --flash-attn", type=click.Choice(["on", "off", "auto"])),
        option("--spec-draft-n-max --draft-max --draft-n --draft n_max", type=click.IntRange(1, 1023)),
    ],
    "split": [
        option("-sm --split-mode", type=click.Choice(["none", "layer", "row", "tensor"])),
        option("-ts --tensor-split", "How many layers each device of --device gets, in proportion. Default: by free memory; a CPU gets what GPUs have no room for.",
               type=Numbers("N,N", "proportions, like 3,1")),
    ],
    "rope": [
        option("--rope-scaling", "How positions are stretched. Default: as in the model file. --rope-freq-base, --rope-freq-scale, --yarn-orig-ctx, "
               "--yarn-ext-factor, --yarn-attn-factor, --yarn-beta-slow and --yarn-beta-fast are taken too.", type=click.Choice(["none", "linear", "yarn"])),
        option("--rope-scale", "Stretch the context to N times its length.", type=click.FloatRange(0, min_open=True), metavar="N"),
        *(option(f"{names} rope_{name}", type=click.IntRange(0, 1 << 30) if name == "orig_ctx" else click.FloatRange(0)) for names, name in _ROPE.items()),
    ],
    "adapters": [
        option("--lora", "LoRA adapter of the target; several with commas between them. May be given several times.", multiple=True, metavar="FILE"),
        option("--lora-scaled", "The same with a factor.", multiple=True, metavar="FILE:SCALE"),
        flag("--lora-init-without-apply lora_unapplied", "Adapters have a scale of 0 where a request does not choose another one."),
    ],
    "graphs": [flag("--no-graphs graphs", "No CUDA graph replay: shows what it is worth.", flag_value=False, default=True)],
    "experts": [
        option("-ot --override-tensor", multiple=True),
        flag("-cmoe --cpu-moe", "Keep all routed experts in host memory."),
        option("-ncmoe --n-cpu-moe", "Keep the routed experts of the first N layers in host memory.", type=click.IntRange(0), metavar="N"),
        option("--expert-residency", "Keep the hottest fraction F of each layer's experts on the device.", type=Finite(0, 1), metavar="F"),
        option("--expert-profile", "Routing profile (pyspec experts profile). Default: MODEL.experts.json.", type=PATH),
        option("--offload-prompts", "Chunks of prompts of so many rows or more compute on the device, with copies of the experts or layers that are in host memory; "
               "auto: from where that is faster, which is measured. Default: off.", type=OffloadRows(), metavar="ROWS"),
    ],
    "drafting": [
        option("--spec-type", "Drafting methods, separated by commas: draft-dflash, draft-mtp, draft-eagle3, draft-dspark, draft-simple, and one of suffix, ngram-simple, ngram-map-k, ngram-mod; none for plain decoding. "
               "Default: what -md names, or else a drafter in the target's folder or repository, or else the model's own MTP layer. Of several, the one with most tokens per millisecond drafts each step.", metavar="LIST"),
        option("--no-spec", "Exclude this drafting method, or all if none is named. May be given several times.", multiple=True, is_flag=False, flag_value=NONE, metavar="TYPE"),
        option("--draft-vocab", "Draft none but the first N tokens of the vocabulary: the drafter's head takes less time. The text stays the same.",
               type=click.IntRange(64), metavar="N"),
        option("--draft-width", "Rows per verified block. Default: chosen while running.", type=click.IntRange(2, 1024)),
    ],
    "caches": [*CACHE_TYPES, _draft_cache_type("k"), _draft_cache_type("v")],
    "pictures": [
        option("--mmproj -mm", "Encoder of pictures that was made for the target. Default: one in the target's folder or repository.", type=PATH),
        flag("--no-mmproj", "No pictures."),
    ],
    "prefix files": [
        option("--prefix-cache", "Folder that keeps computed prompts: shared prompt prefixes are reused by later processes.", type=PATH),
        option("--prefix-disk", "What the folder may take. Default: 8192.", type=click.IntRange(0), metavar="MIB"),
    ],
}  # fmt: skip


def load_options(*groups: str, device: str = DEVICE, context: str = CONTEXT, memory: str | None = None) -> Callable[[Callable], Callable]:
    """Options of LoadOptions for a command, which gets ``target``, ``draft`` and ``options``, a LoadOptions, in their place.

    Args:
        groups: of _GROUPS, besides files, device, threads, kernels and context.
        device, context, memory: help of --device, and the defaults of -c and --prefix-memory; without ``memory`` there is no such option.
    """
    declared = [
        option("-m --model target", "Target GGUF. Without it, the embedded pair runs.", type=PATH),
        option("-md --model-draft --spec-draft-model draft", "Drafter GGUF (dflash, eagle3, gemma4-assistant, or an MTP layer) made for the target, or a small model with its vocabulary. Several: one of blocks, one of chains, one small model.",
               type=PATH, multiple=True),
        option("--device -dev", device),
        option("-t --threads", "CPU threads, fixed. Default: as many as other work leaves cores for, at most 16.", type=click.IntRange(1, 512)),
        KERNELS,
        option("-c --ctx-size n_ctx", f"Context in tokens; 0 for what the model was trained with. Default: {context}.", type=click.IntRange(0, MOST_CONTEXT)),
        *_HUB,
        *(one for group in groups for one in _GROUPS[group]),
    ]  # fmt: skip
    if memory is not None:
        declared += [
            option("--prefix-memory -cram --cache-ram", f"What the prefix cache may take on the device. Default: {memory}.", type=click.IntRange(0), metavar="MIB"),
            option("-ub --ubatch-size chunk", "Prompt tokens per pass. Default: 512; 2048 where several slots share a GPU with memory for it.", type=click.IntRange(1, 4096)),
        ]  # fmt: skip

    def decorate(command: Callable) -> Callable:
        @wraps(command)
        def wrapped(*args: Any, **values: Any) -> Any:
            target, draft = _files(values)
            options = _load_options(values, target)
            return command(*args, target=target, draft=draft, options=options, **values)

        return with_options(declared)(wrapped)

    return decorate


def with_options(declared: Iterable[Callable]) -> Callable[[Callable], Callable]:
    """Gives a command these options, in this order."""

    def decorate(command: Callable) -> Callable:
        for one in reversed([*declared]):
            command = one(command)
        return command

    return decorate


MEASURED = "llama.cpp", "split", "rope", "adapters", "graphs", "experts", "drafting", "caches"
loading = load_options(*MEASURED, "pictures", "prefix files", memory=PREFIX_MEMORY)  # all of them, for commands that answer prompts


def _files(values: dict[str, Any]) -> tuple[str | None, Any]:
    """Takes the files out of ``values``: the target and its drafters, fetched where they are named by repository."""
    names = "target", "draft", "hf_repo", "hf_file", "hf_repo_draft"
    target, draft, hf_repo, hf_file, hf_repo_draft = (values.pop(name) for name in names)
    for name, files in (("-m", (target,)), ("-md", draft)):
        if "" in files:
            raise click.UsageError(f"the name that {name} gives is empty; name a GGUF file")
    draft = None if not draft else draft[0] if len(draft) == 1 else draft
    for name, repo, file in (("-hf", hf_repo, target), ("-hfd", hf_repo_draft, draft)):
        if repo is not None and file is not None:
            raise click.UsageError(f"{name} {repo} and {'-m' if name == '-hf' else '-md'} {file} both name a model; give one of them")
    if hf_file is not None and hf_repo is None:
        raise click.UsageError("-hff names a file of a repository, so it needs -hf")
    if hf_repo is not None or hf_repo_draft is not None:
        from ..hub import fetch, fetch_encoder, fetch_pair

        free = hf_repo_draft is None and draft is None and values.get("spec_type") is None and not values.get("no_spec")
        with progress_line() as progress:
            if hf_repo is not None and free:
                target, draft = fetch_pair(hf_repo, file=hf_file, progress=progress)
            elif hf_repo is not None:
                target = fetch(hf_repo, file=hf_file, progress=progress)
            if hf_repo is not None and _wants_encoder(values):
                values["mmproj"] = fetch_encoder(hf_repo, progress=progress)
            if hf_repo_draft is not None:
                draft = fetch(hf_repo_draft, drafter=True, progress=progress)
    return target, draft


def _wants_encoder(values: dict[str, Any]) -> bool:
    """Whether a command takes pictures, with an encoder that is not named. ``images``: those of one prompt."""
    return "mmproj" in values and values["mmproj"] is None and not values["no_mmproj"] and bool(values.get("images", True))


def _load_options(values: dict[str, Any], target: str | None) -> LoadOptions:
    """Takes the options of loading out of ``values``."""
    if "gpu_layers" in values:
        _translate(values, target)
    mode, device = values.pop("split_mode", None), values["device"]
    if mode in ("row", "tensor"):
        why = "would split each product over the devices; here whole layers are on one device each"
        raise click.UsageError(f"-sm {mode} {why}: leave it out")
    if mode == "none" and "," in (device or ""):
        raise click.UsageError(f"-sm none and --device {device} contradict each other")
    taken: dict[str, Any] = {}
    if "spec_type" in values:
        if NONE in values["no_spec"]:
            if values["spec_type"] not in (None, NONE):
                raise click.UsageError(
                    f"--no-spec excludes every method, and --spec-type names {values['spec_type']}; leave one of them out"
                )
            values["spec_type"], values["no_spec"] = NONE, ()
        given = values.pop("spec_type")
        taken["spec"] = names = listed(given)
        if names == []:
            raise click.UsageError(f"--spec-type {given!r} names no drafting method; name one, or none for plain decoding")
        try:
            methods(names, values["no_spec"])
        except PyspecError as error:
            raise click.UsageError(str(error)) from None
    if "cpu_moe" in values:
        taken["experts"] = _experts(values, target)
    if "rope_scaling" in values:
        taken["rope"] = _rope(values)
    if "lora" in values:
        taken["lora"] = _adapters(values.pop("lora"), values.pop("lora_scaled"), values.pop("lora_unapplied"))
    if values.get("prefix_cache") == "":
        raise click.UsageError("the name that --prefix-cache gives is empty; name a folder")
    if "mmproj" in values:
        if values["mmproj"] and values["no_mmproj"]:
            raise click.UsageError(f"--mmproj {values['mmproj']} and --no-mmproj contradict each other")
        values["mmproj"] = AUTO if _wants_encoder(values) else values["mmproj"]
        del values["no_mmproj"]
    for name in LoadOptions.__dataclass_fields__:
        if name in values:
            taken[name] = values.pop(name)
    for name in ("prefix_disk", "prefix_memory"):
        if taken.get(name) is not None:
            taken[name] <<= 20
    return LoadOptions(**taken)


def _adapters(files: Sequence[str], scaled: Sequence[str], unapplied: bool) -> list[tuple[str, float]]:
    """Files and scales of --lora and --lora-scaled, in this order."""
    found = [(name, 1.0) for given in files for name in given.split(",")]
    for given in scaled:
        for pair in given.split(","):
            name, _, scale = pair.rpartition(":")
            try:
                found.append((name, float(scale)))
            except ValueError:
                raise click.UsageError(f"--lora-scaled {pair} has no scale; write FILE:SCALE, as in style.gguf:0.5") from None
    if not all(name for name, _ in found):
        raise click.UsageError("the name that --lora gives is empty; name a GGUF file")
    return [(name, 0.0) for name, _ in found] if unapplied else found


def _translate(values: dict[str, Any], target: str | None) -> None:
    """-ngl, -ngld, -fa and --spec-draft-n-max become ``device``, ``tensor_split`` and ``draft_width``."""
    names = "gpu_layers", "draft_gpu_layers", "flash_attn", "n_max"
    gpu_layers, draft_gpu_layers, flash_attn, n_max = (values.pop(name) for name in names)
    if flash_attn == "off":
        raise click.UsageError("attention is always flash attention; leave out -fa off")
    if n_max is not None:
        if (width := values["draft_width"]) not in (None, n_max + 1):
            both = f"--spec-draft-n-max {n_max} and --draft-width {width}"
            raise click.UsageError(f"{both} contradict each other: the width includes the last token")
        values["draft_width"] = width or AtMost(n_max + 1)
    if gpu_layers == 0:
        if values["device"] not in (None, "CPU"):
            raise click.UsageError(f"-ngl 0 and --device {values['device']} contradict each other")
        values["device"] = "CPU"
    elif gpu_layers is not None:
        _place_layers(gpu_layers, values, target)
    if draft_gpu_layers == 0 and values["device"] != "CPU":
        remedy = "leave it out, or use --device CPU for both"
        raise click.UsageError(f"-ngld 0 would put the drafter on another device than the target; {remedy}")


def _place_layers(requested: int, values: dict[str, Any], target: str | None) -> None:
    """Layers for the CPU if fewer than all are offloaded: the first ones, as in llama.cpp, which counts the head as a layer."""
    with GGUFFile(target if target is not None else DEMO_TARGET) as file:
        there = file.get(f"{file.get('general.architecture', str)}.block_count", int, 0)
    on_cpu, found = there + 1 - requested, pick_devices(values["device"])
    if on_cpu <= 0 or all(device.kind == "cpu" for device in found):
        return
    if len(found) > 1 or values.get("tensor_split") is not None or on_cpu >= there:
        raise PyspecError(f"-ngl {requested} would leave {on_cpu} of {there} layers in host memory; with several devices give the CPU's share: "
                          "--device CPU,GPU --tensor-split")  # fmt: skip
    values["device"], values["tensor_split"] = f"CPU,{found[0].name}", [on_cpu, there - on_cpu]


def _experts(values: dict[str, Any], target: str | None) -> ExpertOptions | None:
    names = "cpu_moe", "n_cpu_moe", "expert_residency", "expert_profile", "override_tensor"
    every, first, residency, profile, overrides = (values.pop(name) for name in names)
    layers = _overridden(overrides, target) if overrides else ()
    if profile is not None and residency is None:
        raise click.UsageError("--expert-profile selects the hot experts, so it needs --expert-residency")
    if every and (first is not None or residency is not None):
        raise click.UsageError("--cpu-moe keeps all experts in host memory; leave out --n-cpu-moe and --expert-residency")
    if not (every or first is not None or residency is not None or layers):
        return None
    return ExpertOptions(-1 if every else first or 0, residency, Path(profile) if profile is not None else None, layers=layers)


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
    named = {name: names for names, name in _ROPE.items()} | ({"freq_scale": "--rope-scale"} if scale is not None else {})
    if scaling == "none" and given.get("freq_scale", 1.0) not in (0, 1):
        raise click.UsageError(f"--rope-scaling none stretches nothing, so {named['freq_scale']} would do nothing; leave one of them out")
    if scaling is None and not given:
        return None
    try:
        return RopeOptions(scaling, **given)
    except PyspecError as error:
        raise click.UsageError(re.sub(r"`(\w+)`", lambda match: named[match[1]], str(error))) from None


def check_prefix(options: LoadOptions, memory: bool = True) -> None:
    """Refuses limits of a prefix cache that there is not; ``memory``: whether prefixes are kept in memory without a folder."""
    for name in ("prefix_disk",) if memory else ("prefix_disk", "prefix_memory"):
        if options.prefix_cache is None and getattr(options, name):
            limit = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{limit} is a limit of the prefix cache, and without --prefix-cache there is none here")


# -- options and texts that several commands take


def synthetic_options(shown: bool) -> list[Callable]:
    """Synthetic acceptance, in help only if ``shown``."""
    texts = [
        "Accept L tokens per full block on average, at random. The text is not valid.",
        "Accept the draft of each position in this share of the blocks, at random, instead.",
    ]
    of_mean, of_rates = texts if shown else (None, None)
    return [
        option("--synthetic-acceptance --spec-synth-len synthetic", of_mean, type=float),
        option("--spec-synth-rates rates", of_rates, type=Numbers("P[,P...]", "numbers", refused=_wrong_rates), default=()),
    ]


def check_synthetic(synthetic: float | None, rates: tuple[float, ...]) -> None:
    if rates and synthetic is not None:
        raise click.UsageError("--synthetic-acceptance and --spec-synth-rates both say how many drafts are accepted; give one of them")


TEMPLATE = [  # of conversations
    option("--chat-template-file template_file", "File with the template.", type=PATH),
    option("--chat-template-kwargs variables", "Further names that the template knows, as a JSON object.", metavar="JSON"),
]


def template_variables(text: str | None) -> dict[str, Any]:
    """The value of --chat-template-kwargs."""
    if text is None:
        return {}
    why = ""
    try:
        given = json.loads(argument_text(text))
    except (ValueError, RecursionError) as error:
        given, why = None, f" ({error})"
    if not isinstance(given, dict):
        raise PyspecError(f'--chat-template-kwargs {brief(text)} is no JSON object{why}; give one like {{"reasoning_effort": "low"}}')
    return given


def argument_text(given: str) -> str:
    """A text from the command line, bytes that are no UTF-8 replaced."""
    return given.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def text_of(name: str, given: str | None, path: str | None) -> str | None:
    """The text of an option that can also be named as a file."""
    if given is not None and path is not None:
        names = f"--{name.replace('_', '-')}"
        raise click.UsageError(f"give {names} or {names}-file, not both")
    if path is None:
        return given if given is None else argument_text(given)
    return file_text(path, "file", None)


def file_text(path: str, what: str, newline: str | None = "") -> str:
    """The text of a file; ``newline``: as of ``open``. Raises PyspecError: it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline=newline) as file:
            return file.read()
    except OSError as error:
        raise PyspecError(f"the {what} {path} cannot be read: {error.strerror}") from None


escape_option = click.option(
    "-e/ ", "--escape/--no-escape", "escaped", default=False, help="Read \\n, \\t and the like in prompts as what they stand for."
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def unescaped(text: str) -> str:
    """``text`` with llama.cpp's escapes as what they stand for; others stay as they are."""
    return re.sub(r"\\([nrt'\"\\]|x([0-9A-Fa-f]{2}))", lambda match: _ESCAPES.get(match[1]) or chr(int(match[2], 16)), text)


# -- names of arguments in the library's messages

_EVERY = click.command(load_options("pictures")(lambda **_: None))  # arguments shared by all commands
_NAME = re.compile(r"`(\w+)`")


def in_options(text: str, command: click.Command | None = None) -> str:
    """``text`` with options instead of arguments, of ``command`` (default: the running one), else of any command."""
    if command is None:
        context = click.get_current_context(silent=True)
        command = context.command if context is not None else None
    names = {"spec": "--spec-type", **_names(_EVERY), **(_names(command) if command is not None else {})}
    return _NAME.sub(lambda match: names.get(match[1], match[0]), text)


def _names(command: click.Command) -> dict[str, str]:
    """Options by argument name and by long name; for a group, of all its commands."""
    if isinstance(command, click.Group):
        return {name: option for one in command.commands.values() for name, option in _names(one).items()}
    options = [p for p in command.params if isinstance(p, click.Option)]
    long = {name.removeprefix("--").replace("-", "_"): p.opts[0] for p in options for name in p.opts if name.startswith("--")}
    return {**long, **{p.name: p.opts[0] for p in options if p.name}}
