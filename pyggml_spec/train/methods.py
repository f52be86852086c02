"""Losses and simulated acceptance of drafters: blocks (DFlash) and chains (EAGLE-3, MTP), through the graphs of ``drafters``.

Earlier drafts of an accepted block or chain are right, so training and validation read the true tokens: both are exact.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..drafters.base import TOKEN_MAP, ChainInputs, ContextInputs, Drafter
from ..drafters.dflash import BlockInputs, DFlash
from ..drafters.mtp import MTP
from ..errors import ModelError
from ..models.base import AttentionInputs
from .features import NOTHING, States, Target, visible
from .ops import Ops, caches, empty, node

FADE = 0.8  # weight of each further draft of a chain
CHUNK_VALUES = {"cuda": 1 << 28, "cpu": 1 << 25}  # logits at once
ANCHORS_AT_ONCE = 32  # of a text, in validation


@dataclass(frozen=True)
class Batch:
    """``tokens`` I64 [B, T], padded; each text's answer is from ``first`` to ``length``, I64 [B]. ``states``: of the target, if they are kept."""

    tokens: Tensor
    first: Tensor
    length: Tensor
    states: States | None = None


class Method:
    """What is trained. ``drafter`` has torch weights; embedding and head may be the target's."""

    def __init__(self, drafter: Any, target: Target) -> None:
        self.drafter, self.target, self.decoder = drafter, target, target.decoder
        self.ops: Any = Ops()
        tokens = drafter.weights.get(TOKEN_MAP)
        self._tokens: Tensor | None = tokens.value.flatten() if tokens is not None else None

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    def matched(self, batch: Batch) -> Tensor:
        """I64 [B, T]: how many drafts of a block whose last token is at each position equal the text."""
        raise NotImplementedError

    @property
    def drafts(self) -> int:
        """The most drafts of a step."""
        return self.drafter.block_size - 1

    def _logits(self, rows: Tensor, number: int = 0) -> Tensor:
        """[N, n_embd] -> [N, head outputs]."""
        return self.drafter.draft_logits(self.ops, node(rows[None]), self.decoder, number).value[0]

    def _chosen(self, rows: Tensor, number: int = 0) -> Tensor:
        """Argmaxes as the target's tokens, of [..., n_embd]."""
        flat = rows.reshape(-1, rows.shape[-1])
        size = _rows_at_once(flat, self._outputs)
        ids = torch.cat([self._logits(part, number).argmax(-1) for part in flat.split(size)]).reshape(rows.shape[:-1])
        return ids if self._tokens is None else self._tokens[ids]

    @property
    def _outputs(self) -> int:
        return self.decoder.n_vocab if self._tokens is None else len(self._tokens)

    def _states(self, batch: Batch) -> States:
        return batch.states if batch.states is not None else self.target.states(batch.tokens)

    def _head_loss(self, rows: Tensor, labels: Tensor, likely: Tensor, odds: Tensor, weight: Tensor, number: int = 0) -> Tensor:
        """The weighted sum over rows [N, n_embd] of half the distance from ``labels`` I64 [N] and half of that from the target's distribution, ``odds`` of
        the ``likely`` tokens [N, n].

        Gradients are computed with the values, a chunk at a time: logits of a whole batch are too large to be kept."""
        if self._tokens is not None:  # tokens that the reduced vocabulary lacks cannot be learnt
            known, labels = self._reduced(labels)
            weight = weight * known
            known, likely = self._reduced(likely)
            odds = odds * known
            odds = odds / odds.sum(-1, keepdim=True).clamp(min=1e-9)
        odds, total, size = odds.float(), rows.new_zeros((), dtype=torch.float32), _rows_at_once(rows, self._outputs)
        gradient = torch.empty_like(rows)
        for at in range(0, len(rows), size):
            part = rows[at : at + size].detach().requires_grad_()
            logits = self._logits(part, number)
            with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
                p, y, ids, q, w = logits.softmax(-1), *(x[at : at + size] for x in (labels[:, None], likely, odds, weight[:, None]))
                known = p.gather(-1, torch.cat([y, ids], -1)).float().clamp(min=1e-30).log()
                total -= 0.5 * (w * (known[:, :1] + (q * known[:, 1:]).sum(-1, keepdim=True))).sum()
                p.mul_(0.5 * w * (1 + q.sum(-1, keepdim=True)))
                p.scatter_add_(-1, y, (-0.5 * w).to(p.dtype)).scatter_add_(-1, ids, (-0.5 * w * q).to(p.dtype))
            logits.backward(p)
            gradient[at : at + size] = part.grad
        return _Given.apply(rows, gradient, total)

    def _reduced(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which of ``tokens`` the reduced vocabulary has, and where."""
        assert self._tokens is not None
        at = torch.searchsorted(self._tokens, tokens).clamp(max=len(self._tokens) - 1)
        return self._tokens[at] == tokens, at


class _Given(torch.autograd.Function):
    """A value of rows whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * outer, None, None


def _rows_at_once(rows: Tensor, outputs: int) -> int:
    return max(1, CHUNK_VALUES.get(rows.device.type, 1 << 25) // outputs)


class Blocks(Method):
    """DFlash: blocks at random anchors of the answers, all of a text in one pass."""

    def __init__(self, drafter: Any, target: Target, anchors: int = 32) -> None:
        super().__init__(drafter, target)
        self.anchors, width = anchors, drafter.block_size
        self._fade = torch.exp(-torch.arange(width - 1) / 4.0)  # by position

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        tokens, width, device = batch.tokens, self.drafter.block_size, batch.tokens.device
        share = torch.rand(len(tokens), self.anchors, generator=generator, device=device)
        anchors = batch.first[:, None] + (share * (batch.length - 1 - batch.first)[:, None]).long()
        # a caller that wants few drafts must not pay for a full block: narrower ones are drafted too
        odds = torch.tensor([0.7, 0.2, 0.1], device=device)
        kind = torch.multinomial(odds, anchors.numel(), True, generator=generator).reshape(anchors.shape)
        widths = (width >> kind).clamp(min=2)
        states = self._states(batch)
        rows = self._rows(tokens, anchors, widths, self._context(states))[:, :, 1:]
        at = anchors[..., None] + torch.arange(1, width, device=device)
        live = (at < batch.length[:, None, None]) & (torch.arange(1, width, device=device) < widths[..., None])
        weight, at = self._fade.to(device) * live, at.clamp(max=tokens.shape[1] - 1)
        here = torch.arange(len(tokens), device=device)[:, None, None]
        keep = live.flatten()
        likely, odds = (x[here, at - 1].flatten(0, 2)[keep] for x in (states.likely, states.odds))
        return self._head_loss(
            rows.flatten(0, 2)[keep], tokens[here, at].flatten()[keep], likely, odds, (weight / weight.sum()).flatten()[keep]
        )

    def _context(self, states: States) -> Any:
        """Caches with the rows of all tokens."""
        batch, length = states.hidden.shape[:2]
        kv, at = caches(self.drafter.kv_shapes(), empty(batch, states.hidden)), torch.arange(length, device=states.hidden.device)[None]
        features = [node(f) for f in states.features]
        self.drafter.context_rows(self.ops, ContextInputs(None, features, None, node(at), NOTHING), kv, self.decoder)
        return kv

    def _rows(self, tokens: Tensor, anchors: Tensor, widths: Tensor, kv: Any) -> Tensor:
        """Hidden states of the blocks at ``anchors`` [B, A], before the head: [B, A, width, n_embd]. ``kv`` has the context's rows, and then the blocks', too."""
        (b, count), width, device = anchors.shape, self.drafter.block_size, tokens.device
        offset = torch.arange(width, device=device)
        blocks = tokens.new_full((b, count, width), self.drafter.hp.mask_token)
        blocks[:, :, 0] = tokens.gather(1, anchors)
        positions, owner = (anchors[..., None] + offset).flatten(1), torch.arange(count, device=device).repeat_interleave(width)
        first, context = anchors.repeat_interleave(width, 1)[..., None], torch.arange(tokens.shape[1], device=device)
        same = owner[:, None] == owner[None]
        of_block = same[None] & (offset < widths[..., None]).flatten(1)[:, None]
        of_block = of_block | torch.eye(count * width, dtype=torch.bool, device=device)  # rows that are not in use see themselves
        before = offset.repeat(count)[:, None] >= offset.repeat(count)[None]
        layers, masks = [*zip(self.drafter.hp.causal, self.drafter.hp.window, strict=True)], dict[tuple[bool, int], Any]()
        for causal, window in dict.fromkeys(layers):
            seen = context < first
            seen = seen & (context > positions[..., None] - window) if window else seen
            masks[causal, window] = node(torch.cat([seen, of_block & before if causal else of_block], -1))
        columns = len(context) + count * width
        attention = tuple(AttentionInputs(NOTHING, masks[layer], columns) for layer in layers)
        rows = BlockInputs(node(blocks.flatten(1)), node(positions), attention, kv)
        return self.drafter.denoise(self.ops, rows, self.decoder).value.unflatten(1, (count, width))

    @torch.no_grad()
    def matched(self, batch: Batch) -> Tensor:
        tokens, width, device = batch.tokens, self.drafter.block_size, batch.tokens.device
        kv, out = self._context(self._states(batch)), torch.zeros_like(tokens)
        context = [(cache, cache.value) for layer in kv for cache in layer[:2]]
        for at in torch.arange(int(batch.first.min()), int(batch.length.max()) - 1, device=device).split(ANCHORS_AT_ONCE):
            anchors = at.expand(len(tokens), -1)
            for cache, rows in context:
                cache.value = rows
            drafts = self._chosen(self._rows(tokens, anchors, torch.full_like(anchors, width), kv)[:, :, 1:])
            places = at[:, None] + torch.arange(1, width, device=device)
            right = drafts == tokens[:, places.clamp(max=tokens.shape[1] - 1)]
            right &= places < batch.length[:, None, None]
            out[:, at] = right.int().cumprod(-1).sum(-1)
        return out


class Chains(Method):
    """EAGLE-3 and MTP: a chain of drafts begins at every token, each from the hidden state of the one before it."""

    def __init__(self, drafter: Any, target: Target, drafts: int = 5) -> None:
        super().__init__(drafter, target)
        self._drafts = min(drafts, drafter.block_size - 1)

    @property
    def drafts(self) -> int:
        return self._drafts

    def _steps(self, batch: Batch, states: States) -> Any:
        """The input of the head [B, T, n] of each draft of the chains that begin at 0, 1, ..."""
        d, tokens, device = self.drafter, batch.tokens, batch.tokens.device
        b, length = tokens.shape
        features = [node(f) for f in states.features]
        before = F.pad(d.carry(self.ops, node(states.hidden), features, self.decoder).value[:, :-1], (0, 0, 1, 0))
        kv, at = caches(d.kv_shapes(), empty(b, states.hidden)), torch.arange(length, device=device)
        own = torch.eye(length, dtype=torch.bool, device=device)
        seen = visible(at, at, d.window)
        if d.position_lag:
            seen = (seen & (at > 0)) | own  # the first token has no row
        for i in range(self._drafts):
            mask = node(torch.cat([seen] + [own] * i, 1)[None])
            attention = AttentionInputs(NOTHING, mask, mask.value.shape[-1])
            token, position = node(F.pad(tokens[:, i:], (0, i))), node((at + i - d.position_lag).clamp(min=0)[None])
            rows = ChainInputs(token, node(before), position, attention, kv, attention, i, self._drafts)
            head, carry = d.step(self.ops, rows, self.decoder)
            before = carry.value
            yield i, head.value

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        states, tokens = self._states(batch), batch.tokens
        at, total = torch.arange(tokens.shape[1], device=tokens.device), tokens.new_zeros((), dtype=torch.float32)
        weights = sum(FADE**i for i in range(self._drafts))
        for i, rows in self._steps(batch, states):
            live = (at >= batch.first[:, None]) & (at + i + 1 < batch.length[:, None])
            keep, weight = live.flatten(), FADE**i / weights / live.sum().clamp(min=1)
            labels, likely, odds = (
                F.pad(x[:, first:], (0, 0) * (x.dim() - 2) + (0, first)).flatten(0, 1)[keep]
                for x, first in ((tokens, i + 1), (states.likely, i), (states.odds, i))
            )
            rows = rows.flatten(0, 1)[keep]
            total = total + self._head_loss(rows, labels, likely, odds, weight.expand(len(rows)), i)
        return total

    @torch.no_grad()
    def matched(self, batch: Batch) -> Tensor:
        tokens, at = batch.tokens, torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        right, out = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
        for i, rows in self._steps(batch, self._states(batch)):
            right = right & (self._chosen(rows, i) == F.pad(tokens[:, i + 1 :], (0, i + 1))) & (at + i + 1 < batch.length[:, None])
            out += right
        return out


def method_of(drafter: Drafter, target: Target) -> Method:
    """Raises ModelError: a kind of drafter that is not trained here."""
    if type(drafter) is DFlash:
        return Blocks(drafter, target)
    if drafter.chained and not drafter.parallel and not drafter.shares_kv and (not isinstance(drafter, MTP) or drafter.n_layer == 1):
        return Chains(drafter, target)
    raise ModelError(
        f"{drafter.title} drafts by {drafter.method}, whose training is not supported; DFlash, EAGLE-3 and single MTP layers are"
    )


def simulate(matched: np.ndarray, first: int, length: int, drafts: int) -> list[int]:
    """Walks the speculative loop over a text: how many drafts each step would have accepted. ``matched`` I64 [T] as of ``Method.matched``.

    The target's text does not depend on the drafts, so that walking its finished text gives the steps that the loop would have taken.
    """
    steps, at = [], first
    while at < length - 1:
        steps.append(min(int(matched[at]), drafts))
        at += 1 + steps[-1]
    return steps
