"""Routed experts (mixture of experts): a router selects a few small FFNs per token.

    p = softmax(W_r x) or sigmoid(W_r x);  chosen = the n_used largest of p (+ bias);  w = p[chosen], divided by its sum, times a scale
    with groups: only experts of the groups with the largest sums of their two largest p (+ bias)
    or p = W_r x + b_r;  chosen = the n_used largest of p;  w = softmax(p[chosen])
    result = sum over chosen of w * FFN_e(x), whose three products may each have a bias
The order of nodes is that of llama.cpp's build_moe_ffn: ggml-cuda fuses the router by pattern, and bit-equality depends on the order of additions.
Expert matrices are [n_in, n_out, n_expert].
"""

from contextlib import nullcontext
from dataclasses import dataclass

from ..ggml.graph import Graph, require
from ..ggml.library import Tensor
from ..gguf_io import GGUFFile
from .weights import EXPERTS, MATMUL, VECTOR, Spec, Weights

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # values of `expert_gating_func`
SMALLEST_SUM = 6.103515625e-5  # smallest normal F16 number: llama.cpp's lower bound of the sum of weights


@dataclass(frozen=True)
class Experts:
    """``n_used`` of ``n_expert`` FFNs with hidden size ``n_ff`` per token.

    Attributes:
        gating: SOFTMAX, SIGMOID or SOFTMAX_OF_CHOSEN.
        normalise, scale: divide the weights by their sum; multiply them.
        glu: the method of ``Graph`` that combines gate and up, or of up alone unless ``gated``; ``limit``: see ``Graph.swiglu_limited``, 0 for none;
            ``clamps``: see ``Graph.swiglu_clamped`` instead.
        weighted_input: weights are applied to the experts' inputs, and logits choose.
        situ: the two numbers of ``Graph.situ``, which combines gate and up then.
        biased: `exp_probs_b` is added for the selection, not to the weights.
        biases: the router and all expert products have a bias.
        groups, groups_used: experts are limited to the best groups; 1 of 1 for no limit.
    """

    n_expert: int
    n_used: int
    n_ff: int
    gating: int = SOFTMAX
    normalise: bool = True
    scale: float = 1.0
    glu: str = "swiglu"
    gated: bool = True
    limit: float = 0.0
    clamps: bool = False
    situ: tuple[float, float] | None = None
    weighted_input: bool = False
    biased: bool = False
    biases: bool = False
    groups: int = 1
    groups_used: int = 1

    def specs(self, file: GGUFFile, prefix: str, n_embd: int) -> list[Spec]:
        """Tensors of the layer ``prefix``; gate and up may be one tensor in the file."""
        out = [
            Spec(f"{prefix}ffn_gate_inp.weight", (n_embd, self.n_expert), MATMUL),
            Spec(f"{prefix}ffn_down_exps.weight", (self.n_ff, n_embd, self.n_expert), EXPERTS),
        ]
        if f"{prefix}ffn_gate_up_exps.weight" in file.tensors and not self.biases:
            out.append(Spec(f"{prefix}ffn_gate_up_exps.weight", (n_embd, 2 * self.n_ff, self.n_expert), EXPERTS))
        else:
            names = ("gate", "up") if self.gated else ("up",)
            out += [Spec(f"{prefix}ffn_{name}_exps.weight", (n_embd, self.n_ff, self.n_expert), EXPERTS) for name in names]
        if self.biased:
            plain = f"{prefix}exp_probs_b"  # as hy_v3's files have it
            out.append(Spec(f"{plain}.bias", (self.n_expert,), VECTOR, plain if plain in file.tensors else None))
        for spec in out if self.biases else ():
            out = [*out, Spec(spec.name.removesuffix("weight") + "bias", spec.shape[1:], VECTOR, of=spec.name)]
        return out

    def __call__(self, g: Graph, w: Weights, prefix: str, x: Tensor, logits: Tensor | None = None) -> Tensor:
        """x F32 [n_embd, T] -> F32 [n_embd, T]; ``logits`` F32 [n_expert, T] replace the router's."""
        layer, router = int(prefix.split(".")[1]), f"{prefix}ffn_gate_inp.weight"
        if logits is None:
            logits, (_, bias) = g.matmul(w[router], x), w.companions(router)
            logits = logits if bias is None else g.add(logits, bias)
        weights, chosen = self._route(g, w, prefix, logits)
        # first, so that ggml-cuda finds the router's nodes adjacent
        g.expand(weights)
        if self.weighted_input and self.n_used == 1:
            x = g.mul(x, g.reshape(weights, 1, x.ne[1]))
        elif self.weighted_input:
            require(w.host_experts is None, "weighted_input", used=self.n_used)  # which have one input per token
            x = g.mul(g.repeat(g.reshape(x, x.ne[0], 1, x.ne[1]), x.ne[0], self.n_used, x.ne[1]), weights)
        streamed = w.streaming and w.stream is not None and layer in w.stream.layers
        with w.arrived(g, layer) if streamed else nullcontext():
            if w.host_experts is not None and layer in w.host_experts and not streamed:
                out = w.host_experts.run(g, layer, x, chosen, lambda slots: self._results(g, w, prefix, x, slots, chosen))
            else:
                out = self._results(g, w, prefix, x, chosen, chosen)
            out = self._scaled(g, w, f"{prefix}ffn_down_exps.weight", out, chosen)
            out = out if self.weighted_input else g.mul(out, weights)
            g.expand(out)
            total = self._sum(g, out)
            if streamed:  # the weighted sum, too: ggml-cuda fuses it within a part, with one rounding less
                g.expand(total)
        return total

    def _route(self, g: Graph, w: Weights, prefix: str, logits: Tensor) -> tuple[Tensor, Tensor]:
        """F32 [1, n_used, T] weights and I32 [n_used, T] chosen experts."""
        rows = logits.ne[1]
        p = g.softmax(logits) if self.gating == SOFTMAX else g.sigmoid(logits) if self.gating == SIGMOID else logits
        by = logits if self.weighted_input else g.add(p, w[f"{prefix}exp_probs_b.bias"]) if self.biased else p
        chosen = g.top_k(self._in_groups(g, by), self.n_used)
        weights = g.rows(g.reshape(p, 1, self.n_expert, rows), chosen)
        if self.gating == SOFTMAX_OF_CHOSEN:
            weights = g.reshape(g.softmax(g.reshape(weights, self.n_used, rows)), 1, self.n_used, rows)
        if self.normalise:
            flat = g.reshape(weights, self.n_used, rows)
            flat = g.div(flat, g.clamp(g.sum_rows(flat), SMALLEST_SUM, float("inf")))
            weights = g.reshape(flat, 1, self.n_used, rows)
        return (g.scale(weights, self.scale) if self.scale not in (0.0, 1.0) else weights), chosen

    def _in_groups(self, g: Graph, p: Tensor) -> Tensor:
        """p F32 [n_expert, T] with -inf for experts of unused groups."""
        if self.groups == 1:
            return p
        size, rows = self.n_expert // self.groups, p.ne[1]
        grouped = g.reshape(p, size, self.groups, rows)
        best = g.rows(g.reshape(grouped, 1, size, self.groups, rows), g.top_k(grouped, 2))
        sums = g.reshape(g.sum_rows(g.reshape(best, 2, self.groups, rows)), self.groups, rows)
        return g.reshape(g.fill_other_rows(grouped, g.top_k(sums, self.groups_used), float("-inf")), self.n_expert, rows)

    def _results(self, g: Graph, w: Weights, prefix: str, x: Tensor, slots: Tensor, chosen: Tensor) -> Tensor:
        """FFN_e(x) of the chosen experts at ``slots`` of the device's tensors, without scale and bias, F32 [n_embd, n_used, T]."""
        apart = self.weighted_input and self.n_used > 1  # an input for each expert
        hidden = self._hidden(g, w, prefix, x if apart else g.reshape(x, x.ne[0], 1, x.ne[1]), slots, chosen)
        return g.matmul_experts(w[f"{prefix}ffn_down_exps.weight"], hidden, slots)

    def _scaled(self, g: Graph, w: Weights, name: str, out: Tensor, chosen: Tensor) -> Tensor:
        """Products F32 [n, n_used, T] of the experts ``name`` with the file's per-expert scales and biases."""
        scale, bias = w.companions(name)
        if scale is not None:
            scales = g.repeat(g.reshape(scale, 1, self.n_expert, 1), 1, self.n_expert, chosen.ne[1])
            out = g.mul(out, g.rows(scales, chosen))
        return out if bias is None else g.add_rows(out, bias, chosen)

    def _hidden(self, g: Graph, w: Weights, prefix: str, x: Tensor, slots: Tensor, chosen: Tensor) -> Tensor:
        """act(W_gate x) * W_up x of the chosen experts, F32 [n_ff, n_used, T]."""
        if f"{prefix}ffn_gate_up_exps.weight" in w:
            both = g.matmul_experts(w[f"{prefix}ffn_gate_up_exps.weight"], x, slots)
            gate, up = g.slice(both, 0, 0, self.n_ff), g.slice(both, 0, self.n_ff, self.n_ff)
        else:
            names = [f"{prefix}ffn_{name}_exps.weight" for name in (("up", "gate") if self.gated else ("up",))]
            up, *gates = [self._scaled(g, w, name, g.matmul_experts(w[name], x, slots), chosen) for name in names]
            if not gates:
                return getattr(g, self.glu)(up)
            gate = gates[0]
        if self.situ:
            return g.situ(gate, up, *self.situ)
        if self.limit:
            return (g.swiglu_clamped if self.clamps else g.swiglu_limited)(gate, up, self.limit)
        # ggml's kernel, as for experts in host memory: the same bits on either side
        return g.gated(self.glu, gate, up, native=False)

    def _sum(self, g: Graph, out: Tensor) -> Tensor:
        """F32 [n_embd, n_used, T] -> F32 [n_embd, T], added in order; all views precede the additions."""
        parts = [g.pick(out, 1, i) for i in range(self.n_used)]
        for part in parts:
            g.expand(part)
        total = parts[0]
        for part in parts[1:]:
            total = g.add(total, part)
            g.expand(total)
        return g.cont(total) if self.n_used == 1 else total
