"""An update in one process: what gradients are divided by, the rate that is used, and when there is none."""

import json
import math
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.models.decoder import loss_sum
from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.grid import Grid
from engine.step.state import StepState
from engine.step.update import Update
from tests import models

SETTINGS: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "gradient_clipping": 0.0,
}


class Slope(nn.Module):
    """One weight w, whose gradient is the sum of the inputs: x [rows, 1] -> w x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def present(output: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses, and the number of rows that are not 0."""
    return output.sum(), (x != 0).sum()


def trained(rows: list[list[float]], **given: Any) -> list[float]:
    """The weight after each step on four rows, two microbatches of two."""
    found = []
    with engine.initialize(Slope(), SETTINGS, loss_fn=present, **given) as eng:
        for row in rows:
            eng.train_batch(torch.tensor(row).view(4, 1))
            found.append(float(eng.full_state_dict()["weight"]))
    return found


def test_gradients_are_divided_by_the_weight_of_all_microbatches() -> None:
    assert trained([[3.0, 0.0, 1.0, 2.0]]) == [1.0 - 6.0 / 3.0], "a mean of means would be 1 - (3 + 1.5) / 2"


def test_an_update_is_made_with_the_rate_of_its_own_number() -> None:
    found = trained([[1.0] * 4] * 3, lr_scheduler=lambda update: 0.5**update)
    assert found == [0.0, -0.5, -0.75]


def test_no_update_is_made_with_gradients_that_are_infinite() -> None:
    assert trained([[math.inf, 1.0, 1.0, 1.0], [1.0] * 4]) == [1.0, 0.0]


def test_masks_of_dropout_differ_between_steps_and_microbatches() -> None:
    batch = models.batches_for("decoder", 4, 1)[0]
    again = {key: torch.cat([value[:2], value[:2]]) for key, value in batch.items()}

    def losses() -> list[float]:
        model, rate = models.decoder(dropout=0.5), lambda update: 0.0
        with engine.initialize(model, SETTINGS, loss_fn=loss_sum, lr_scheduler=rate) as eng:
            return [eng.train_batch(again).loss for _ in range(3)]

    found = losses()
    assert len(set(found)) == 3 and found == losses()


def test_a_loss_of_fp16_is_scaled_in_fp32() -> None:
    zero, loss = torch.zeros((), dtype=torch.float64), torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    step = StepState(started=0.0, sent=Tally(), loss=zero, weight=zero, scale=2.0**16)
    root = step.root(loss)
    assert root.dtype == torch.float32 and root.item() == 3 * 2.0**16, "fp16 ends at 65504"
    assert StepState(started=0.0, sent=Tally(), loss=zero, weight=zero).root(loss) is loss


def test_counters_and_the_loss_scale_go_on() -> None:
    config, grid = load_config({"train_batch_size": 1, "fp16": {"enabled": True, "hysteresis": 1}}), Grid()
    comm = Comm(grid, RecordingBackend(grid))
    one, other = (Update(config, comm, torch.device("cpu")) for _ in range(2))
    one.made, one.skipped, one.tokens, one.samples = 5, 2, 70, 9
    one.scale = one.scale.after(overflow=True).after(overflow=True).after(overflow=False)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.scale == other.scale != Update(config, comm, torch.device("cpu")).scale
    assert one.state_dict() == other.state_dict()
