"""Optimizers from code that need whole parameters: one process's numbers, bytes as planned, checkpoints, any grid."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.engine import Engine
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import verify
from tests import models
from tests.engine.parity.optimizer_grids import OPTIMIZER_GRIDS
from tests.engine.parity.test_parity_preconditioned import Turns
from tests.engine.parity.test_parity_state_forms import INPUTS, RunRanks, beside_plan, layers
from tests.parallel.comm.small_decoder import ROWS, SIZES
from tests.selection import wide


class Balanced(torch.optim.Optimizer):
    """Momentum times the Gram matrix of the gradient, as long as the norm of the weights; counts its steps."""

    whole_parameters = True

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in [each for each in group["params"] if each.grad is not None]:
                state = self.state[weight]
                if not state:
                    state["updates"], state["mean"] = 0, torch.zeros_like(weight)
                state["updates"] += 1
                state["mean"].mul_(group["momentum"]).add_(weight.grad)
                mean = state["mean"]
                made = mean + mean @ mean.T @ mean if mean.dim() == 2 else mean
                length = weight.norm() / (made.norm() + 0.1)
                weight.sub_(made * length, alpha=group["lr"] / (1 + 0.1 * state["updates"]))


class WholeAdamW(torch.optim.AdamW):
    """torch's, as one that takes whole parameters."""

    whole_parameters = True


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "balanced": Balanced,
    "adamw": lambda groups: WholeAdamW(groups, lr=3e-3, eps=1e-5, weight_decay=0.1),
}


def settings(parallel: dict[str, Any], zero: dict[str, Any]) -> dict[str, Any]:
    """Clipped steps of microbatches, whose rate falls."""
    return {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.05, "parallel": parallel,
        "zero_optimization": zero, "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.8}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks", "zero"),
    [
        ("balanced", 2, {"stage": 1, "reduce_bucket_size": 100}),
        ("balanced", 2, {"stage": 3}),
        ("adamw", 2, {"stage": 2}),
        wide("balanced", 2, {"stage": 0}),
        wide("balanced", 4, {"stage": 2, "reduce": "microbatch"}),
        wide("adamw", 4, {"stage": 3}),
    ],
)
def test_data_ranks_train_as_one_process(name: str, ranks: int, zero: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [torch.randn(16, INPUTS, generator=generator, dtype=torch.float64) for _ in range(4)]
    found = verify(layers, settings({"data": ranks}, zero), batches, optimizer=MAKERS[name], threads=ranks)
    assert found is not None and found.holds(1e-6, 1e-6, 1e-6), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


@pytest.mark.parametrize(("parallel", "zero", "ranks"), [*OPTIMIZER_GRIDS, ({"pipeline": 2}, {"stage": 0}, 2)])
def test_any_grid_trains_as_one_process(parallel: dict[str, Any], zero: dict[str, Any], ranks: int) -> None:
    def build() -> nn.Module:
        return models.decoder(tied=True)

    config = settings(parallel, zero)
    found = verify(build, config, models.batches_for("decoder", 16, 3), loss_sum, Balanced, threads=ranks)
    assert found is not None and found.holds(), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


def test_each_parameter_counts_its_own_updates() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [{"x": torch.randn(8, 8, generator=generator), "turn": torch.full((8,), t)} for t in (0, 0, 1, 2, 0, 1)]
    config = settings({"data": 2}, {"stage": 1}) | {"train_batch_size": 8}
    found = verify(Turns, config, batches, lambda output, batch: output, Balanced, threads=2)
    assert found is not None and found.holds(), str(found)


@pytest.mark.parametrize(
    ("ranks", "parallel", "zero"),
    [
        (4, {"data": 2, "tensor": 2}, {"stage": 1}),
        wide(4, {"data": 2, "pipeline": 2}, {"stage": 3}),
        wide(2, {"data": 2}, {"stage": 0}),
    ],
)
def test_bytes_sent_are_those_of_the_plan(ranks: int, parallel: dict[str, Any], zero: dict[str, Any]) -> None:
    def body(world: World) -> list[str]:
        torch.manual_seed(3)
        config = {
            "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 4, "parallel": parallel,
            "zero_optimization": zero,
        }  # fmt: skip
        ids = torch.zeros(ROWS, SIZES.context, dtype=torch.long)
        example = {"input_ids": ids, "labels": ids}
        sizes = DecoderConfig(layers=2, width=SIZES.width, heads=SIZES.heads, context=SIZES.context)
        with engine.initialize(Decoder(sizes), config, loss_sum, example, Balanced, world=world) as eng:
            return [line for line in beside_plan(eng) if "sent" in line or "traffic" in line]

    assert run_thread_ranks(ranks, body) == [[]] * ranks


FIRST, THEN = range(2), range(2, 4)


def started(parallel: dict[str, Any], zero: dict[str, Any]) -> Engine:
    return engine.initialize(
        models.decoder(tied=True), settings(parallel, zero), loss_sum, models.batches_for("decoder", 1)[0], Balanced
    )


def train(eng: Engine, steps: range) -> dict[str, Tensor]:
    rank, ranks = eng.grid.coord().dp, eng.grid.dp
    batches = models.batches_for("decoder", 16)
    for step in steps:
        rows = batches[step % len(batches)]
        eng.train_batch({name: torch.chunk(value, ranks)[rank] for name, value in rows.items()})
    return eng.full_state_dict()


def go_on(folder: str, parallel: dict[str, Any], zero: dict[str, Any]) -> dict[str, Tensor]:
    with started(parallel, zero) as eng:
        eng.load_checkpoint(folder)
        return train(eng, THEN)


def on_grids(folder: str) -> list[dict[str, Tensor]]:
    """Body of a rank: a save of ZeRO 3, and what runs on other grids make of it."""
    with started({"data": 2}, {"stage": 3}) as eng:
        train(eng, FIRST)
        eng.save_checkpoint(folder).wait()
    places: list[Any] = [({"data": 2}, {"stage": 1}), ({"tensor": 2}, {"stage": 0}), ({"pipeline": 2}, {"stage": 0})]
    return [go_on(folder, *place) for place in places]


@pytest.mark.long
def test_a_run_goes_on_from_a_checkpoint_on_another_grid(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = [*run_ranks(on_grids, 2, str(tmp_path))[0], go_on(str(tmp_path), {}, {"stage": 0})]
    with started({}, {"stage": 0}) as eng:
        expected = train(eng, range(4))
    for weights in found:
        assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) <= 1e-5


class Hoarding(Balanced):
    """Keeps a count beside its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.made = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        super().step()


def test_what_does_not_last_is_refused() -> None:
    with pytest.raises(engine.ConfigError) as caught:
        engine.initialize(layers(), settings({}, {"stage": 0}), optimizer=Hoarding)
    assert "optimizer Hoarding updates whole parameters and keeps self.made outside of self.state" in str(caught.value)
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(engine.ConfigError, match="but the passed optimizer updates whole parameters, and the state"):
        engine.initialize(layers(), settings({}, offload), optimizer=Balanced)
    assert load_config(settings({}, offload)) is not None
