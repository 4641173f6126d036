"""A path that a random number chooses cannot be cut; what only computes with random numbers can."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.errors import PlanError
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.tracer import trace_model
from tests.parallel.pipeline.play import batches_of
from tests.parallel.pipeline.zoo import CASES, Block, Own, run_own

Keep = Callable[[], bool]


class LayerDrop(Own):
    """Leaves blocks out in training."""

    keep: Keep

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training or self.keep():
                x = block(x)
        return x


def by_rand() -> bool:
    return bool(torch.rand([]) > 0.1)


def by_item() -> bool:
    return torch.rand(1).mul(2).item() > 1e-6


def by_bernoulli() -> bool:
    return float(torch.empty(()).bernoulli_(0.999)) == 1.0


def seen(model: Own) -> ModelTrace:
    return trace_model(model, lambda: run_own(model, batches_of(CASES["own"], 1)[0]))


@pytest.mark.parametrize("keep", [by_rand, by_item, by_bernoulli])
def test_layerdrop_is_refused_in_training_however_rare(keep: Keep) -> None:
    model = LayerDrop()
    model.keep = keep
    state = torch.get_rng_state()
    with pytest.raises(PlanError) as caught:
        seen(model)
    message = str(caught.value)
    assert message.startswith(f"{__file__}:") and "chooses the path of the forward by a random number" in message
    assert "reaches a call of unit" in message and "switch that off (layerdrop 0)" in message
    assert torch.equal(torch.get_rng_state(), state)
    assert len(seen(model.eval()).calls) == 9, "evaluation has one path"


class Mixed(Own):
    """Random numbers on the host that choose nothing."""

    def trunk(self, x: Tensor) -> Tensor:
        share = torch.rand(()).item()
        for block in self.blocks:
            x = block(x) * share
        return x


class DroppingBlock(Block):
    """Goes round itself at random: its own affair."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0 if torch.rand(()) < 0.5 else super().forward(x)


class DroppingInside(Own):
    block = DroppingBlock


@pytest.mark.parametrize("kind", [Mixed, DroppingInside])
def test_random_numbers_that_choose_no_path_between_units(kind: type[Own]) -> None:
    assert len(seen(kind()).calls) == 9
