"""Sampling options, with llama.cpp's names and defaults."""

import math
import re
from dataclasses import dataclass, fields

import click

from ..errors import SamplingError
from .help import PATH, flag, option
from .options import in_options, text_of, with_options

_SAMPLING = [
    option("--temp --temperature temperature", "Temperature; 0 takes the most likely token.", type=float),
    option("--top-k", "Keep the k most likely tokens; 0 for all.", type=int),
    option("--top-p", "Keep the most likely tokens up to this total probability; 1 for all.", type=float),
    option("--min-p", "Keep tokens at least this likely relative to the most likely one; 0 for all.", type=float),
    option("--typical --typical-p typical_p", "Keep locally typical tokens; 1 for all.", type=float),
    option("--samplers", "Order of the samplers, separated by ;. Default: penalties; top_k; typ_p; top_p; min_p; temperature"),
    option("-s --seed", "Random seed. Default, or -1: a random one, shown in the footer.", type=click.IntRange(-1, (1 << 32) - 1)),
    option("--repeat-penalty", "Divides positive logits of recent tokens, multiplies negative ones; 1 for none.", type=float),
    option("--repeat-last-n", "Number of recent tokens, prompt included. Default: 64", type=int),
    option("--presence-penalty", "Subtracted from the logits of recent tokens, once.", type=float),
    option("--frequency-penalty", "Subtracted from the logits of recent tokens, per occurrence.", type=float),
    option("-l --logit-bias", "Added to the logit of a token, as in 15043-1.5 or 15043-inf.", multiple=True, metavar="ID(+/-)BIAS"),
]
_CONSTRAINTS = [
    option("--grammar", "GBNF grammar that the text has to match."),
    option("--grammar-file", "File with the grammar.", type=PATH),
    option("-j --json-schema", 'JSON schema that the text has to match, as in \'{"type": "object"}\'.'),
    option("-jf --json-schema-file", "File with the schema.", type=PATH),
    flag("--additional-properties", "Objects of the schema allow undescribed keys, unless they forbid them.", default=None),
    option("--regex", "Regular expression for the whole text, as in '[0-9]{4}-[0-9]{2}'."),
    option("--lark-file", "File with a grammar in llguidance's variant of Lark.", type=PATH),
]

sampler_options = with_options(_SAMPLING)  # the sampler chain, seed and bias; `take_sampling` collects the values
sampling_options = with_options([*_SAMPLING, *_CONSTRAINTS])  # the same with grammar and schema


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
