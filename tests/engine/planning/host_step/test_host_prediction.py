"""A step on processors: the seconds of operators, of sums and updates, and what overlap leaves of collectives."""

from dataclasses import replace

import pytest

from engine.errors import PlanError
from engine.planning.host_step.host_prediction import operator_seconds, predict_on_host, seconds_by_class
from engine.planning.host_step.host_rates import EngineSeconds, HostRates, SecondsTable
from engine.planning.host_step.operator_trace import OperatorCall, trace_operators
from tests.engine.planning.host_step.conftest import Make

UNIT = SecondsTable(sizes=((1.0, 2.0),), seconds=(1e-9, 2e-9))
"""A nanosecond for an element or byte."""
CUBE = SecondsTable(sizes=((1.0,), (1.0,), (1.0,)), seconds=(1e-9,))
FLAT = SecondsTable(sizes=((1.0,), (1.0,)), seconds=(1e-9,))
RATES = HostRates(
    ranks=2,
    operators={
        **dict.fromkeys(("add", "copy", "update", "squared norm"), UNIT),
        **dict.fromkeys(("product nt", "product nn", "product tn"), CUBE),
        **dict.fromkeys(("causal attention", "causal attention backward"), FLAT),
    },
    collectives=dict.fromkeys(
        ("dp all_reduce", "dp reduce_scatter", "dp all_gather", "tp all_reduce", "tp reduce_scatter", "tp all_gather",
         "pp send"), UNIT,
    ),
    overlap=1.0,
    engine=EngineSeconds(step=0.0, microbatch=0.0, operator=0.0),
)  # fmt: skip
ELEMENTS = 2 * 12 * 64**2 + 2 * (9 + 4) * 64 + 2 * 32 * 64 + 16 * 64 + 2 * 64
"""Of the parameters of two blocks: products, biases and norms, embedding and head, positions, the last norm."""


def test_seconds_of_calls_by_class() -> None:
    calls = (
        OperatorCall("product nt", (10.0, 10.0, 10.0), 3.0, 0, False, repeats=True),
        OperatorCall("add", (500.0,), 1.0, 0, True),
        OperatorCall("", (), 1.0, 0, False),
    )
    rates = replace(RATES, engine=replace(RATES.engine, operator=1e-6))
    assert operator_seconds(calls, rates) == pytest.approx(3e-6 + 5e-7 + 3e-6)
    assert seconds_by_class(calls, rates) == pytest.approx({"product nt": 2 * 4e-6, "add": 1.5e-6, "views": 1e-6})


def test_a_step_adds_up(make_planned: Make) -> None:
    alone = replace(RATES, ranks=1, engine=EngineSeconds(step=1.0, microbatch=0.5, operator=0.0))
    planned = make_planned({})
    elements = sum(row.elements for row in planned.plan.table)
    held = sum(bucket.elements for bucket in planned.plan.layouts[0, 0].buckets)
    microbatch = operator_seconds(trace_operators(*planned), alone) + 1e-9 * elements + 0.5
    found = predict_on_host(*planned, alone)
    assert elements == ELEMENTS
    assert found.computation == pytest.approx(4 * microbatch + 2e-9 * held + 1.0)
    assert found.total == pytest.approx(found.computation) and found.communication == {}


def test_a_rank_updates_what_it_owns(make_planned: Make) -> None:
    whole, shared = (predict_on_host(*make_planned({"data": 2}, stage=stage), RATES) for stage in (0, 1))
    held = sum(bucket.elements for bucket in make_planned({"data": 2}).plan.layouts[0, 0].buckets)
    assert whole.computation - shared.computation == pytest.approx(1e-9 * held / 2, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_overlaps_costs_its_part(make_planned: Make, stage: int) -> None:
    planned = make_planned({"data": 2}, stage=stage, zero_optimization={"stage": stage, "reduce_bucket_size": 8192})
    found = [predict_on_host(*planned, replace(RATES, overlap=part)).communication["dp"] for part in (1.0, 0.5, 0.0)]
    assert found[0] < found[1] < found[2] and found[1] == pytest.approx((found[0] + found[2]) / 2, rel=0.01)
    labels = ("gradients", "parameters")
    rows = [row for row in planned.plan.rank(0).traffic if row.axis == "dp" and row.label in labels]
    share = 1.0 if stage == 0 else 0.5  # a rank sends so much of a tensor
    assert found[2] == pytest.approx(1e-9 * sum(row.bytes for row in rows) / share, rel=0.01)


def test_a_group_of_sharded_parameters_takes_its_seconds(make_planned: Make) -> None:
    planned = make_planned({"data": 2}, stage=3)
    slow = replace(RATES, engine=replace(RATES.engine, gather=1.0))
    more = predict_on_host(*planned, slow).total - predict_on_host(*planned, RATES).total
    assert more == pytest.approx(2 * 4 * len(planned.plan.layouts[0, 0].buckets), rel=1e-3)


def test_stages_wait_for_each_other(make_planned: Make) -> None:
    found = predict_on_host(*make_planned({"pipeline": 2}), RATES)
    assert found.bubble > 0 and set(found.communication) == {"pp", "replica", "world"}
    found = predict_on_host(*make_planned({"tensor": 2}), RATES)
    assert found.bubble == 0 and found.communication["tp"] > 0


def test_rates_of_other_ranks_are_refused(make_planned: Make) -> None:
    with pytest.raises(PlanError, match="those of 2 busy ranks, and the plan has 1; measure them by trine plan --cal"):
        predict_on_host(*make_planned({}), RATES)
