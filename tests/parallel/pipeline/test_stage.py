"""All stages, run one after the other, give what the uncut model gives."""

import copy

import pytest
import torch

from engine.parallel.pipeline.cut import make_cut
from engine.parallel.pipeline.probe import probe
from tests.parallel.pipeline.play import Gradients, Play, batches_of, whole
from tests.parallel.pipeline.zoo import CASES


def assert_same(ours: Gradients, theirs: Gradients, exact: bool) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values() if grad is not None)
    for name, expected in theirs.items():
        got = ours[name]
        if expected is None:
            assert got is None, name
            continue
        assert got is not None, f"{name} has no gradient"
        if exact:
            assert torch.equal(got, expected), f"{name} differs by {float((got - expected).abs().max())}"
        else:
            # entries that are rounding noise only (key biases) have no relative precision
            floor = 1e-4 * largest
            assert float((got - expected).abs().max()) <= 2e-6 * max(float(expected.abs().max()), floor), name


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_stages_give_what_the_whole_model_gives(name: str, stages: int) -> None:
    case = CASES[name]
    model = case.build()
    batches = batches_of(case, 3)
    timeline = probe(model, lambda: case.run(model, batches[0]), stages=stages)
    cut = make_cut(timeline, stages)
    play = Play(case, model, cut)
    losses, gradients = play.train(timeline, batches)
    expected_losses, expected = whole(case, copy.deepcopy(model), batches)
    assert losses == expected_losses
    assert_same(gradients, expected, case.exact)
    if case.tier and stages == 4:
        assert case.tier in [plan.tier for plan in cut.stages]
