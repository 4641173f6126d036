"""A model of blocks that sleep: the timeline of a real pipeline beside the predicted one.

    python -m benchmarks.sleepers [--seconds 0.1] [--svg benchmarks/results/timeline.svg]

Ranks that sleep need no processor, so that a small machine can show how many of them wait for each other.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.parallel.pipeline import weights
from engine.parallel.pipeline.check import Cost, Timeline, simulate
from engine.parallel.pipeline.schedule import KINDS

RANKS, MICROBATCHES, BLOCKS = 4, 8, 8


class Sleep(torch.autograd.Function):
    """Passes its input on, late; its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None, None


class Sleeper(nn.Module):
    """A block that takes its time."""

    def __init__(self, seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.seconds, self.backward_seconds = seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 4] -> [B, 4]."""
        late: Tensor = Sleep.apply(x, self.seconds, self.backward_seconds)  # type: ignore[no-untyped-call]
        out: Tensor = self.linear(late)
        return out


class Sleepers(nn.Module):
    """Eight blocks; gives the loss."""

    def __init__(self, seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Sleeper(seconds, backward_seconds) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, 4] -> 0-dim."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _sleep_over_weights(seconds: float) -> None:
    """From now on a weight gradient that waits takes as long."""
    plain = weights._weight_gradient

    def late(x: Tensor, dy: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
        time.sleep(seconds)
        return plain(x, dy, dtype, transposed)

    weights._weight_gradient = late


def run_asleep(kind: str, virtual_stages: int, seconds: float) -> Timeline:
    """Body of a rank: the second step. A microbatch of a rank takes ``seconds`` forward and twice that backward."""
    torch.manual_seed(1)
    block = seconds * RANKS / BLOCKS
    splits = KINDS[kind].splits
    _sleep_over_weights(block)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "parallel": {"pipeline": RANKS, "schedule": kind, "virtual_stages": virtual_stages},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = Sleepers(block, block if splits else 2 * block)
    with engine.initialize(model, config, example_batch=torch.randn(1, 4)) as eng:
        for _ in range(2):
            eng.train_batch(torch.randn(MICROBATCHES, 4))
        return eng.timeline()


def predict(measured: Timeline, virtual_stages: int, seconds: float) -> Timeline:
    """The same schedule as its data says it goes."""
    chunk = seconds / virtual_stages
    return simulate(measured.schedule, Cost(chunk, 2 * chunk, chunk, chunk))


CASES = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2))
