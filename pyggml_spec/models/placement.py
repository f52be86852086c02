"""Which routed experts are on the device and which in host memory, and the routing statistics that this is decided by."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from ..gguf_io import GGUFFile
from ..gguf_io.reader import brief

FORMAT = "pyggml_spec experts 1"
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|down|gate_up)_exps\.\w+")


@dataclass(frozen=True)
class Placement:
    """``hot``: by layer, the experts that the device has, in their order there; a layer that is not named has all of them as always.

    ``n_layer``, ``n_used``, ``glu``: layers of the model, experts per token, and how they gate; ``rows``: rows of the widest step. ``pinned``: those
    of the host are to be where the device copies fastest from. ``kernels``: of the CPU that computes those of the host, which determines their rounding.
    """

    hot: dict[int, tuple[int, ...]]
    n_layer: int
    n_used: int
    glu: str
    rows: int = 512
    pinned: bool = False
    kernels: str = ""

    def within(self, first: int, end: int) -> "Placement":
        """The part of it for the layers ``first`` to ``end`` - 1."""
        return replace(self, hot={layer: hot for layer, hot in self.hot.items() if first <= layer < end})

    def description(self, target: Any) -> str:
        """One line for people."""
        n_expert, layers = target.experts.n_expert, routed_layers(target)
        whole = sum(not hot for hot in self.hot.values())
        parts = [f"all experts of {whole} of {len(layers)} layers in host memory"] if whole else []
        if partly := [len(hot) for hot in self.hot.values() if 0 < len(hot) < n_expert]:
            parts.append(f"the hottest {partly[0]} of {n_expert} experts of {len(partly)} layers on the device, the others in host memory")
        return "; ".join(parts) or "the choices of the routers are counted"


@dataclass(frozen=True)
class Routing:
    """How often each expert was chosen: ``counts`` I64 [n_expert] by layer, over ``tokens`` tokens of some text."""

    model: str
    tokens: int
    counts: dict[int, np.ndarray]

    def hottest(self, layer: int, count: int) -> tuple[int, ...]:
        """The ``count`` experts of ``layer`` that were chosen most, most often first; the lower number of two that are equal."""
        return tuple(int(i) for i in np.argsort(-self.counts[layer], kind="stable")[:count])

    def hit_rate(self, fraction: float, other: "Routing | None" = None) -> float:
        """Share of the choices that have their expert on the device with this fraction of the experts there: of ``other``, or its own."""
        counts = (other or self).counts
        hits = sum(int(row[list(self.hottest(layer, hot_count(fraction, len(row))))].sum()) for layer, row in counts.items())
        return hits / max(1, sum(int(row.sum()) for row in counts.values()))

    def __sub__(self, other: "Routing") -> "Routing":
        return Routing(self.model, self.tokens - other.tokens, {layer: row - other.counts[layer] for layer, row in self.counts.items()})

    def to_json(self) -> str:
        layers = {str(layer): [int(n) for n in row] for layer, row in self.counts.items()}
        return json.dumps({"format": FORMAT, "model": self.model, "tokens": self.tokens, "layers": layers}) + "\n"

    @classmethod
    def read(cls, path: Path, n_expert: int, layers: Sequence[int]) -> "Routing":
        """Reads a profile made for a model with these routed layers.

        Raises:
            ModelError: no such file, not a profile, or one of another model.
        """
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelError(
                f"there is no routing profile {path}; make one of your own text: pyspec experts profile -m MODEL -f TEXT -o {path}"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"the routing profile {path} cannot be read: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("layers"), dict):
            raise ModelError(f"{path} is not a routing profile of this version; make it again with pyspec experts profile")
        counts = {}
        for layer in layers:
            row = data["layers"].get(str(layer))
            if not isinstance(row, list) or len(row) != n_expert or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in row):
                raise ModelError(
                    f"the routing profile {path} does not fit: layer {layer} should have {n_expert} counts; it was made with {brief(data.get('model'))}"
                )
            counts[layer] = np.array(row, np.int64)
        tokens = data.get("tokens")
        return cls(str(data.get("model")), tokens if isinstance(tokens, int) else 0, counts)


@dataclass(frozen=True)
class ExpertOptions:
    """Requested placement.

    Attributes:
        host_layers: the first so many routed layers keep all experts in host memory; -1 all layers.
        residency: fraction of the experts of the other layers that is on the device, hottest first; None all of them.
        profile: routing profile that says which are hot; None: the model's path with `.experts.json` appended.
        count: counts what routers choose also where every expert is on the device.
        layers: these layers keep all experts in host memory too.
    """

    host_layers: int = 0
    residency: float | None = None
    profile: Path | None = None
    count: bool = False
    layers: tuple[int, ...] = ()

    def placement(self, target: Any, rows: int = 512, pinned: bool = False) -> Placement:
        """Where the experts of ``target`` go; ``rows`` and ``pinned`` as of ``Placement``.

        Raises:
            ModelError: the model routes nothing, a fraction outside [0, 1], or a profile that is missing or does not fit.
        """
        experts, layers = getattr(target, "experts", None), routed_layers(target)
        if experts is None or not layers:
            raise ModelError(f"{target.file.path.name} has no routed experts, so none can be in host memory")
        if any(part.experts and (part.experts.limit or not part.experts.gated) for layer in target.layers for part in layer.parts):
            raise ModelError(
                f"{target.file.path.name} has experts without a gate, or with limited values, which cannot be in host memory; keep all on the device"
            )
        if self.residency is not None and not 0.0 <= self.residency <= 1.0:
            raise ModelError(f"an expert residency of {self.residency:g} is impossible; give a fraction from 0 to 1")
        if self.host_layers < -1:
            raise ModelError(f"{self.host_layers} layers with experts in host memory are impossible; give 0 or more")
        hosted = layers if self.host_layers == -1 else layers[: self.host_layers]
        hosted = [layer for layer in layers if layer in hosted or layer in self.layers]
        hot: dict[int, tuple[int, ...]] = dict.fromkeys(hosted, ())
        count = hot_count(1.0 if self.residency is None else self.residency, experts.n_expert)
        others = [layer for layer in layers if layer not in hot]
        if count == 0:
            hot |= dict.fromkeys(others, ())
        elif count < experts.n_expert and others:
            path = self.profile or Path(f"{target.file.path}.experts.json")
            routing = Routing.read(path, experts.n_expert, others)
            hot |= {layer: routing.hottest(layer, count) for layer in others}
        elif self.count:
            hot |= dict.fromkeys(others, tuple(range(experts.n_expert)))
        return Placement(hot, target.n_layer, experts.n_used, experts.glu, rows, pinned)


def overridden(file: GGUFFile, overrides: Sequence[tuple[str, str]]) -> tuple[int, ...]:
    """The layers whose experts llama.cpp's `--override-tensor` puts into host memory: (pattern, buffer) each, the first that is found in a name counts.

    Raises:
        ModelError: a pattern that is no regular expression, a buffer that is not the CPU's, or tensors that cannot be in host memory alone.
    """
    hosted: dict[int, set[str]] = {}
    try:
        compiled = [(re.compile(pattern), pattern, buffer) for pattern, buffer in overrides]
    except re.error as error:
        raise ModelError(f"a pattern of `override_tensor` is no regular expression: {error}") from None
    for name in file.tensors:
        _, pattern, buffer = next((found for found in compiled if found[0].search(name)), (None, "", ""))
        if not buffer:
            continue
        if buffer.upper() != "CPU":
            raise ModelError(
                f"`override_tensor` {pattern}={buffer}: tensors can be moved to the CPU only; layers go to other devices with `device` and `tensor_split`"
            )
        if (part := _EXPERTS.fullmatch(name)) is None:
            raise ModelError(
                f"`override_tensor` {pattern}={buffer} would move {name!r} to the CPU, and only the routed experts of whole layers can be moved alone"
            )
        hosted.setdefault(int(part[1]), set()).add(name)
    for layer, names in hosted.items():
        experts = [name for name in file.tensors if (part := _EXPERTS.fullmatch(name)) is not None and int(part[1]) == layer]
        if left := [name for name in experts if name not in names]:
            raise ModelError(
                f"`override_tensor` moves some experts of layer {layer} to the CPU, but not {left[0]!r}; a layer's experts are moved together"
            )
    if not hosted:
        raise ModelError(f"`override_tensor` moves nothing: no tensor of {file.path.name} has a name in which a pattern is found")
    return tuple(sorted(hosted))


def hot_count(fraction: float, n_expert: int) -> int:
    """How many of ``n_expert`` experts a fraction is, rounded to the nearest."""
    return min(n_expert, int(fraction * n_expert + 0.5))


def routed_layers(target: Any) -> list[int]:
    """Layers of ``target`` whose file has experts."""
    return [i for i in range(target.n_layer) if f"blk.{i}.ffn_down_exps.weight" in target.file.tensors]
