"""Compares the timeline of a real pipeline of sleeping blocks with the predicted timeline.

    python -m benchmarks sleeping_blocks [--seconds 0.2] [--write-figures]         starts four ranks under torchrun

Sleeping ranks need no CPU, so that a small machine measures how long ranks wait for each other.
"""

import argparse
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine
from benchmarks.harness.figures import record_text
from benchmarks.harness.startup import torchrun
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.parallel.pipeline.report.svg import svg
from engine.parallel.pipeline.report.text import Panel, draw_panels
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS
from engine.parallel.pipeline.schedule.simulate import Cost, StepTimeline, simulate
from engine.parallel.tensor import deferred_linear as product

RANKS, MICROBATCHES, BLOCKS = 4, 8, 8


class Sleep(torch.autograd.Function):
    """Identity with a delay in forward and backward; both are noted in ``asleep``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, backward_seconds: float, asleep: list[float]) -> Tensor:
        ctx.seconds, ctx.asleep = backward_seconds, asleep
        _sleep(seconds, asleep)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _sleep(ctx.seconds, ctx.asleep)
        return grad, None, None, None


def _sleep(seconds: float, asleep: list[float]) -> None:
    """Sleeps, and notes the seconds that it took: on a busy machine, more than asked for."""
    began = time.perf_counter()
    time.sleep(seconds)
    asleep.append(time.perf_counter() - began)


class Sleeper(nn.Module):
    """Block that sleeps, then runs a linear layer."""

    def __init__(self, seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.seconds, self.backward_seconds = seconds, backward_seconds

    def forward(self, x: Tensor) -> Tensor:
        """Computes x [B, 4] -> [B, 4] after the delay."""
        late: Tensor = Sleep.apply(x, self.seconds, self.backward_seconds, [])  # type: ignore[no-untyped-call]
        out: Tensor = self.linear(late)
        return out


class Sleepers(nn.Module):
    """Model of eight sleeping blocks that returns the loss."""

    def __init__(self, seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Sleeper(seconds, backward_seconds) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Computes x [B, 4] -> loss, 0-dim."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@contextmanager
def _sleep_over_weights(seconds: float) -> Iterator[None]:
    """Within, a weight gradient that waits takes as long."""
    plain = product.weight_gradient

    def late(x: Tensor, dy: Tensor, dtype: torch.dtype, transposed: bool, kernels: Kernels = REFERENCE) -> Tensor:
        time.sleep(seconds)
        return plain(x, dy, dtype, transposed, kernels)

    product.weight_gradient = late
    try:
        yield
    finally:
        product.weight_gradient = plain


def run_asleep(kind: str, virtual_stages: int, seconds: float) -> StepTimeline:
    """Runs two steps as one rank; returns the second's timeline. A microbatch takes ``seconds`` forward and twice that
    backward.
    """
    torch.manual_seed(1)
    block = seconds * RANKS / BLOCKS
    splits = SCHEDULE_KINDS[kind].splits
    each = BLOCKS // (RANKS * virtual_stages)  # by FLOPs, of which sleep has none, stages would not be even
    starts = [f"blocks.{number}" for number in range(each, BLOCKS, each)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "parallel": {"pipeline": RANKS, "schedule": kind, "virtual_stages": virtual_stages, "split": starts},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = Sleepers(block, block if splits else 2 * block)
    with _sleep_over_weights(block), engine.initialize(model, config, example_batch=torch.randn(1, 4)) as eng:
        for _ in range(2):
            eng.train_batch(torch.randn(MICROBATCHES, 4))
        return eng.timeline()


def predict(measured: StepTimeline, virtual_stages: int, seconds: float) -> StepTimeline:
    """Simulates the measured schedule with the blocks' delays."""
    chunk = seconds / virtual_stages
    return simulate(measured.schedule, Cost(chunk, 2 * chunk, chunk, chunk))


CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("looped-bfs", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2))
DRAWN = "zb-v"
LIMIT = 0.10
"""Maximum difference between measured and predicted idle fraction."""
DRAWINGS = Path(__file__).parents[2] / "docs" / "drawings"


def main(command: Sequence[str] | None = None) -> int:
    """Runs every kind; rank 0 prints, and with ``--write-figures`` updates the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sleeping_blocks", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="what a microbatch of a rank takes forward")
    parser.add_argument(
        "--write-figures", action="store_true", help="keep table and picture, and show them in the documents"
    )
    arguments = parser.parse_args(command)
    if "RANK" not in os.environ:
        told = ["--seconds", str(arguments.seconds), *["--write-figures"] * arguments.write_figures]
        return subprocess.run(torchrun(RANKS, "benchmarks", "sleeping_blocks", *told), check=False).returncode
    lines = [
        "| schedule | idle, predicted | idle, measured | step, predicted | step, measured |",
        "|---|---|---|---|---|",
    ]
    furthest, panels = 0.0, []
    for kind, stages in CASES:
        measured = run_asleep(kind, stages, arguments.seconds)
        predicted = predict(measured, stages, arguments.seconds)
        furthest = max(furthest, abs(measured.bubble - predicted.bubble))
        times = f"{predicted.makespan:.2f} s | {measured.makespan:.2f} s"
        lines.append(f"| `{kind}` | {predicted.bubble:.1%} | {measured.bubble:.1%} | {times} |")
        if kind == DRAWN:
            panels = [Panel(predicted, "predicted", seconds=True), Panel(measured, "measured", seconds=True)]
    passed = furthest < LIMIT
    verdict = f"furthest apart {furthest:.1%}; limit {LIMIT:.0%} -> {'pass' if passed else 'FAIL'}"
    if int(os.environ["RANK"]) == 0:
        table = "\n".join(lines)
        print(draw_panels(panels), table, verdict, sep="\n")
        if arguments.write_figures:
            (DRAWINGS / "timeline.svg").write_text(svg(panels), encoding="utf-8")
            record_text("timeline", f"{table}\n\n{verdict[0].upper()}{verdict[1:]}.")
    return 0 if passed else 1
