"""Products of experts on other ranks: kernels of real processes, late at random, against plain torch on one rank."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.overlap import ExpertRows
from engine.parallel.comm.symmetric_memory import SlotSizes
from engine.parallel.tensor.overlap.routed_products import (
    AllToAll,
    ExpertRoute,
    dispatch_product,
    dispatch_product_reference,
    product_return,
    product_return_reference,
)
from tests.kernels.interpreter import repair
from tests.parallel.tensor.sharded import open_comm
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
K, N, X = 16, 32, 2


def whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def random_counts(ranks: int, call: int) -> Tensor:
    """Half of all experts get nothing from a rank, and in every third call a rank has nothing at all."""
    chance = torch.Generator().manual_seed(call)
    counts = torch.randint(0, 12, (ranks, X * ranks), generator=chance)
    counts *= torch.rand(counts.shape, generator=chance) < 0.5
    counts[call % ranks] *= call % 3 > 0
    return counts


class InOneProcess:
    """What all ranks compute, on this one: through a list of every rank's rows that gradients pass."""

    def __init__(self, counts: Tensor, call: int) -> None:
        ranks = range(len(counts))
        self.views = [ExpertRows(counts=counts, rank=rank) for rank in ranks]
        self.tokens = [whole_numbers(view.own, K, seed=100 * call + view.rank).requires_grad_() for view in self.views]
        self.first = [whole_numbers(X, K, N, seed=10 * call + rank).requires_grad_() for rank in ranks]
        self.second = [whole_numbers(X, N, K, seed=10 * call + 5 + rank).requires_grad_() for rank in ranks]

    def outputs(self) -> list[Tensor]:
        """Of each rank: tokens to experts, both products, and back."""
        sent = [view.to_owners(tokens) for view, tokens in zip(self.views, self.tokens, strict=True)]
        back = list[list[Tensor]]()

        def received(rank: int) -> AllToAll:
            return lambda parts: [each[rank] for each in sent]

        def returned(parts: list[Tensor]) -> list[Tensor]:
            back.append(parts)
            return parts

        for view, own, first, second in zip(self.views, self.tokens, self.first, self.second, strict=True):
            inner = dispatch_product_reference(own, first, view, received(view.rank))
            product_return_reference(inner, second, view, returned)
        return [torch.cat([each[rank] for each in back]) for rank in range(len(back))]


def differences(route: ExpertRoute, plain: InOneProcess) -> list[str]:
    """Where this rank's results and gradients are not those of one process."""
    rank, wanted = route.rows.rank, plain.outputs()
    leaves = [held[rank].detach().clone().requires_grad_() for held in (plain.tokens, plain.first, plain.second)]
    tokens, first, second = leaves
    found = product_return(dispatch_product(tokens, first, route), second, route)
    seeds = [whole_numbers(*y.shape, seed=7 + index) for index, y in enumerate(wanted)]
    torch.autograd.backward(wanted, seeds)
    ours = [found, *torch.autograd.grad(found, leaves, seeds[rank])]
    true = [wanted[rank], *(held[rank].grad for held in (plain.tokens, plain.first, plain.second))]
    names = ("outputs", "tokens", "first", "second")
    return [name for name, a, b in zip(names, ours, true, strict=True) if b is None or not torch.equal(a, b)]


def late(calls: int, most: float) -> tuple[int, list[str]]:
    """Body of a rank: calls with other counts each, after a random rest; where a result is not that of one process."""
    repair()
    comm = open_comm()
    sizes = SlotSizes(ranks=comm.grid.tp, capacity=1 << 12, most=16)
    buffer = comm.open_symmetric("tp", sizes, 100.0)
    assert buffer is not None
    rest, wrong = torch.Generator().manual_seed(buffer.mailbox.rank), list[str]()
    for call in range(calls):
        time.sleep(most * float(torch.rand(1, generator=rest)))
        counts = random_counts(sizes.ranks, call)
        rows = ExpertRows(counts=counts, rank=buffer.mailbox.rank)
        route = ExpertRoute(rows=rows, buffer=buffer, kernels=Kernels("triton") if call % 2 else REFERENCE)
        wrong += [f"{name} of call {call}" for name in differences(route, InOneProcess(counts, call))]
    made = buffer.next_epoch() - 1
    comm.close()
    return made, wrong


@pytest.mark.parametrize(("ranks", "calls"), [(2, 2), wide(2, 30), wide(4, 9), wide(8, 4)])
def test_outputs_and_gradients_of_processes_are_those_of_one(run_ranks: RunRanks, ranks: int, calls: int) -> None:
    assert run_ranks(late, ranks, calls, 0.02, seconds=250.0) == [(4 * calls, [])] * ranks


class Told:
    """Memory that holds no call: what does not fit is refused before anything is sent."""

    sizes = SlotSizes(ranks=2, capacity=512, most=4)

    def fits(self, size: int, tiles: int) -> bool:
        return size <= self.sizes.capacity and tiles <= self.sizes.most


@pytest.mark.parametrize(
    ("rows", "inputs", "dtype", "sentence"),
    [
        (8, K, torch.float32, "to another rank, but route.buffer has capacity = 512 bytes and most = 4 tiles"),
        (3, K, torch.float32, r"shape \(3, 16\) and expert weights \(2, 16, 32\), but the counts sum to 8"),
        (8, K, torch.float64, "rows are torch.float64 and experts torch.float64"),
        (8, 6, torch.float16, "6 inputs and 32 outputs in torch.float16, .* make both feature sizes multiples of 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_one_sentence(rows: int, inputs: int, dtype: torch.dtype, sentence: str) -> None:
    counts = torch.tensor([[8, 0, 0, 0], [0, 0, 0, 8]])
    route = ExpertRoute(rows=ExpertRows(counts=counts, rank=0), buffer=Told(), kernels=REFERENCE)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=sentence):
        dispatch_product(torch.ones(rows, inputs, dtype=dtype), torch.ones(X, inputs, N, dtype=dtype), route)
