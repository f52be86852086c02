"""The sampling options, named and with defaults as in llama.cpp."""

import math
import re
from dataclasses import dataclass, fields

import click

from ..errors import SamplingError
from .names import in_options
from .options import text_of

_SAMPLING = [
    click.option("--temp", "--temperature", "temperature", type=float, help="Temperature; 0 takes the most likely token."),
    click.option("--top-k", type=int, help="Only the k most likely tokens; 0 for all."),
    click.option("--top-p", type=float, help="Only the most likely tokens that together have this probability; 1 for all."),
    click.option("--min-p", type=float, help="Only tokens at least this likely relative to the most likely one; 0 for all."),
    click.option("--typical", "--typical-p", "typical_p", type=float, help="Only tokens of typical information; 1 for all."),
    click.option(
        "--samplers", help="Order of the samplers, with ; between them. Default: penalties; top_k; typ_p; top_p; min_p; temperature"
    ),
    click.option(
        "-s",
        "--seed",
        type=click.IntRange(-1, (1 << 32) - 1),
        help="Of the random numbers. Default, or -1: a random one, which the footer tells.",
    ),
    click.option("--repeat-penalty", type=float, help="Divides positive logits of recent tokens, multiplies negative ones; 1 for none."),
    click.option("--repeat-last-n", type=int, help="How many tokens are recent, the prompt's included. Default: 64"),
    click.option("--presence-penalty", type=float, help="Taken off the logits of recent tokens, once."),
    click.option("--frequency-penalty", type=float, help="Taken off the logits of recent tokens, per occurrence."),
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
        "--additional-properties",
        is_flag=True,
        default=None,
        help="In the schema, objects allow keys that they do not describe, unless they say otherwise.",
    ),
    click.option("--regex", help="Regular expression that the whole text has to match, as in '[0-9]{4}-[0-9]{2}'."),
    click.option("--lark-file", type=click.Path(), help="File with a grammar in llguidance's variant of Lark."),
]


def sampler_options(command):
    """The sampler chain, seed and bias; `take_sampling` makes one value of them."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def sampling_options(command):
    """The same, and grammar and schema."""
    for option in reversed(_CONSTRAINTS):
        command = option(command)
    return sampler_options(command)


@dataclass(frozen=True)
class Asked:
    """What a command's options ask for: fields of ``Sampling``."""

    values: dict

    @property
    def constrained(self) -> bool:
        """Whether the text has to match something."""
        from ..constraints.grammar import KINDS

        return any(kind in self.values for kind in KINDS)

    def sampling(self, file=None):
        """The Sampling; what the model file recommends counts where nothing was asked for, unless decoding is greedy.

        Returns:
            It, and notes for people.
        """
        from ..sampling.recommended import chosen

        return chosen(self.values, file)


def take_sampling(options: dict, **more) -> Asked:
    """Takes the sampling options out of ``options``.

    Raises:
        click.UsageError: a value out of range.
    """
    from ..constraints.grammar import KINDS
    from ..sampling.sampler import Sampling

    texts = {name: text_of(name, options.pop(name, None), options.pop(name + "_file", None)) for name in KINDS}
    values = {f.name: options.pop(f.name) for f in fields(Sampling) if f.name in options}
    biases: dict[int, float] = {}
    for token, bias in map(_bias, values["logit_bias"]):
        biases[token] = biases.get(token, 0.0) + bias  # several of one token add up, as in llama.cpp
    values["logit_bias"] = biases
    if values["samplers"] is not None:
        values["samplers"] = tuple(name.strip() for name in values["samplers"].split(";") if name.strip())
    asked = Asked({name: value for name, value in {**values, **texts, **more}.items() if value is not None})
    if values["seed"] in (-1, (1 << 32) - 1):  # llama.cpp's ways to ask for a random one
        asked.values["seed"] = None
    try:
        asked.sampling()
    except SamplingError as error:
        raise click.UsageError(in_options(re.sub(r"^(\w+)(?= is )", r"`\1`", str(error)))) from None
    return asked


def _bias(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d{1,9})([+-])(inf|\d{0,9}\.?\d{0,9})", text)
    try:
        if match is None:
            raise ValueError
        return int(match[1]), math.copysign(float(match[3]), -1 if match[2] == "-" else 1)
    except ValueError:
        raise click.UsageError(f"the logit bias {text!r} is not of the form 15043-1.5") from None
