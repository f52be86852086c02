"""scripts/bench_workloads.py: a kind of step has a cost in whatever round it ran."""

from types import SimpleNamespace

import pytest
from bench_workloads import Watched, step_costs

from pyggml_spec.engine.batch import Draft, Verify

BLOCK, PLAIN = ("draft-dflash", 2, 0), ("", 1, 0)


def engine(new_graphs: list[bool]) -> SimpleNamespace:
    """Of whose steps those build a graph."""
    out = SimpleNamespace(
        io=SimpleNamespace(replay=None, uploads=0),
        graphs=SimpleNamespace(changes=0, get=None),
        catch_up_us=0,
        state=SimpleNamespace(_commit=None),
    )

    def forward(batch, meanwhile):
        out.graphs.changes += new_graphs.pop(0)

    out.forward = forward
    return out


def test_a_kind_that_ran_in_one_round_alone_and_in_a_new_graph_has_a_cost():
    """Only the last round's new graphs were looked at: KeyError, where a text has a drafter's block tried once."""
    watched = Watched(engine([True, False, False]))
    watched.begin()
    watched(SimpleNamespace(items={0: Draft(2, drafter="draft-dflash")}))
    watched(SimpleNamespace(items={0: Verify()}))
    watched.begin()
    watched(SimpleNamespace(items={0: Verify()}))
    assert [kind for kind, _ in watched.new] == [] and watched.first.keys() == {BLOCK}
    costs = step_costs([watched])
    assert costs.keys() == {BLOCK, PLAIN} and costs[BLOCK] == watched.first[BLOCK][0]


def test_graphs_that_were_new_say_nothing_where_others_are_known():
    one, other = (
        SimpleNamespace(took={}, first={BLOCK: [90.0]}),
        SimpleNamespace(took={BLOCK: [3.0, 2.0, 9.0, 1.0]}, first={PLAIN: [7.0]}),
    )
    assert step_costs([one, other]) == {BLOCK: pytest.approx(2.0), PLAIN: 7.0}
