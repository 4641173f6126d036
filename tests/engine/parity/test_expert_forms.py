"""Home-made mixtures with stacks of experts in every form of call: over expert ranks equal to one process."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.verify import verify
from tests.parallel.experts.stacks import EXPERTS, WIDTH, Counted, Flattened, Major, Normed
from tests.selection import wide

VOCABULARY, LENGTH, CHOSEN = 32, 6, 2
CONFIG: Mapping[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    "gradient_clipping": 0.05,
}


class Mixture(nn.Module):
    """Router with two experts of each row, and the stack of experts in its form of call."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), kind()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, numbers = self.router(rows).softmax(-1).topk(CHOSEN)
        if isinstance(self.experts, Counted):
            order = numbers.flatten().argsort(stable=True)
            counts = functional.one_hot(numbers.flatten(), EXPERTS).sum(0)
            made = self.experts(rows[order // CHOSEN], counts) * weights.flatten()[order][:, None]
            out = torch.zeros_like(rows).index_add(0, order // CHOSEN, made)
        elif isinstance(self.experts, Major):
            gates = torch.zeros(len(rows), EXPERTS).scatter(1, numbers, weights)
            out = (self.experts(rows.expand(EXPERTS, -1, -1)) * gates.t()[..., None]).sum(0)
        else:
            out = self.experts(x if isinstance(self.experts, Flattened) else rows, numbers, weights)
        return x + out.view_as(x)


class Model(nn.Module):
    """Two mixtures between an embedding and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Mixture(kind) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator),) for _ in range(3)]


def check(kind: type[nn.Module], grid: Mapping[str, int], stage: int) -> None:
    config = {**CONFIG, "parallel": dict(grid), "zero_optimization": {"stage": stage}}
    ranks = grid["data"] * grid.get("tensor", 1) * grid.get("pipeline", 1)
    found = verify(partial(Model, kind), config, batches(), threads=ranks)
    assert found is not None
    assert min(found.reference.norms) > CONFIG["gradient_clipping"], "every step is clipped"
    assert found.holds(), str(found)


@pytest.mark.parametrize("kind", [Counted, wide(Flattened), wide(Major), Normed])
def test_form_over_two_expert_ranks_is_equal_to_one_process(kind: type[nn.Module]) -> None:
    check(kind, {"data": 2, "expert": 2}, 1)


def test_vectors_of_all_experts_are_summed_over_tensor_ranks() -> None:
    check(Normed, {"data": 2, "expert": 2, "tensor": 2}, 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Counted, Flattened, Major, Normed])
@pytest.mark.parametrize(
    ("grid", "stage"),
    [
        ({"data": 4, "expert": 4}, 2),
        ({"data": 4, "expert": 2}, 3),
        ({"data": 2, "expert": 2, "tensor": 2}, 1),
        ({"data": 2, "expert": 2, "pipeline": 2}, 1),
        ({"data": 2, "expert": 2, "tensor": 2, "pipeline": 2}, 0),
    ],
)
def test_form_on_every_grid_is_equal_to_one_process(kind: type[nn.Module], grid: Mapping[str, int], stage: int) -> None:
    if kind is Counted and ("tensor" in grid or "pipeline" in grid):
        pytest.skip("the stack reads the content of its counts, which a trace of shapes does not have")
    check(kind, grid, stage)
