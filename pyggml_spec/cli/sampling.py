"""Sampling options, with llama.cpp's names and defaults."""

import math
import re
from dataclasses import dataclass, fields

import click

from ..errors import SamplingError
from .names import in_options
from .options import text_of

_SAMPLING = [
    click.option("--temp", "--temperature", "temperature", type=float, help="Temperature; 0 takes the most likely token."),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 for all."),
    click.option("--top-p", type=float, help="Keep the most likely tokens up to this total probability; 1 for all."),
    click.option("--min-p", type=float, help="Keep tokens at least this likely relative to the most likely one; 0 for all."),
    click.option("--typical", "--typical-p", "typical_p", type=float, help="Keep locally typical tokens; 1 for all."),
    click.option("--samplers", help="Order of the samplers, separated by ;. Default: penalties; top_k; typ_p; top_p; min_p; temperature"),
    click.option(
        "-s", "--seed", type=click.IntRange(-1, (1 << 32) - 1), help="Random seed. Default, or -1: a random one, shown in the footer."
    ),
    click.option("--repeat-penalty", type=float, help="Divides positive logits of recent tokens, multiplies negative ones; 1 for none."),
    click.option("--repeat-last-n", type=int, help="Number of recent tokens, prompt included. Default: 64"),
    click.option("--presence-penalty", type=float, help="Subtracted from the logits of recent tokens, once."),
    click.option("--frequency-penalty", type=float, help="Subtracted from the logits of recent tokens, per occurrence."),
    click.option(
        "-l", "--logit-bias", multiple=True, metavar="ID(+/-)BIAS", help="Added to the logit of a token, as in 15043-1.5 or 15043-inf."
    ),
]
_CONSTRAINTS = [
    click.option("--grammar", help="GBNF grammar that the text has to match."),
    click.option("--grammar-file", type=click.Path(), help="File with the grammar."),
    click.option("-j", "--json-schema", help='JSON schema that the text has to match, as in \'{"type": "object"}\'.'),
    click.option("-jf", "--json-schema-file", type=click.Path(), help="File with the schema."),
    click.option(
        "--additional-properties", is_flag=True, default=None, help="Objects of the schema allow undescribed keys, unless they forbid them."
    ),
    click.option("--regex", help="Regular expression for the whole text, as in '[0-9]{4}-[0-9]{2}'."),
    click.option("--lark-file", type=click.Path(), help="File with a grammar in llguidance's variant of Lark."),
]


def sampler_options(command):
    """Adds the sampler chain, seed and bias; `take_sampling` collects the values."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def sampling_options(command):
    """The same with grammar and schema."""
    for option in reversed(_CONSTRAINTS):
        command = option(command)
    return sampler_options(command)


@dataclass(frozen=True)
class SamplingArgs:
    """Fields of ``Sampling`` set by a command's options."""

    values: dict

    @property
    def constrained(self) -> bool:
        """Whether there is a constraint."""
        from ..constraints.grammar import KINDS

        return any(kind in self.values for kind in KINDS)

    def sampling(self, file=None):
        """The Sampling; recommended values of the model file are defaults, unless decoding is greedy.

        Returns:
            The Sampling, and notes.
        """
        from ..sampling.recommended import chosen

        return chosen(self.values, file)


def take_sampling(options: dict, **more) -> SamplingArgs:
    """Removes the sampling options from ``options``. Raises click.UsageError: a value out of range."""
    from ..constraints.grammar import KINDS
    from ..sampling.sampler import Sampling

    texts = {name: text_of(name, options.pop(name, None), options.pop(name + "_file", None)) for name in KINDS}
    values = {f.name: options.pop(f.name) for f in fields(Sampling) if f.name in options}
    biases: dict[int, float] = {}
    for token, bias in map(_bias, values["logit_bias"]):
        biases[token] = biases.get(token, 0.0) + bias  # repeated ones add up, as in llama.cpp
    values["logit_bias"] = biases
    if values["samplers"] is not None:
        values["samplers"] = tuple(name.strip() for name in values["samplers"].split(";") if name.strip())
    args = SamplingArgs({name: value for name, value in {**values, **texts, **more}.items() if value is not None})
    if values["seed"] in (-1, (1 << 32) - 1):  # llama.cpp's values for a random seed
        args.values["seed"] = None
    try:
        args.sampling()
    except SamplingError as error:
        raise click.UsageError(in_options(re.sub(r"^(\w+)(?= is )", r"`\1`", str(error)))) from None
    return args


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d{1,9})([+-])(inf|\d{0,9}\.?\d{0,9})", text)
    try:
        if match is None:
            raise ValueError
        return int(match[1]), math.copysign(float(match[3]), -1 if match[2] == "-" else 1)
    except ValueError:
        raise click.UsageError(f"the logit bias {text!r} is not of the form 15043-1.5") from None
