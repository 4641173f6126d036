"""bf16 weights without an fp32 copy: updates rounded stochastically, alike on every grid and ZeRO stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import ConfigError
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.parity.test_axes import GRIDS
from tests.engine.parity.test_parity import config_for
from tests.models import take_rows
from tests.resumed_runs import own_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
STAGES = (0, 1, 2, 3)
ALONE = {"enabled": True, "bf16_master_weights_and_grads": True}
STEPS = 3


def settings(grid: str, stage: int, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 6000}
    return config_for(1, stage, parallel={"data": 1} | GRIDS[grid], bf16=ALONE, zero_optimization=zero) | changes


def train(config: dict[str, Any], tied: bool = False) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the whole weights (rank 0), and what every rank holds whole."""
    batches = models.batches_for("decoder", 16, STEPS)
    resolved = engine.load_config(config, torch.distributed.get_world_size())
    model = models.decoder(layers=2, tied=tied)
    with engine.initialize(model, resolved, loss_sum, take_rows(batches[0], 0, resolved.micro)) as eng:
        losses = [eng.train_batch(own_rows(eng, batch)).loss for batch in batches]
        whole = eng.full_state_dict()
        held = {row.name for row in eng.plan.table.held_by(eng.grid.holder()) if row.dim is None}
        with eng.full_parameters("*") as named:
            kept = {name: p.detach().clone() for name, p in named.items() if name in held}
    assert all(tensor.dtype == torch.bfloat16 for tensor in kept.values())
    return losses, whole, kept


def stages(optimizer: dict[str, Any]) -> tuple[list[list[float]], list[float]]:
    """Body of a rank: losses by stage, and the largest deviation of a weight from stage 0's."""
    runs = [train(settings("dp2", stage, optimizer=optimizer)) for stage in STAGES]
    first = runs[0][1]
    worst = [max((float((run[1][n] - first[n]).abs().max()) for n in first), default=0.0) for run in runs]
    return [run[0] for run in runs], worst


@pytest.mark.long
@pytest.mark.parametrize(("kind", "params"), [("AdamW", {"lr": 3e-3}), wide("SGD", {"lr": 0.1, "momentum": 0.9})])
def test_zero_stages_agree_to_the_bit(run_ranks: RunRanks, kind: str, params: dict[str, float]) -> None:
    losses, worst = run_ranks(stages, 2, {"type": kind, "params": params})[0]
    assert all(run == losses[0] for run in losses) and worst == [0.0] * len(STAGES)
    assert len(set(losses[0])) == STEPS


def copies(grid: str) -> list[dict[str, Tensor]]:
    """Body of a rank: what it holds whole, at ZeRO 0 and, with a tied weight, at ZeRO 1."""
    return [train(settings(grid, stage), tied)[2] for tied, stage in ((False, 0), (True, 1))]


@pytest.mark.parametrize("grid", ["tp2", wide("dp2"), wide("tp2 x pp2"), wide("pp2")])
def test_all_copies_of_a_weight_stay_equal(run_ranks: RunRanks, grid: str) -> None:
    ranks = 4 if " x " in grid else 2
    results = run_ranks(copies, ranks, grid)
    compared = 0
    for case in range(2):
        seen: dict[str, Tensor] = {}
        for result in results:
            for name, tensor in result[case].items():
                compared += name in seen
                assert torch.equal(seen.setdefault(name, tensor), tensor), (grid, case, name)
    assert compared, "some weights are held twice"


def near(**changes: Any) -> list[list[float]]:
    """Body of a rank: losses of eight steps with an fp32 master and without."""
    runs = []
    batches = models.batches_for("decoder", 16, 8)
    for bf16 in ({"enabled": True}, ALONE, ALONE | {"bf16_optimizer_states": True}):
        with engine.initialize(models.decoder(), settings("dp2", 1, bf16=bf16), loss_sum) as eng:
            rows = slice(eng.grid.rank * 8, eng.grid.rank * 8 + 8)
            runs.append([eng.train_batch({k: v[rows] for k, v in batch.items()}).loss for batch in batches])
    return runs


