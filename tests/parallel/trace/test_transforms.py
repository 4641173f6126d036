"""Transforms of torch.func around blocks: a trace refuses them, and data ranks train them as torch does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import PlanError
from engine.parallel.trace.tracer import trace_model

RunRanks = Callable[..., list[Any]]
Way = Callable[[nn.Module, Tensor], Tensor]


def vjp(block: nn.Module, x: Tensor) -> Tensor:
    pulled: Any = torch.func.vjp(block, x)
    found: Tensor = pulled[0] + pulled[1](torch.ones_like(pulled[0]))[0]
    return found


def functional_call(block: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = torch.func.functional_call(block, dict(block.named_parameters()), (x,))
    return found


WAYS: dict[str, Way] = {
    "vmap": lambda block, x: torch.func.vmap(block)(x),
    "grad": lambda block, x: x + torch.func.grad(lambda y: block(y).square().sum())(x),
    "vjp": vjp,
    "jvp": lambda block, x: torch.func.jvp(block, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda block, x: torch.func.vmap(torch.func.jacrev(block))(x).sum(-1),
}


class Transformed(nn.Module):
    """Four blocks, the second one inside a transform."""

    def __init__(self, way: Way, after: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.way, self.after = way, after

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = self.way(block, x) if index == 1 else block(x)
        return self.after(x)


def square(out: Tensor, batch: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize("name", WAYS)
def test_a_block_inside_a_transform_is_refused_with_its_line(name: str) -> None:
    model = Transformed(WAYS[name])
    with pytest.raises(PlanError, match=r"test_transforms.py:\d+ runs .* inside a transform of torch.func"):
        trace_model(model, lambda: square(model(torch.ones(2, 8)), torch.ones(2, 8)))


def test_an_activation_inside_a_transform_is_refused_with_its_line() -> None:
    model = Transformed(lambda block, x: block(x), torch.func.vmap(lambda row: row * 2))
    with pytest.raises(PlanError, match="an operation on activations inside a transform"):
        trace_model(model, lambda: square(model(torch.ones(2, 8)), torch.ones(2, 8)))


def test_a_mask_that_a_transform_makes_of_positions_is_traced() -> None:
    def masked(out: Tensor) -> Tensor:
        def later(row: Tensor) -> Tensor:
            return row.new_ones((), dtype=torch.bool) & (row >= 1)

        kept: Tensor = torch.func.vmap(later)(torch.arange(out.shape[0]))
        return out * kept[:, None]

    model = Transformed(lambda block, x: block(x), masked)  # transformers makes the masks of Gemma 3 so
    assert len(trace_model(model, lambda: square(model(torch.ones(2, 8)), torch.ones(2, 8))).calls) == 4


def test_a_functional_call_is_traced() -> None:
    model = Transformed(functional_call)
    assert len(trace_model(model, lambda: square(model(torch.ones(2, 8)), torch.ones(2, 8))).calls) == 4


def train(stage: int) -> dict[str, float]:
    """Body of a rank: the largest difference of the weights from one process, by transform."""
    config = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    }  # fmt: skip
    found = {}
    for name, way in (WAYS | {"functional_call": functional_call}).items():
        alone, batch = Transformed(way), torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2, eps=1e-5)
        with engine.initialize(Transformed(way), config, square) as eng:
            for _ in range(3):
                square(alone(batch), batch).backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
                eng.train_batch(batch.chunk(2)[eng.grid.rank])
            weights = eng.full_state_dict()
        far = [float((weights[key] - value).abs().max()) for key, value in alone.state_dict().items() if weights]
        found[name] = max(far, default=0.0)
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_data_ranks_train_transforms_as_one_process(stage: int, run_ranks: RunRanks) -> None:
    for found in run_ranks(train, 2, stage):
        assert all(far <= 1e-5 for far in found.values()), found
