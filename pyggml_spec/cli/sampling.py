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
    option(
        "--samplers",
        "Order of the samplers, separated by ;. Default: penalties; dry; top_n_sigma; top_k; typ_p; top_p; min_p; xtc; temperature",
    ),
    option("-s --seed", "Random seed. Default, or -1: a random one, shown in the footer.", type=click.IntRange(-1, (1 << 32) - 1)),
    option("--repeat-penalty", "Divides positive logits of recent tokens, multiplies negative ones; 1 for none.", type=float),
    option("--repeat-last-n", "Number of recent tokens, prompt included. Default: 64", type=int),
    option("--presence-penalty", "Subtracted from the logits of recent tokens, once.", type=float),
    option("--frequency-penalty", "Subtracted from the logits of recent tokens, per occurrence.", type=float),
    option("--dynatemp-range", "The temperature is within so much of --temp, by the entropy; 0 for none.", type=float),
    option("--dynatemp-exp --dynatemp-exponent dynatemp_exponent", "Power of the entropy. Default: 1", type=float),
    option(
        "--top-nsigma --top-n-sigma top_n_sigma",
        "Keep tokens within so many standard deviations of the largest logit; -1 for all.",
        type=float,
    ),
    option("--xtc-probability", "Chance that the likeliest tokens are left out; 0 for none.", type=float),
    option("--xtc-threshold", "Probability from which on they are, but for the least likely of them. Default: 0.1", type=float),
    option("--dry-multiplier", "Penalty of tokens that go on with a repetition; 0 for none.", type=float),
    option("--dry-base", "Factor of the penalty per token of the repetition. Default: 1.75", type=float),
    option("--dry-allowed-length", "Length of a repetition without penalty. Default: 2", type=int),
    option("--dry-penalty-last-n", "Number of recent tokens, prompt included. Default: 64", type=int),
    option(
        "--dry-sequence-breaker dry_sequence_breakers",
        "Text that ends repetitions, 'none' for none; may be given several times. Default: newline : \" *",
        multiple=True,
    ),
    option("--mirostat", "1 or 2: keep the surprise of tokens, in place of the samplers but the temperature.", type=int),
    option("--mirostat-ent --mirostat-tau mirostat_tau", "That surprise in bits. Default: 5", type=float),
    option("--mirostat-lr --mirostat-eta mirostat_eta", "Its learning rate. Default: 0.1", type=float),
    option("--adaptive-target", "Probability near which the sampler adaptive_p chooses; it has to be among --samplers.", type=float),
    option("--adaptive-decay", "Decay of its average of recent probabilities. Default: 0.9", type=float),
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
    breakers = values.get("dry_sequence_breakers")
    values["dry_sequence_breakers"] = (() if breakers == ("none",) else breakers) if breakers else None
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
