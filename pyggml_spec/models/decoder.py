"""A target model as a description of its layers. ``Decoder`` derives tensors, caches and graphs from it.
@register("qwen2")
def qwen2(f: Hparams) -> Decoder:
    size = f.head_dim()
    attention = Attention(f.heads, f.kv_heads, size, f.rope(size))
    return Decoder(f, [Layer(attention, GatedMLP(f.ff))] * f.n_layer, biased=ATTENTION)
"""

from collections.abc import Callable, Mapping, Sequence

from ..errors import ModelError
from ..ggml.graph import Graph
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .base import KVShape, RecurrentShape, TargetInputs
from .hparams import Hparams
from .layers import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, Attention, Layer, LayerContext, any_norm, head_product
from .model import SCALED, Model
from .moe import Experts
from .rope import Rope
from .weights import MATMUL, ROWS, VECTOR, Spec, Weights

ARCHITECTURES: dict[str, Callable[[GGUFFile], "Decoder"]] = {}


def register(*archs: str) -> Callable[[Callable[[Hparams], "Decoder"]], Callable[[Hparams], "Decoder"]]:
    """Registers a description (a function from ``Hparams``) under these architecture names."""

    def note(describe: Callable[[Hparams], "Decoder"]) -> Callable[[Hparams], "Decoder"]:
        ARCHITECTURES.update({arch: described(describe, arch) for arch in archs})
        return describe

    return note


def described(describe: Callable[[Hparams], "Decoder"], arch: str) -> Callable[[GGUFFile], "Decoder"]:
    """The constructor of a target from an open file of ``arch``."""

    def opened(file: GGUFFile) -> Decoder:
        f = Hparams(file, arch)
        decoder = describe(f)
        if not f.routed and f.get("expert_count", int, 0):
            raise ModelError(f"{file.path} has routed experts, which {arch} models here do not; use a dense model")
        return decoder

    return opened


