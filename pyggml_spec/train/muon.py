"""Muon for all matrices of a shape at once: torch.optim.Muon steps one after the other, whose launches take longer than the products of a small drafter."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM, EPS = 0.95, 1e-7
A, B, C = 3.4445, -4.775, 2.0315  # of the Newton-Schulz iteration, as in torch.optim.Muon
ITERATIONS, RMS = 5, 0.2  # an update has the root mean square of AdamW's


class Muon(torch.optim.Optimizer):
    """Steps as ``torch.optim.Muon(params, lr, decay, adjust_lr_fn="match_rms_adamw")`` does."""

    def __init__(self, params: Iterable[Tensor], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            alike = defaultdict[torch.Size, list[Tensor]](list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for shape, params in alike.items():
                grads, state = torch.stack([p.grad for p in params if p.grad is not None]), self.state[params[0]]
                momentum = state.setdefault("momentum", torch.zeros_like(grads))
                momentum.lerp_(grads, 1 - MOMENTUM)
                update = orthogonal(grads.lerp(momentum, MOMENTUM)).to(grads.dtype) * (-group["lr"] * RMS * max(shape) ** 0.5)
                torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(params, list(update))


def orthogonal(m: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly, of m [N, rows, columns], BF16."""
    x = m.bfloat16()
    x = x.mT if m.shape[-2] > m.shape[-1] else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if m.shape[-2] > m.shape[-1] else x
