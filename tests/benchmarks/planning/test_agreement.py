"""The closed form of a search stays near the whole plans that it stands for."""

import pytest

from benchmarks.planning.agreement import LAYOUTS, costs_of
from engine.planning.cost_model.workload import DecoderShape

SMALLER = DecoderShape(layers=8, width=2048, heads=16, vocabulary=32000, context=4096)


@pytest.mark.parametrize("number", [1, 4, 7, 9])
def test_closed_forms_are_near_whole_plans(number: int) -> None:
    (costs,) = costs_of([LAYOUTS[number]], SMALLER)
    assert costs.layout == LAYOUTS[number]
    assert costs.closed.seconds.total == pytest.approx(costs.time.total, rel=0.1)
    # closed forms give the fullest stage its blocks, an embedding or head, and the logits at once
    assert 0.9 <= costs.closed.memory.total / costs.fullest.total <= 1.3
