"""Any grid gives the losses, norms and weights of one process (the promise of the project)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from engine.models.decoder import loss_sum
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_on_grid, verify
from tests import models
from tests.selection import wide
from tests.tables import Table

RunRanks = Callable[..., list[Any]]

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": models.decoder,
    "decoder tied": partial(models.decoder, tied=True),
    "decoder dropout": partial(models.decoder, dropout=0.2),
    "llama": models.llama,
    "gpt2": models.gpt2,
    "nano": models.nano,
}


def config_for(dp: int, stage: int, **changes: Any) -> dict[str, Any]:
    """Eight microbatches of two rows in all, clipping active."""
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2 if dp < 4 else 1,
        "parallel": {"data": dp},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 6000},
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
        "gradient_clipping": 0.25,
    } | changes


def train_both(name: str, config: dict[str, Any]) -> Parity | None:
    """Body of a rank."""
    loss_fn = loss_sum if name.startswith("decoder") else None
    return verify(MODELS[name], config, models.batches_for(name.split()[0], 16, 3), loss_fn)


def parity(run_ranks: RunRanks, name: str, config: dict[str, Any], dp: int) -> Parity:
    """Compare on ``dp`` ranks; rank 0 has the result."""
    result = run_ranks(train_both, dp, name, config)[0]
    assert isinstance(result, Parity)
    return result


@pytest.mark.parametrize(
    ("dp", "stage"),
    [(1, 0), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1), (2, 0), (2, 1), (4, 0), (4, 1)))],
)
@pytest.mark.parametrize("name", MODELS)
def test_fp32_equals_one_process(run_ranks: RunRanks, parity_table: Table, name: str, dp: int, stage: int) -> None:
    result = parity(run_ranks, name, config_for(dp, stage), dp)
    parity_table.cells[name, f"dp{dp} ZeRO-{stage}"] = f"{result.loss:.0e}"
    assert result.holds(), str(result)
    assert all(norm > 0.25 for norm in result.reference.norms), "clipping must be active"


@pytest.mark.long
@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_kept_as_shards_equal_one_process(
    run_ranks: RunRanks, parity_table: Table, name: str, dp: int
) -> None:
    zero = {"stage": 2, "reduce": "microbatch", "reduce_bucket_size": 6000}
    result = parity(run_ranks, name, config_for(dp, 2, zero_optimization=zero), dp)
    parity_table.cells[name, f"dp{dp} ZeRO-2"] = f"{result.loss:.0e}"
    assert result.holds(), str(result)


def train_stages() -> list[TrainingRecord]:
    """Body of a rank: a run of each stage, and of stage 1 with other buckets."""
    batches, runs = models.batches_for("decoder", 16, 3), []
    for stage, bucket in ((0, 6000), (1, 6000), (1, 1), (1, 10**6), (2, 6000), (3, 6000)):
        config = config_for(2, stage, zero_optimization={"stage": stage, "reduce_bucket_size": bucket})
        runs.append(train_on_grid(models.decoder, config, batches, VerifyOptions(loss_sum)))
    return runs


def test_stages_agree_to_the_bit_at_two_ranks_and_bucket_size_changes_nothing(run_ranks: RunRanks) -> None:
    runs = run_ranks(train_stages, 2)[0]
    assert len({run.losses for run in runs}) == 1
    assert runs[0].norms == pytest.approx(runs[3].norms, rel=1e-9), "fp64 sums in another order"
    for run in runs[1:]:
        worst = max(float((run.weights[name] - value).abs().max()) for name, value in runs[0].weights.items())
        assert worst <= 1e-7


OPTIMIZERS = {
    "Adam": {"type": "Adam", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1, "adam_w_mode": False}},
    "OneBitAdam": {"type": "OneBitAdam", "params": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}},
    "SGD": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "groups": ADAMW
    | {"no_weight_decay": ["*norm*", "*.bias"], "groups": [{"params": ["tokens.*", "head.*"], "lr": 1e-3}]},
}


@pytest.mark.parametrize("kind", [kind if kind in ("SGD", "groups") else wide(kind) for kind in OPTIMIZERS])
def test_every_optimizer_and_parameter_groups(run_ranks: RunRanks, kind: str) -> None:
    result = parity(run_ranks, "decoder", config_for(2, 1, optimizer=OPTIMIZERS[kind]), 2)
    # Lion steps by a sign, which a rounding error of a zero gradient turns round: its weights do not bind
    assert result.holds(weight=1e-2 if kind == "Lion" else 1e-5), str(result)


def train_uneven(config: dict[str, Any]) -> Parity | None:
    """Sequences of very different length: a mean of means would be wrong."""
    batches = models.batches_for("decoder", 16, 3)
    generator = torch.Generator().manual_seed(11)
    for batch in batches:
        lengths = torch.randint(1, models.LENGTH + 1, (16, 1), generator=generator)
        lengths[:4] = 1  # the first rank has hardly anything to learn from
        padding = torch.arange(models.LENGTH) >= lengths
        batch["labels"] = batch["labels"].masked_fill(padding, -100)
    return verify(models.decoder, config, batches, loss_sum)


@pytest.mark.parametrize("stage", [wide(0), 1])
def test_unequal_token_counts_through_sum_and_weight(run_ranks: RunRanks, stage: int) -> None:
    result = run_ranks(train_uneven, 4, config_for(4, stage))[0]
    assert result.holds(), str(result)


def train_coupled() -> Parity | None:
    """Batch normalisation: statistics of a microbatch do not depend on the grid."""

    def build() -> nn.Module:
        torch.manual_seed(7)
        layers = [nn.Flatten(), nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)]
        return nn.Sequential(*layers)

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (output - batch.mean(dim=1, keepdim=True)).square().mean()

    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(16, 12, generator=generator) for _ in range(4)]
    return verify(build, config_for(2, 1), batches, loss)


def test_a_model_that_couples_samples_gives_the_same_losses(run_ranks: RunRanks) -> None:
    result = run_ranks(train_coupled, 2)[0]
    assert result.loss <= 1e-6 and result.norm <= 1e-5, str(result)
