"""bf16 with an fp32 master is the same thing as in plain torch, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests import models
from tests.engine.parity.test_parity import config_for, parity
from tests.resumed_runs import own_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
STEPS, ROWS, CLIP = 4, 16, 0.5
STAGES = (0, 1, 2, 3)


def plain(model: nn.Module, batches: list[Any], config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """bf16 weights, fp32 master, gradients summed in fp32: first on each data rank, then over the ranks."""
    dp, micro = config["parallel"]["data"], config["train_micro_batch_size_per_gpu"]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    masters = [nn.Parameter(model.get_parameter(name).detach().clone()) for name in names]
    low = [model.get_parameter(name) for name in names]
    for p in model.parameters():
        p.data = p.data.bfloat16()
    adamw = torch.optim.AdamW(masters, lr=3e-3, eps=1e-5, weight_decay=0.1, fused=True)
    losses = []
    for batch in batches:
        sums, total = [torch.zeros_like(m) for m in masters], 0.0
        for rank in range(dp):
            own = [torch.zeros_like(m) for m in masters]
            for start in range(rank * ROWS // dp, (rank + 1) * ROWS // dp, micro):
                loss = model(*(part[start : start + micro] for part in batch))[1]
                loss.backward()
                total += float(loss.detach())
                for grad, p in zip(own, low, strict=True):
                    grad += p.grad if p.grad is not None else 0
                    p.grad = None
            sums = [a + b for a, b in zip(sums, own, strict=True)]
        weight = ROWS / micro
        norm = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in sums) ** 0.5 / weight
        for master, grad in zip(masters, sums, strict=True):
            used = bool(grad.any())  # a parameter that nobody uses has no gradient
            master.grad = grad * (min(1.0, CLIP / (norm + 1e-6)) / weight) if used else None
        adamw.step()
        with torch.no_grad():
            for p, master in zip(low, masters, strict=True):
                p.copy_(master)
        losses.append(total / weight)
    return losses, dict(zip(names, (m.detach() for m in masters), strict=True))


def train(stage: int) -> tuple[list[float], list[float], float]:
    """Losses of the engine and of plain torch, and the largest difference of a master."""
    dp = torch.distributed.get_world_size()
    config = config_for(dp, stage, bf16={"enabled": True}, gradient_clipping=CLIP)
    del config["scheduler"]
    batches = models.batches_for("nano", ROWS, STEPS)
    with engine.initialize(models.nano(), config) as eng:
        losses = [eng.train_batch(own_rows(eng, batch)).loss for batch in batches]
        weights = eng.full_state_dict()
    if not weights:
        return losses, losses, 0.0
    expected, masters = plain(models.nano(), batches, config)
    return losses, expected, max(float((weights[name] - m).abs().max()) for name, m in masters.items())


@pytest.mark.parametrize(
    ("dp", "stage"),
    [(2, 3), wide(2, 1), wide(2, 2), *(wide(1, stage) for stage in STAGES), wide(2, 0)],
)
def test_losses_and_masters_equal_plain_torch(run_ranks: RunRanks, dp: int, stage: int) -> None:
    losses, expected, deviation = run_ranks(train, dp, stage)[0]
    assert losses == expected and losses[-1] < losses[0]
    assert deviation <= 1e-9


@pytest.mark.long
@pytest.mark.parametrize("stage", [wide(0), wide(1), wide(2), 3])
def test_four_ranks_add_in_another_order(run_ranks: RunRanks, stage: int) -> None:
    losses, expected, deviation = run_ranks(train, 4, stage)[0]
    assert losses == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]
    assert deviation <= 1e-3


@pytest.mark.parametrize(("dp", "stage"), [wide(2, 0), wide(2, 1), wide(2, 2), (2, 3), wide(4, 1)])
def test_gradients_on_the_wire_in_bf16_stay_close_to_plain_torch(run_ranks: RunRanks, dp: int, stage: int) -> None:
    config = config_for(dp, stage, bf16={"enabled": True}, communication_data_type="bf16")
    result = parity(run_ranks, "decoder", config, dp)  # nano's loss is a bf16 number, too coarse to compare
    assert 0 < result.loss <= 5e-5, str(result)


def load_weights_afterwards() -> tuple[float, float, float]:
    """Loss of other weights loaded after initialize; a step with lr 0 must keep them."""
    config = config_for(torch.distributed.get_world_size(), 1, bf16={"enabled": True})
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.0}}
    del config["scheduler"]
    batch = models.batches_for("nano", ROWS, 1)[0]
    with engine.initialize(models.nano(), config) as eng:
        share = ROWS // eng.grid.dp
        mine = tuple(part[eng.grid.rank * share :][:share] for part in batch)
        given = eng.eval_batch(mine).loss
        eng.module.load_state_dict({name: value * 1.5 for name, value in eng.module.state_dict().items()})
        loaded = eng.eval_batch(mine).loss
        eng.train_batch(mine)
        return given, loaded, eng.eval_batch(mine).loss


def test_weights_loaded_after_initialize_survive_the_next_update(run_ranks: RunRanks) -> None:
    given, loaded, kept = run_ranks(load_weights_afterwards, 2)[0]
    assert given != loaded and kept == loaded


def test_a_partial_write_leaves_the_other_masters_exact() -> None:
    config = config_for(1, 1, bf16={"enabled": True})
    for through_data in (False, True):
        model = models.nano()
        given = model.get_parameter("ln_f.weight").detach().clone() + 1e-4  # not a bf16 number
        with torch.no_grad():
            model.get_parameter("ln_f.weight").copy_(given)
        with engine.initialize(model, config) as eng, torch.no_grad():
            weight = eng.module.get_parameter("ln_f.weight")
            (weight.data if through_data else weight)[3] = 7.0
            kept = eng.full_state_dict()["ln_f.weight"]
        assert kept[3] == 7.0 and torch.equal(kept[4:], given[4:]) and torch.equal(kept[:3], given[:3])
