"""Code between blocks that no pipeline could cut, on tensor ranks, which all run it; and plans that are of no use."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.errors import PlanError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import verify
from tests import models
from tests.engine.parity.launches import settings
from tests.engine.parity.test_host_randomness import PLAN, WIDTH, Decoder, LayerDrop


class EarlyExit(Decoder):
    """Leaves its last blocks out where a value says so, which it never does for zeros."""

    def trunk(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and float(x.detach().square().mean()) > 0.5:
                break
        return x


class Sensitivity(Decoder):
    """Scales its loss by a gradient, through which none flows."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        loss = F.cross_entropy(self.head(self.norm(self.trunk(x))).flatten(0, 1), targets.flatten())
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        scaled: Tensor = loss * (1 + slope.square().sum())
        return scaled


class Packed(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def trunk(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
        return super().trunk(nn.utils.rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True)[0])


def config(plan: Any, **parallel: Any) -> dict[str, Any]:
    return settings(1, parallel={"data": 1, "tensor": 2, "tensor_plan": plan} | parallel)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (EarlyExit, "auto"),
        pytest.param(Sensitivity, "auto", marks=pytest.mark.long),
        pytest.param(LayerDrop, "auto", marks=pytest.mark.long),
        pytest.param(EarlyExit, PLAN, marks=pytest.mark.long),
        pytest.param(Sensitivity, PLAN, marks=pytest.mark.long),
    ],
)
def test_tensor_ranks_take_every_path_that_one_process_takes(model: type[Decoder], plan: Any) -> None:
    made = config(plan)
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(made["train_batch_size"], 3)]
    result = verify(model, made, batches, threads=2)
    assert result is not None and result.holds(), str(result)


def refused(model: type[Decoder], made: dict[str, Any]) -> str:
    """What all tensor ranks raise."""

    def body(world: World) -> str:
        batch = tuple(torch.zeros(2, 2, 4, dtype=torch.int64))
        with pytest.raises(PlanError) as caught:
            engine.initialize(model(), made, example_batch=batch, world=world)
        return str(caught.value)

    first, second = run_thread_ranks(2, body)
    assert first == second
    return first


def notes(made: dict[str, Any], model: type[Decoder] = Decoder) -> list[str]:
    """Notes of the plan of each rank."""

    def body(world: World) -> list[str]:
        batch = tuple(torch.zeros(2, 2, 4, dtype=torch.int64))
        with engine.initialize(model(), made, example_batch=batch, world=world) as eng:
            return list(eng.plan.notes)

    return run_thread_ranks(2, body)[0]


@pytest.mark.long
@pytest.mark.parametrize("model", [EarlyExit, Sensitivity, LayerDrop])
@pytest.mark.parametrize("stage", [1, 3])
def test_data_ranks_take_every_path_that_one_process_takes(model: type[Decoder], stage: int) -> None:
    made = settings(1, parallel={"data": 2}, zero_optimization={"stage": stage})
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(made["train_batch_size"], 3)]
    result = verify(model, made, batches, threads=2)
    assert result is not None and result.holds(), str(result)


@pytest.mark.long
@pytest.mark.parametrize("model", [EarlyExit, Sensitivity])
@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_refuse_such_a_path_on_all_ranks(model: type[Decoder], tensor: int) -> None:
    def body(world: World) -> str:
        made = settings(2, parallel={"tensor": tensor} | ({"tensor_plan": PLAN} if tensor > 1 else {}))
        with pytest.raises(PlanError) as caught:
            engine.initialize(model(), made, example_batch=tuple(torch.zeros(2, 2, 4, dtype=torch.int64)), world=world)
        return str(caught.value)

    (said,) = set(run_thread_ranks(2 * tensor, body))
    assert "between units" in said


@pytest.mark.parametrize("model", [EarlyExit, Sensitivity])
def test_where_a_plan_follows_the_forward_the_reason_is_that_of_tensor_ranks(model: type[Decoder]) -> None:
    said = refused(model, config(PLAN, sequence_parallel=True))
    assert (
        "pipeline" not in said and "stage" not in said and "between units, which a forward on shapes does not" in said
    )
    assert said.endswith('leave sequence_parallel out, or write a parallel.tensor_plan without "view".')


def test_a_packed_sequence_is_refused_by_what_it_reads() -> None:
    said = refused(Packed, config("auto"))
    assert "Sample" not in said and "but the model reads the content of a tensor (" in said


def test_a_search_on_one_path_shares_blocks_alone_and_says_it() -> None:
    (said,) = [note for note in notes(config("auto"), EarlyExit) if note.startswith("tensor ranks shard blocks")]
    assert "reads the content of a tensor on the host (__float__) between units" in said and "pipeline" not in said


def test_a_plan_that_cuts_nothing_is_said_once() -> None:
    (said,) = [note for note in notes(config({"*": "replicate"})) if "shards nothing" in note]
    assert said.startswith("parallel.tensor 2 shards nothing of this model")
    assert not [note for note in notes(config(PLAN)) if "shards nothing" in note]


class TwoHeads(Decoder):
    """A perceptron beside its blocks, which a norm of its hidden width makes no pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)

    def trunk(self, x: Tensor) -> Tensor:
        beside: Tensor = self.last(self.middle(self.first(x)))
        return super().trunk(x) + beside


def test_a_written_plan_that_is_wrong_outside_blocks_names_its_layers() -> None:
    said = refused(TwoHeads, config(PLAN | {"first": "column", "last": "row"}))
    assert "no block is wrong by itself, so correct the styles outside blocks, here of first, last, or" in said
