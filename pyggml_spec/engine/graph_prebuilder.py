"""Builds graphs before their steps, on a GPU while it computes. On a CPU building takes as long whenever it is done, and many graphs of a text
are never needed: there, announced graphs are built when their steps come."""

from collections.abc import Sequence

from ..cache.kv import KV_BUCKET
from .batch import Batch, GraphKey
from .graph_cache import EXACT
from .graphs import StepGraphs, commit_key
from .resources import Resources

AHEAD = 64  # tokens, or a whole step, before a K/V bucket ends the graph of the next one is built


class GraphPrebuilder:
    """Attributes:
    overlaps: whether the host is free while the device computes.
    built: graphs built while the device computed.
    """

    def __init__(self, resources: Resources, graphs: StepGraphs) -> None:
        self._resources, self._graphs = resources, graphs
        self.overlaps, self.built = resources.backend.device.kind != "cpu", 0
        self._keys: tuple[GraphKey, ...] = ()  # expected steps, see prepare
        self._epoch = self._last_bucket = 0
        self._complete_to = -1  # tokens up to which every graph of the next bucket exists

    @property
    def _committed(self) -> int:
        return self._resources.slots[0].cursor.committed

    def _bucket(self, key: GraphKey) -> int:
        return self._resources.kv.bucket(self._committed + key.verify_len)

    def prepare(self, keys: Sequence[GraphKey], tokens: int) -> None:
        """Announces the graphs, whatever their bucket, of the steps that the next ``tokens`` tokens of the first slot take."""
        kv, graphs = self._resources.kv, self._graphs
        self._keys, self._epoch, self._last_bucket = tuple(keys), self._resources.epoch, kv.bucket(self._committed + tokens)
        self._complete_to = -1
        self._prepare_transitions(sorted({key.verify_len for key in keys}))
        if not self.overlaps:
            graphs.announced |= {key.family for key in keys}
            for key in keys:
                graphs.reserve(key)
            return
        ahead = min(tokens, KV_BUCKET // 4)
        for key in keys:
            bucket, last = 0, kv.bucket(self._committed + ahead + key.verify_len)
            while bucket < last:
                bucket = max(self._bucket(key), kv.bucket(bucket + 1))
                graphs.build(key.at(bucket))

    def _prepare_transitions(self, widths: Sequence[int]) -> None:
        """Announces the commit graphs between blocks of these widths, and from prompts into them: ten nodes each."""
        graphs, recurrent = self._graphs, self._resources.recurrent
        graphs.plan_catch_ups(self._resources.slots[0].drafting)
        if recurrent is None or not recurrent.inline:
            return
        keys = [commit_key(left, graphs.every, entered, left > 1) for left in (0, *widths) for entered in widths if left != entered]
        if not self.overlaps:
            graphs.announced |= {key.family for key in keys}
            return
        for key in keys:
            graphs.build(key)

    def while_computing(self, batch: Batch) -> None:
        """The device computes ``batch`` now."""
        graphs, key = self._graphs, batch.key
        waited = graphs.waited_us
        if self._keys and self._epoch == self._resources.epoch:
            if self._committed > self._complete_to:
                self._build_expected()
        elif key.candidates is not None and key.kind not in EXACT and (key.kind != "prefill" or key.slots.count == 1):
            # only graphs that were planned for: the buffer is in use, and whole rows of logits in it are still to be read
            graphs.get(key.at(self._resources.kv.bucket(batch.context + key.verify_len + max(key.verify_len, AHEAD))))
        graphs.waited_us = waited  # no step waited for these

    def _build_expected(self) -> None:
        """Builds one announced graph of the next bucket, or captures one of this bucket or the next."""
        graphs, kv, waiting = self._graphs, self._resources.kv, None
        for key in self._keys:
            bucket = self._bucket(key)
            after = kv.bucket(bucket + 1)
            if after <= self._last_bucket and graphs.find(key.at(after)) is None:
                graphs.build(key.at(after))
                self.built += 1
                return
            if waiting is None:
                both = key.at(bucket), key.at(after)
                waiting = next((k for k in both if (step := graphs.find(k)) is not None and not step.ready), None)
        if waiting is not None:
            graphs.get(waiting)
            return
        self._complete_to = min(self._bucket(key) - key.verify_len for key in self._keys)
