"""Grouped help texts."""

import re
from collections.abc import Callable
from typing import Any

import click

from ..suggest import meant
from .foreign import resolve

GROUPS = {
    "Model and device": ("target", "draft", "hf_repo", "hf_file", "hf_repo_draft", "mmproj", "no_mmproj", "device", "threads", "kernels", "n_ctx", "graphs", "cpu_moe", "n_cpu_moe", "expert_residency", "expert_profile", "offload_prompts", "tensor_split", "lora", "lora_scaled", "lora_unapplied", "rope_scaling", "rope_scale"),
    "Drafting": ("spec_type", "no_spec", "draft_width", "draft_vocab", "mode", "reference", "require_spec", "synthetic", "rates"),
    "Caches": ("cache_type_k", "cache_type_v", "draft_cache_type_k", "draft_cache_type_v", "prefix_cache", "prefix_disk", "prefix_memory", "share_prefixes", "chunk"),
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "typical_p", "samplers", "seed", "repeat_penalty", "repeat_last_n", "presence_penalty",
                 "frequency_penalty", "dynatemp_range", "dynatemp_exponent", "top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base",
                 "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "logit_bias", "grammar", "grammar_file", "json_schema", "json_schema_file", "additional_properties", "regex", "lark_file"),
}  # fmt: skip
OWN = "Options"
PATH = click.Path()


def option(names: str, help: str | None = None, *, shown: Any = None, **more: Any) -> Callable:  # noqa: A002
    """click.option with all names in one string, the parameter's last; hidden without ``help``. ``shown``: a default that help shows."""
    if shown is not None:
        more |= {"default": shown, "show_default": True}
    return click.option(*names.split(), help=help, hidden=help is None, **more)


def flag(names: str, help: str | None = None, **more: Any) -> Callable:  # noqa: A002
    """An option without a value."""
    return option(names, help, is_flag=True, **more)


def grouped(params: list[click.Parameter]) -> dict[str, list[click.Option]]:
    """Visible options by group, ungrouped ones first, without empty groups."""
    of = {name: title for title, names in GROUPS.items() for name in names}
    out: dict[str, list[click.Option]] = {title: [] for title in (OWN, *GROUPS)}
    for param in params:
        if isinstance(param, click.Option) and not param.hidden:
            out[of.get(param.name, OWN)].append(param)
    return {title: options for title, options in out.items() if options}


class Command(click.Command):
    """A command that handles llama.cpp's other options, and suggests corrections of options and values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = resolved = resolve(ctx, args)
        try:
            return super().parse_args(ctx, [*resolved])
        except click.BadParameter as error:
            kind = error.param.type if error.param is not None else None
            if isinstance(kind, click.Choice) and (value := re.match(r"'([^']*)' is not", error.message)):
                near = meant(value[1], map(str, kind.choices))
                raise click.BadParameter(error.message.rstrip(".") + near, error.ctx, error.param, error.param_hint) from None
            raise


class GroupedCommand(Command):
    """``words``: the hint for positional arguments, which the command does not take."""

    def __init__(self, *args, words: str | None = None, **more):
        super().__init__(*args, **more)
        self.words, self.allow_extra_args = words, words is not None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        super().parse_args(ctx, args)
        if ctx.args:
            shown = ctx.args[0] if len(ctx.args[0]) < 60 else ctx.args[0][:57] + "..."
            raise click.UsageError(f"unexpected argument {shown!r}; {self.words}", ctx)
        return ctx.args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, options in grouped(self.get_params(ctx)).items():
            with formatter.section(title):
                formatter.write_dl([record for option in options if (record := option.get_help_record(ctx))])