class Decoder(Model):
    """A target made of ``layers``. ``weights`` has to be set before ``forward``.

    Args:
        window: positions visible to sliding layers, 0 for none; ``chunked``: of parts of so many positions the current one.
        layer_norms: norms subtract the mean, too. ``norm_biases``: all have a bias.
        output_norm: name of the last norm in the file.
        long_from: tokens of context above which ROPE_LONG applies, and ROPE_SHORT below; 0 for models without these tables.
        temperature: (scale s, length n): queries at position p are multiplied by 1 + s ln(1 + floor(p / n)); (0, 0) for none.
            ``temperature_from`` is added to p.
        embedding_scale: factor of the embedding. ``norm_embedding``: RMS-normalise it, without a weight.
        logit_scale, softcap: logits are scaled, then capped, c tanh(l / c); 0 for none.
        scaled, unscaled, biased: as in ``Model``, by short names.
        scales_pictures: whether ``embedding_scale`` applies to rows of pictures, too.
        both_ways: layers in which the rows of a picture see each other, where its encoder wants that: "all" or "sliding".
        deepstack: first layers to whose outputs rows of pictures are added.
        no_pictures: why prompts with pictures are not computed, in one sentence; empty where they are.
        unused: tensors of the file that no graph uses, with the reason.
        mtp: the MTP layers after the last one. ``drafting_layers``: why the target does not use them. ``mtp_before_norm``: they read the hidden state
            before output_norm.
    """

    scales_borrowed_embedding = (
        False  # whether a drafter without a scale of its own scales the embedding that it borrows, as the target does
    )
    weights: Weights

    def __init__(
        self,
        f: Hparams,
        layers: Sequence[Layer],
        *,
        window: int = 0,
        chunked: bool = False,
        layer_norms: bool = False,
        norm_biases: bool = False,
        output_norm: str = "output_norm",
        long_from: int = 0,
        temperature: tuple[float, int] = (0.0, 0),
        temperature_from: int = 0,
        embedding_scale: float = 1.0,
        norm_embedding: bool = False,
        logit_scale: float = 1.0,
        softcap: float = 0.0,
        scaled: tuple[str, ...] = SCALED,
        unscaled: Sequence[str] = (),
        biased: tuple[str, ...] = (),
        scales_pictures: bool = True,
        both_ways: str = "all",
        deepstack: int = 0,
        no_pictures: str = "",
        unused: Mapping[str, str] = {},
        mtp: Sequence[Layer] = (),
        mtp_before_norm: bool = False,
        drafting_layers: str = "an MTP layer, which drafts for targets of other architectures only",
    ) -> None:
        self.f, self.file, self.arch, self.layers = f, f.file, f.arch, tuple(layers)
        self.n_embd, self.n_layer, self.n_vocab, self.context_length = f.n_embd, f.n_layer, f.n_vocab, f.context_length
        self.eps, self.window, self._output_norm = f.layer_norm_eps if layer_norms else f.eps, window, output_norm
        self.norm_embedding, self.layer_norms, self.norm_biases = norm_embedding, layer_norms, norm_biases
        self.long_from, self.temperature, self.temperature_from, self.chunked = long_from, temperature, temperature_from, chunked
        self.embedding_scale, self.logit_scale, self.softcap = embedding_scale, logit_scale, softcap
        self.scaled, self.unscaled, self.biased, self._unused = scaled, frozenset(unscaled), biased, unused
        self.mtp, self.mtp_before_norm, self._drafting_layers = tuple(mtp), mtp_before_norm, drafting_layers
        self.scales_pictures, self.both_ways, self.deepstack, self.no_pictures = scales_pictures, both_ways, deepstack, no_pictures
        parts = [part for layer in self.layers for part in layer.parts]
        self.by_axis = any(rope.sections for part in parts if (rope := getattr(part, "rope", None)) is not None)
        self.ggml_attention = next((part.ggml_attention for part in parts if part.ggml_attention), "")
        self.experts: Experts | None = next((part.experts for part in parts if part.experts), None)
        self._owners = [i for i, layer in enumerate(self.layers) if layer.mixer.kv is not None]
        self._recurrent = [i for i, layer in enumerate(self.layers) if layer.mixer.recurrent is not None]
        self.narrow = all(layer.mixer.narrow for layer in self.layers if layer.mixer.kv is not None and not layer.mixer.sliding)

    @property
    def rope(self) -> Rope | None:
        """RoPE of the first full-attention layer that has one."""
        full = (layer.mixer for layer in self.layers if not layer.mixer.sliding)
        return next((rope for mixer in full if (rope := getattr(mixer, "rope", None)) is not None), None)

    # -- tensors

    def tensors(self) -> list[Spec]:
        embedding = self.n_embd, self.n_vocab
        out = [
            Spec("token_embd.weight", embedding, ROWS),
            Spec(
                "output_norm.weight", embedding[:1], VECTOR, f"{self._output_norm}.weight" if self._output_norm != "output_norm" else None
            ),
            Spec("output.weight", embedding, MATMUL, None if "output.weight" in self.file.tensors else "token_embd.weight"),
        ]
        out += [s for i, layer in enumerate(self.layers) for s in layer.tensors(self.f, f"blk.{i}.")]
        if self.norm_biases:
            norms = ["output_norm", *(f"blk.{i}.{name}" for i, layer in enumerate(self.layers) for name in layer.norms)]
            out += [Spec(f"{name}.bias", embedding[:1], VECTOR) for name in norms]
        attention = [m for m in (layer.mixer for layer in self.layers) if isinstance(m, Attention)]
        n_rot = max((m.rope.n_rot for m in attention if m.rope is not None), default=0)  # layers that rotate less use the first ones
        tables = [name for name in ((ROPE_LONG, ROPE_SHORT) if self.long_from else (ROPE_FREQS,)) if name in self.file.tensors]
        return out + [Spec(name, (n_rot // 2,), VECTOR) for name in tables if any(m.factors for m in attention)]

    def is_long(self, n_ctx: int) -> bool:
        """Whether ROPE_LONG applies to contexts of ``n_ctx`` tokens."""
        return 0 < self.long_from < n_ctx

    def unused(self) -> dict[str, str]:
        found = {"cls.output.weight": "the head of a reranker, which generates no text", **self._unused}
        for i, layer in enumerate(self.layers):
            for part in layer.parts:
                found |= part.unused(self.f, f"blk.{i}.")
        drafting = tuple(f"blk.{i}." for i in range(self.n_layer, self.f.n_block))
        return found | {name: self._drafting_layers for name in self.file.tensors if drafting and name.startswith(drafting)}

    def groups(self) -> dict[str, tuple[str, ...]]:
        return {name: members for i, layer in enumerate(self.layers) for name, members in layer.groups(self.f, f"blk.{i}.").items()}

    def fused_alike(self) -> list[tuple[str, ...]]:
        """Groups with the same number of fused matrices: the recurrent state has one row width for all layers."""
        kept = tuple(f"blk.{i}.{group}" for i in self._recurrent if (group := self.layers[i].mixer.kept_group))
        return [kept] if kept else []

    # -- caches

    def kv_shapes(self) -> list[KVShape]:
        return [shape for layer in self.layers if (shape := layer.mixer.kv) is not None]

    def recurrent_shape(self) -> RecurrentShape | None:
        return next((layer.mixer.recurrent for layer in self.layers if layer.mixer.recurrent), None)

    def recurrent_row(self, first: int = 0) -> int:
        """Floats per projected row in the recurrent states, from layer ``first`` on."""
        i = next((i for i in self._recurrent if i >= first), None)
        if i is None:
            return 0
        mixer = self.layers[i].mixer
        return mixer.row(self.weights.group(f"blk.{i}.{mixer.kept_group}") if mixer.kept_group else None)

    def caches_before(self, layer: int) -> tuple[int, int]:
        """Number of K/V caches and of recurrent states of the layers before ``layer``."""
        return sum(i < layer for i in self._owners), sum(i < layer for i in self._recurrent)

    def last_cut(self) -> int:
        """The last layer at which a split may begin: some layers read caches of earlier ones."""
        return self.n_layer - 1

    # -- the graph

    def embed(self, g: Graph, tokens: Tensor) -> Tensor:
        return g.rows(self.weights["token_embd.weight"], tokens)

    def forward(self, g: Graph, rows: TargetInputs, capture: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Adds all layers. Returns (F32 [n_embd, T] normalised for the head, captured hidden states).

        A value v in ``capture`` is the input of layer v (the output of layer v - 1); v = n_layer is the last layer's output.
        """
        x = self.embed(g, rows.tokens)
        x = rows.pictures.mixed(g, x) if rows.pictures is not None and self.scales_pictures else x
        x = g.scale(x, self.embedding_scale) if self.embedding_scale != 1 else x
        x = rows.pictures.mixed(g, x) if rows.pictures is not None and not self.scales_pictures else x
        x = g.rms_norm(x, None, self.eps) if self.norm_embedding else x
        extra, captured, x = self.extra(g, x, rows.tokens), {}, self.widened(g, x)
        for i, layer in enumerate(self.layers):
            rows, x, extra = rows.at(i, x, extra if layer.reads_extra else None)
            captured[i] = x
            c = self._context(g, rows, i, extra)
            x = layer(c, x)
            extra = c.extra
            if rows.pictures is not None and i < self.deepstack:
                x = g.add(x, rows.pictures.part(g, i + 1, self.n_embd))
        captured[self.n_layer] = x
        return g.name(self.normed(g, x, extra), "result_norm"), [self.feature(g, captured[v]) for v in capture]

    def widened(self, g: Graph, x: Tensor) -> Tensor:
        """What the first layer reads, of the embedding F32 [n_embd, T]."""
        return x

    def normed(self, g: Graph, x: Tensor, extra: Tensor | None) -> Tensor:
        """What the head reads, F32 [n_embd, T], of the last layer's output and ``extra``."""
        return any_norm(g, self.weights, "output_norm", x, self.eps, self.layer_norms)

    def feature(self, g: Graph, x: Tensor) -> Tensor:
        """What drafters read of a layer's input, F32 [n_embd, T]."""
        return x

    def extra(self, g: Graph, x: Tensor, tokens: Tensor) -> Tensor | None:
        """The ``extra`` tensor for layer 0."""
        return None

    def _context(self, g: Graph, rows: TargetInputs, i: int, extra: Tensor | None) -> LayerContext:
        attention = rows.sliding if self.layers[i].mixer.sliding else rows
        caches = dict(zip(self._owners, rows.kv, strict=True))
        state = self._recurrent.index(i) if i in self._recurrent else 0
        factors = (ROPE_LONG if self.is_long(rows.n_ctx) else ROPE_SHORT) if self.long_from else ROPE_FREQS
        return LayerContext(
            g, self.weights, i, self.eps, rows.positions, attention, caches, rows.delta, state, extra, self.layer_norms,
            self.weights.get(factors), rows.q_scale,
        )  # fmt: skip

    def logits(self, g: Graph, hidden: Tensor, tokens: int = 0) -> Tensor:
        """F32 [n_embd, T] -> F32 [n_vocab, T]; only of the first ``tokens`` unless 0."""
        out = head_product(g, self.weights.matrix("output.weight"), hidden, tokens)
        return g.soft_cap(g.scale(out, self.logit_scale) if self.logit_scale != 1 else out, self.softcap)
