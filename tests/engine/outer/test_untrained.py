"""Frozen parameters and buffers, which sites never exchange: they are compared when a site joins."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.build import step_parts
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from engine.outer.local_pieces import UntrainedState
from tests import models
from tests.engine.outer.thread_sites import ROWS, config_of, make_store

RunRanks = Callable[..., list[Any]]
FORM = {"rule": "quorum", "least": 1, "period": 2, "sites": 2}
EXAMPLE = {"x": torch.ones(ROWS // 2, 4)}


class _Normed(nn.Module):
    """Model with a frozen layer, and with statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self.head(self.norm(self.frozen(x))).square().mean()
        return loss


@pytest.mark.parametrize("name", ["frozen.weight", "norm.running_var"])
def test_a_site_with_other_frozen_values_or_buffers_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(FORM)
    store, model = make_store(config), _Normed()
    monkeypatch.setattr(step_parts, "open_link", lambda outer, fragments: store)
    first, other = deepcopy(model), deepcopy(model)
    values = other.state_dict()[name].view(-1)
    values[1], values[2] = values[2] + 1, values[1]  # another sum of each pair of places, and another element
    with engine.initialize(first, config, example_batch=EXAMPLE) as eng:
        eng.train_batch({"x": torch.randn(ROWS, 4)})
        assert not torch.equal(first.norm.running_mean, model.norm.running_mean)  # type: ignore[arg-type]
        second = config_of({**FORM, "site": 1})
        with pytest.raises(EngineError, match=rf"site 1 has other values of '{name}' than the sites before it"):
            engine.initialize(other, second, example_batch=EXAMPLE)
        engine.initialize(deepcopy(model), second, example_batch=EXAMPLE).close()


def test_a_site_that_has_trained_has_buffers_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    config = config_of(FORM)
    store, model = make_store(config), _Normed()
    monkeypatch.setattr(step_parts, "open_link", lambda outer, fragments: store)
    with engine.initialize(deepcopy(model), config, example_batch=EXAMPLE) as eng:
        eng.train_batch({"x": torch.randn(ROWS, 4)})
        eng.save_checkpoint(tmp_path).wait()
        eng.load_checkpoint(tmp_path)
        eng.train_batch({"x": torch.randn(ROWS, 4)})


def digests_of(config: dict[str, Any]) -> dict[str, str]:
    """Body of a rank: returns the digests of a model with frozen layers."""
    model = models.decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.0" not in name and "tokens" not in name)
    model.register_buffer("seen", torch.arange(5.0))
    eng = engine.initialize(model, config_of(None, **config), loss_fn=loss_sum)
    eng.train_batch(models.batches_for("decoder", ROWS // eng.grid.dp, 1)[0])
    found = UntrainedState(eng.plan, eng._runtime.inventory).digests(eng.comm, eng.device, with_buffers=True)
    eng.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "grid"),
    [
        (4, {"parallel": {"data": 2, "tensor": 2}, "zero_optimization": {"stage": 3}}),
        pytest.param(2, {"parallel": {"pipeline": 2}}, marks=pytest.mark.long),
        pytest.param(2, {"parallel": {"context": 2}}, marks=pytest.mark.long),
    ],
    ids=lambda each: str(each),
)
def test_digests_do_not_depend_on_the_grid(run_ranks: RunRanks, ranks: int, grid: dict[str, Any]) -> None:
    alone = digests_of({})
    assert len(alone) > 6 and alone["seen"].startswith("float32 ")
    assert len(set(alone.values())) > 5, "tensors with other values have other digests"
    config = {**grid, "train_micro_batch_size_per_gpu": ROWS // 4}
    assert run_ranks(partial(digests_of, config), ranks)[0] == alone
