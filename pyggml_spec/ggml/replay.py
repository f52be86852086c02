"""Whether steps ran as replayed CUDA graphs, told from the time that launching them took.

ggml-cuda counts nothing that a caller could read. But an eager launch costs the host about 1.8 us per node (4B shape on one H200: 3.2 ms per
step with CUDA graphs off) and a replay, which only compares the nodes, 0.05 (0.08 ms): the two cannot be mistaken for each other.
With patches/0026 a graph is captured before its first call, so that the first one is a replay, too.
"""

from dataclasses import dataclass

REPLAY_US_PER_NODE = 0.5
WARMUP_CALLS = 2  # ggml-cuda runs a graph's first call as it is and captures the second
FEWEST_NODES = 64  # below this a launch is too short to tell


@dataclass
class ReplayCounters:
    """Steps of graphs with at least FEWEST_NODES nodes on a CUDA device.

    Attributes:
        warmup: first and second calls of a graph that was not captured ahead.
        captured: graphs that were replayed at least once.
        replayed: later calls that were replays.
        eager: later calls that launched kernel by kernel.
        ahead: graphs that were captured before their first call.
        ahead_us: microseconds that this took.
        inside: of those captured, graphs that were captured within their second call although the device was asked to do it ahead.
    """

    warmup: int = 0
    captured: int = 0
    replayed: int = 0
    eager: int = 0
    ahead: int = 0
    ahead_us: int = 0
    inside: int = 0

    def count(self, call: int, launch_us: int, nodes: int, captured: bool | None = None) -> bool:
        """Counts the ``call``-th (from 1) launch of a graph; whether it was a replay. ``captured``: whether it was captured ahead."""
        if nodes < FEWEST_NODES:
            return False
        if call <= WARMUP_CALLS and not captured:
            self.warmup += 1
            return False
        replay = launch_us < REPLAY_US_PER_NODE * nodes
        self.replayed += replay
        self.eager += not replay
        return replay
