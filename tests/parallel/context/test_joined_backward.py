"""Every rank joins the collectives of a backward, also a rank that has no row of a result, or none that is read."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.parallel.context.cuts import contiguous, zigzag
from engine.parallel.context.recurrence.placed import PlacedTensor
from engine.parallel.context.sequences import ContextOfSequences
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.verify import verify
from tests.parallel.context.test_context_training import config_of
from tests.selection import wide

LENGTH, WIDTH = 8, 4
WINDOW = torch.linspace(-1, 1, WIDTH * WIDTH * 2, dtype=torch.float64).view(WIDTH, WIDTH, 2)


def _written(x: Any) -> Any:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def _measured(x: Any) -> Any:
    """A state that a measure without a gradient reads on another rank first."""
    state = x[:, 0] * 2
    with torch.no_grad():
        scale = (state * x[:, 7]).abs()
    made = state * x[:, 7] * scale
    return torch.stack([made, x[:, 0], x[:, 1], made, x[:, 7], x[:, 6], made], 1)


LAYERS: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(-2),
    "cumsum from the end": lambda x: x.flip(1).cumsum(1).flip(1),
    "cumsum of a few": lambda x: x[:, :2].cumsum(1),
    "cumprod of the last": lambda x: x[:, 5:].cumprod(1),
    "convolution of a few": lambda x: functional.conv1d(x[:, :3].mT, WINDOW, padding=1).mT,
    "convolution with few results": lambda x: functional.conv1d(x.mT, WINDOW, dilation=5).mT,
    "written shift": _written,
    "last of a cumsum": lambda x: x.cumsum(1)[:, -1],
    "product with the last of a cumsum": lambda x: x.mT.cumsum(-1).mT[:, -1:] * x,
    "read without a gradient": _measured,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_rank_joins_the_backward_of_a_layer(layer: str) -> None:
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one = x.clone().requires_grad_()
    wanted = LAYERS[layer](one)
    grad = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view_as(wanted)
    wanted.backward(grad)
    assert one.grad is not None
    for cut, ranks in ((zigzag, 2), (contiguous, 3)):
        index = cut(LENGTH, ranks)

        def body(axis: TensorAxis, index: Any = index) -> tuple[Tensor, Tensor | None]:
            context = ContextOfSequences(axis)
            context.positions_of(LENGTH)
            local = x.index_select(1, torch.as_tensor(index.ranks[axis.index])).requires_grad_()
            made = LAYERS[layer](GlobalTensor(local, tuple(x.shape), (None, index, None), context))
            whole = made.everywhere("test") if type(made) is PlacedTensor else full(made, "test")
            torch.autograd.backward((whole * grad / axis.size).sum())
            return whole.detach(), local.grad

        for held, (whole, found) in zip(index.ranks, run_tensor_ranks(ranks, body), strict=True):
            torch.testing.assert_close(whole, wanted.detach())
            torch.testing.assert_close(found, one.grad[:, held])


class Pooled(nn.Module):
    """Classifier of a sequence by the state of one position."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool = pool
        self.table, self.qkv, self.head = nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        if self.pool == "state of a loop":
            state: Any = 0
            for place in range(x.shape[1]):
                state = torch.tanh(state + x[:, place])
        else:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            x = x + functional.scaled_dot_product_attention(q, k, v)[:, 0]
            state = x[:, 0 if self.pool == "first" else -1]
        return functional.cross_entropy(self.head(state), labels)


@pytest.mark.parametrize("pool", ["first", wide("last"), wide("state of a loop")])
def test_a_loss_of_one_position_trains_as_one_process(pool: str) -> None:
    draw = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, 31, (4, 8), generator=draw), torch.randint(0, 5, (4,), generator=draw)
    config = config_of({"data": 1, "context": 2})
    result = verify(partial(Pooled, pool), config, [{"input_ids": ids, "labels": labels}] * 2, None, threads=2)
    assert result is not None and result.holds(), str(result)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_row_that_every_rank_has_counts_once_in_a_cross_entropy(reduction: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=draw)
    labels = torch.randint(0, WIDTH, (2, LENGTH), generator=draw)
    labels[0, 3] = -100

    def loss(x: Any) -> Tensor:
        y = torch.cat([x[:, :1], x[:, 1:] * 2], 1)
        flat = functional.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction=reduction)
        return flat + functional.cross_entropy(y.mT, labels, reduction=reduction)

    one = x.clone().requires_grad_()
    wanted = loss(one)
    torch.autograd.backward(wanted)
    assert one.grad is not None
    index = zigzag(LENGTH, 2)

    def body(axis: TensorAxis) -> tuple[Tensor, Tensor | None]:
        context = ContextOfSequences(axis)
        context.positions_of(LENGTH)
        local = x.index_select(1, torch.as_tensor(index.ranks[axis.index])).requires_grad_()
        made = loss(GlobalTensor(local, tuple(x.shape), (None, index, None), context))
        torch.autograd.backward(made / axis.size)
        return made.detach(), local.grad

    for held, (made, found) in zip(index.ranks, run_tensor_ranks(2, body), strict=True):
        torch.testing.assert_close(made, wanted.detach())
        torch.testing.assert_close(found, one.grad[:, held])