@pytest.mark.long
def test_losses_stay_close_to_those_with_a_master(run_ranks: RunRanks) -> None:
    master, alone, all_narrow = run_ranks(near, 2)[0]
    assert master[-1] < master[0]
    assert alone == pytest.approx(master, rel=3e-3) and all_narrow == pytest.approx(master, rel=3e-3)
    assert alone != master != all_narrow != alone


class One(nn.Module):
    """A loss whose gradient is 1 for every weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.mean()).sum()


@pytest.mark.parametrize("narrow_moments", [False, True])
def test_small_updates_move_the_weights_on_average_where_nearest_rounding_stalls(narrow_moments: bool) -> None:
    lr, steps = 1e-4, 40  # a bf16 number above 1/2 is 2^-8 from the next: thirty times the update
    config = {
        "train_batch_size": 1,
        "bf16": ALONE | {"bf16_optimizer_states": narrow_moments},
        "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.0}},
        "gradient_clipping": 0.0,
    }
    with engine.initialize(One(), config) as eng:
        for _ in range(steps):
            eng.train_batch(torch.ones(1, 1))
        weight = eng.module.get_parameter("weight").detach().double()
    nearest = torch.ones(4096, dtype=torch.bfloat16)
    for _ in range(steps):
        nearest = (nearest.float() - lr).bfloat16()
    assert bool((nearest == 1).all()), "this is what stalls"
    moved = float(1 - weight.mean())
    assert moved == pytest.approx(lr * steps, rel=0.1)
    assert len(torch.unique(weight)) > 2


def test_runs_repeat_to_the_bit_and_seeds_differ() -> None:
    def run(seed: int) -> dict[str, Tensor]:
        config = {"train_batch_size": 4, "bf16": ALONE, "seed": seed}
        with engine.initialize(models.decoder(), config, loss_sum) as eng:
            for batch in models.batches_for("decoder", 4, 2):
                eng.train_batch(batch)
            return eng.full_state_dict()

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Lion"])
def test_what_is_kept_is_what_was_asked(optimizer: str) -> None:
    config = {"train_batch_size": 4, "bf16": ALONE, "keep_fp32": ["*norm*"]}
    config["optimizer"] = {
        "type": optimizer,
        "params": {"lr": 1e-3} | ({"momentum": 0.9} if optimizer == "SGD" else {}),
    }
    for narrow in (False, True):
        settings_now = config | {"bf16": ALONE | {"bf16_optimizer_states": narrow}}
        with engine.initialize(models.decoder(), settings_now, loss_sum) as eng:
            eng.train_batch(models.batches_for("decoder", 4, 1)[0])
            for flat in eng._runtime.buckets:
                assert flat.master is None and flat.grads.dtype == flat.params.dtype
            for parameter, state in eng.optimizer.state.items():
                wide = parameter.dtype == torch.float32 or not narrow
                assert state and {m.dtype for m in state.values()} == {torch.float32 if wide else torch.bfloat16}


def test_writes_of_the_user_are_the_weights() -> None:
    config = {"train_batch_size": 4, "bf16": ALONE, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}}}
    with engine.initialize(models.decoder(), config, loss_sum) as eng:
        with torch.no_grad():
            eng.module.get_parameter("head.weight").fill_(0.5)
        eng.train_batch(models.batches_for("decoder", 4, 1)[0])
        assert bool((eng.full_state_dict()["head.weight"] == 0.5).all())


def test_mistakes_are_one_sentence() -> None:
    config = {"train_batch_size": 4, "bf16": {"enabled": True, "bf16_optimizer_states": True}}
    with pytest.raises(
        ConfigError, match=r"^bf16.bf16_optimizer_states: true with bf16.bf16_master_weights_and_grads false, "
    ):
        engine.initialize(models.decoder(), config, loss_sum)
    config = {"train_batch_size": 4, "bf16": ALONE}
    with pytest.raises(
        ConfigError, match=r"^bf16.bf16_master_weights_and_grads true with an optimizer passed in code, "
    ):
        engine.initialize(models.decoder(), config, loss_sum, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
