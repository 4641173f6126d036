"""Small mixtures of experts, and thread ranks that share them without an engine."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid

Result = TypeVar("Result")
WIDTH = 6


class Stacked(nn.Module):
    """All experts of a layer in two parameters; an expert without rows is skipped."""

    def __init__(self, experts: int, width: int = WIDTH, inner: int = 5) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(experts)
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, inner, width, generator=draw))
        self.down = nn.Parameter(torch.randn(experts, width, inner, generator=draw))

    def one(self, x: Tensor, number: int) -> Tensor:
        """Returns the result of an expert."""
        return functional.silu(x @ self.up[number].T) @ self.down[number].T

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighted sum of each row's experts."""
        out = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            row, slot = torch.where(index == number)
            if len(row):
                out = out.index_add(0, row, self.one(hidden[row], number) * weights[row, slot, None])
        return out


class Member(nn.Module):
    """Expert of a list."""

    def __init__(self, width: int = WIDTH, inner: int = 5, out: int | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, out or width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a result for each row."""
        found: Tensor = self.down(functional.silu(self.up(x)))
        return found


class Listed(nn.Module):
    """Block with a gate and a list of experts, which its own loop calls; an expert without rows is skipped."""

    seen: Tensor

    def __init__(self, experts: int, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.calls = chosen, 0
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Member() for _ in range(experts))
        self.register_buffer("seen", torch.zeros(()))

    def scores(self, x: Tensor) -> Tensor:
        """Returns the scores of the experts for each row."""
        found: Tensor = self.gate(x)
        return found

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the rows plus the weighted sums of their experts."""
        self.seen += 1
        self.calls += 1
        x = hidden.reshape(-1, hidden.shape[-1])
        weights, index = self.scores(x).softmax(-1).topk(self.chosen)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(index == number)
            if len(row):
                out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return hidden + out.view_as(hidden)


class Always(Listed):
    """Block that calls every expert, the last one always without a row."""

    def __init__(self, experts: int = 5) -> None:
        super().__init__(experts)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the rows plus the weighted sums of their experts."""
        self.seen += 1
        self.calls += 1
        x = hidden.reshape(-1, WIDTH)
        weights, index = self.scores(x)[:, :-1].softmax(-1).topk(self.chosen)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(index == number)
            out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return hidden + out.view_as(hidden)


def on_expert_ranks(ranks: int, body: Callable[[Comm], Result]) -> list[Result]:
    """Runs ``body`` on thread ranks that all share the experts of a layer; returns the results in rank order."""

    def rank(world: World) -> Result:
        grid = Grid(dp=ranks, experts=ranks, rank=world.rank)
        assert world.connect is not None
        return body(Comm(grid, world.connect(grid)))

    return run_thread_ranks(ranks, rank)
