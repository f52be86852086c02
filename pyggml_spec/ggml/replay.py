"""Whether steps ran as replayed CUDA graphs, inferred from their launch time.

ggml-cuda exposes no counter. An eager launch costs the host about 1.8 us per node and a replay 0.05, so the two are distinct. With patches/0026 a
graph is captured before its first call, so that the first call is a replay too.
"""

from dataclasses import dataclass

REPLAY_US_PER_NODE = 0.5
WARMUP_CALLS = 2  # ggml-cuda runs a graph's first call eagerly and captures the second
FEWEST_NODES = 64  # launches of smaller graphs are too short to classify


@dataclass
class ReplayCounters:
    """Steps of graphs with at least FEWEST_NODES nodes on a CUDA device.

    Attributes:
        warmup: first and second calls of graphs without early capture.
        captured: graphs that were replayed at least once.
        replayed: later calls that were replays.
        eager: later calls that launched kernel by kernel.
        ahead: graphs captured before their first call.
        ahead_us: microseconds spent on that.
        inside: graphs captured within their second call although early capture was requested.
    """

    warmup: int = 0
    captured: int = 0
    replayed: int = 0
    eager: int = 0
    ahead: int = 0
    ahead_us: int = 0
    inside: int = 0

    def count(self, call: int, launch_us: int, nodes: int, captured: bool | None = None) -> bool:
        """Counts the ``call``-th (from 1) launch of a graph; returns whether it was a replay. ``captured``: early capture."""
        if nodes < FEWEST_NODES:
            return False
        if call <= WARMUP_CALLS and not captured:
            self.warmup += 1
            return False
        replay = launch_us < REPLAY_US_PER_NODE * nodes
        self.replayed += replay
        self.eager += not replay
        return replay
