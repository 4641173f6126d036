"""Training on a grid of emulated devices, whose ranks are threads of this process, and the same on the CPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.tensor.tp_axis import Overlap, TensorAxis
from tests import models
from tests.emulated_device.device import NAME, load
from tests.emulated_device.streamed_backend import streamed

ROWS = 8
STEPS = 3
Enter = Callable[[World], World]


@dataclass(frozen=True)
class Trial:
    """What is trained, and how."""

    parallel: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    dropout: float = 0.0
    tied: bool = False
    overlap: bool = False
    """Compute beside the collectives of tensor ranks, however small they are."""

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return prod(self.parallel.get(axis, 1) for axis in ("data", "tensor", "pipeline"))

    @property
    def config(self) -> dict[str, Any]:
        """Microbatches of one row, clipping active, operators of torch."""
        return {
            "train_batch_size": ROWS,
            "train_micro_batch_size_per_gpu": 1,
            "parallel": {"data": 1, **self.parallel},
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 6000},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
            "gradient_clipping": 0.25,
            "kernels": "reference",
            **self.changes,
        }

    def build(self) -> nn.Module:
        """The model."""
        return models.decoder(tied=self.tied, layers=self.layers, dropout=self.dropout)


@dataclass(frozen=True)
class Trained:
    """What rank 0 has in the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]

    def differs_from(self, other: "Trained") -> str:
        """The first thing that is not equal to the bit, in words; empty if all is."""
        if self.losses != other.losses:
            return f"losses {self.losses} and {other.losses}"
        if repr(self.norms) != repr(other.norms):  # NaN is not equal to itself, and skipped steps have it
            return f"norms {self.norms} and {other.norms}"
        return next((name for name, weight in self.weights.items() if not torch.equal(weight, other.weights[name])), "")


def train(trial: Trial, world: World, loss_fn: Any = loss_sum) -> Trained:
    """Body of a rank."""
    batches = models.batches_for("decoder", ROWS, STEPS)
    # torch has an attention of its own for the CPU, which other devices lack
    with sdpa_kernel(SDPBackend.MATH):
        micro = {name: rows[:1] for name, rows in batches[0].items()}
        with engine.initialize(trial.build(), trial.config, loss_fn, micro, world=world) as eng:
            share = ROWS // eng.grid.dp
            rows = slice(eng.grid.coord().dp * share, (eng.grid.coord().dp + 1) * share)
            reports = [eng.train_batch({name: all_[rows] for name, all_ in batch.items()}) for batch in batches]
            weights = eng.full_state_dict()
    return Trained([one.loss for one in reports], [one.grad_norm for one in reports], weights)


def on_cpu(trial: Trial) -> Trained:
    """The trial with ranks on the CPU."""
    load()  # before the first backward of the process
    with overlapping(trial):
        return run_thread_ranks(trial.ranks, lambda world: train(trial, world))[0]


def on_devices(
    trial: Trial, enter: Enter = streamed, body: Callable[[Trial, World], Any] = train, shared: bool = False
) -> Any:
    """The trial with a device for each rank, or one for all; collectives in the order of streams.

    Returns:
        What rank 0 returns.
    """
    load()
    devices = [torch.device(NAME, 0 if shared else index) for index in range(trial.ranks)]
    with overlapping(trial):
        return run_thread_ranks(trial.ranks, lambda world: body(trial, enter(world)), devices)[0]


@contextmanager
def overlapping(trial: Trial) -> Iterator[None]:
    """Let both devices overlap, if the trial does."""
    before = TensorAxis.overlap
    TensorAxis.overlap = Overlap(frozenset({"cpu", NAME}), 0) if trial.overlap else before
    try:
        yield
    finally:
        TensorAxis.overlap = before
