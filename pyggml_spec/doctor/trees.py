"""Expected gain of draft trees (not implemented), from the pair's own figures.

Where a block's path goes wrong, the target's token may be the drafter's second choice, which a tree verifies as a sibling leaf.
"""

from functools import partial

import numpy as np

from .probe import BEST, Measured
from .report import NOT_APPLICABLE, OK, RUNNING, Check

ROWS = 32  # of the tree, with the last token's


def leaves(drafts: int, rows: int = ROWS) -> list[int]:
    """Siblings per position of the path: second choices first, then third ones, earlier positions first."""
    spare = rows - 1 - drafts
    return [min(BEST - 1, spare // drafts + (i < spare % drafts)) for i in range(drafts)]


def gained(measured: Measured, drafts: int, rows: int = ROWS) -> float:
    """Tokens per block gained by single-leaf siblings."""
    siblings = np.array([*leaves(drafts, rows), 0])
    at = np.minimum(measured.matched, drafts)
    return float(((measured.ranks >= 2) & (measured.ranks - 1 <= siblings[at]) & (measured.matched < drafts)).mean())


def check(measured: Measured, costs: dict[int, float]) -> Check:
    """Ranks at the first mismatch, accuracy after a sibling, and a tree of ROWS rows against the best width at measured costs.

    Costs beyond the widest block are extrapolated from the two widest.
    """
    check = partial(Check, "trees", stage=RUNNING)
    if not measured.ranks.size:
        return check(NOT_APPLICABLE, "ranks are measured for block drafters only")
    wrong = measured.ranks[measured.ranks >= 0]
    if not wrong.size or not costs:
        return check(NOT_APPLICABLE, "no known draft was wrong: a tree gains nothing")
    second, among = float((wrong == 2).mean()), float((wrong >= 2).mean())
    known = measured.next_right[(measured.ranks >= 2) & (measured.next_right >= 0)]
    next_right = float(known.mean()) if known.size else 0.0
    *_, widest = widths = sorted(w for w in costs if w > 1)
    slope = (costs[widest] - costs[widths[-2]]) / (widest - widths[-2]) if len(widths) > 1 else 0.0
    cost = costs[widest] + max(0.0, slope) * (ROWS - widest)
    speeds = {w: measured.expected(w) / costs[w] for w in widths} | {1: 1.0 / costs[1]}
    best = max(speeds, key=speeds.__getitem__)
    path, more = measured.expected(widest), gained(measured, widest - 1)
    ratio = (path + more) / cost / speeds[best]
    by_rank = {str(rank): float((wrong == rank).mean()) for rank in range(2, BEST + 1)}
    found = (
        f"at the first wrong draft the target's token is the drafter's second choice in {100 * second:.0f} % of {wrong.size} blocks and among its best {BEST} "
        f"in {100 * among:.0f} %; after such a sibling the next draft is right in {100 * next_right:.0f} %; a tree of {ROWS} rows would give "
        f"{path + more:.2f} tokens per step instead of {path:.2f}, {ratio:.2f} times the speed of width {best}"
    )
    data = {"blocks": int(wrong.size), "rank_shares": by_rank, "among_best": among, "right_behind_sibling": next_right, "tokens_of_path": path,
            "tokens_of_tree": path + more, "tree_ms": cost, "best_width": best, "speed_of_tree": ratio}  # fmt: skip
    return check(OK, found, data=data)
