"""What a tree of drafts would gain: not built here, measured, so that a pair's own figures can say whether it should be.

A block drafter's rows belong to its own most likely path. Where that path goes wrong, the target's token may be the drafter's second choice, and a
tree that verifies it too, as a leaf beside the path, has one token more. Behind such a sibling the drafter's next row was made for another token:
how often it is right all the same says whether a sibling is worth more than one leaf.
"""

import numpy as np

from .probe import BEST, Measured
from .report import NOT_APPLICABLE, OK, RUNNING, Check

ROWS = 32  # of the tree, the last token's included


def leaves(drafts: int, rows: int = ROWS) -> list[int]:
    """How many siblings stand beside each of the ``drafts`` of the path: second choices first, then third ones, earlier positions first."""
    spare = rows - 1 - drafts
    return [min(BEST - 1, spare // drafts + (i < spare % drafts)) for i in range(drafts)]


def gained(measured: Measured, drafts: int, rows: int = ROWS) -> float:
    """Tokens per block more than the path alone gives, if a sibling is one leaf."""
    beside = np.array([*leaves(drafts, rows), 0])
    at = np.minimum(measured.matched, drafts)
    return float(((measured.ranks >= 2) & (measured.ranks - 1 <= beside[at]) & (measured.matched < drafts)).mean())


def check(measured: Measured, costs: dict[int, float]) -> Check:
    """Ranks at the first mismatch, what is right behind a sibling, and a tree of ROWS rows against the best width, at the measured step costs.

    The tree's rows are wider than any block: their cost is extrapolated from the two widest, and never below the widest one's.
    """
    if not measured.ranks.size:
        return Check("trees", NOT_APPLICABLE, "only choices of drafters that draft blocks are looked at", stage=RUNNING)
    wrong = measured.ranks[measured.ranks >= 0]
    if not wrong.size or not costs:
        return Check("trees", NOT_APPLICABLE, "no draft was wrong where the text is known: a tree has nothing to add", stage=RUNNING)
    second, among = float((wrong == 2).mean()), float((wrong >= 2).mean())
    known = measured.behind[(measured.ranks >= 2) & (measured.behind >= 0)]
    behind = float(known.mean()) if known.size else 0.0
    widths = sorted(w for w in costs if w > 1)
    widest = widths[-1]
    slope = (costs[widest] - costs[widths[-2]]) / (widest - widths[-2]) if len(widths) > 1 else 0.0
    cost = costs[widest] + max(0.0, slope) * (ROWS - widest)
    speeds = {w: (1.0 + float(np.minimum(measured.matched, w - 1).mean())) / costs[w] for w in widths} | {1: 1.0 / costs[1]}
    best = max(speeds, key=speeds.__getitem__)
    drafts = widest - 1
    path = 1.0 + float(np.minimum(measured.matched, drafts).mean())
    more = gained(measured, drafts)
    ratio = (path + more) / cost / speeds[best]
    by_rank = {str(rank): float((wrong == rank).mean()) for rank in range(2, BEST + 1)}
    found = (
        f"at the first wrong draft the target's token is the drafter's second choice in {100 * second:.0f} % of {wrong.size} blocks and among its best {BEST} "
        f"in {100 * among:.0f} %; behind such a sibling the next draft is right in {100 * behind:.0f} %; a tree of {ROWS} rows would give "
        f"{path + more:.2f} tokens per step instead of {path:.2f}, {ratio:.2f} times the speed of width {best}"
    )
    data = {"blocks": int(wrong.size), "rank_shares": by_rank, "among_best": among, "right_behind_sibling": behind, "tokens_of_path": path,
            "tokens_of_tree": path + more, "tree_ms": cost, "best_width": best, "speed_of_tree": ratio}  # fmt: skip
    return Check("trees", OK, found, "", RUNNING, data)
