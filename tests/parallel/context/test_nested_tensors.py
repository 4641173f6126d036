"""Global tensors over "cp" that have global tensors over "tp" as shards: values and gradients equal one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.context.cuts import zigzag
from engine.parallel.context.sequences import ContextOfSequences
from engine.parallel.grid import Grid
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.parallel.tensor.global_tensor.operands import cut_operand_as
from engine.parallel.tensor.global_tensor.redistribute import full, gradient_to_owner
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.tp_axis import TensorAxis

B, S, H, HEADS = 2, 8, 8, 4
Block = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _attention(x: Tensor, w_in: Tensor, w_out: Tensor, bias: Tensor, eager: bool) -> Tensor:
    parts = functional.linear(x, w_in).chunk(3, -1)
    q, k, v = (part.view(B, S, HEADS, H // HEADS).transpose(1, 2) for part in parts)
    if eager:
        hidden = torch.ones(S, S).triu(1).bool()
        out = (q @ k.transpose(-1, -2)).masked_fill(hidden, -1e9).softmax(-1) @ v
    else:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.linear(out.transpose(1, 2).reshape(B, S, H), w_out, bias)


BLOCKS: dict[str, Block] = {
    "column": lambda x, w_in, w_out, bias: functional.linear(x, w_in),
    "column, then the input": lambda x, w_in, w_out, bias: functional.linear(x, w_in).sum(-1, keepdim=True) * x,
    "row": lambda x, w_in, w_out, bias: functional.linear(functional.linear(x, w_in[:H]).tanh(), w_out, bias),
    "mean over positions": lambda x, w_in, w_out, bias: functional.linear(x, w_in[:H]).mean(1, keepdim=True) + x,
    "attention": partial(_attention, eager=False),
    "eager attention": partial(_attention, eager=True),
}


def _given() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (B, S, H), (3 * H, H), (H, H), (H,)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


def _loss(made: Tensor) -> Tensor:
    return (made * torch.arange(made.numel(), dtype=made.dtype).view(made.shape).sin()).sum()


def _indices() -> tuple[Index, Index]:
    """Heads of queries, keys and values on two tensor ranks, and the columns of the output's weight."""
    half = H // 2
    rows = [np.concatenate([np.arange(start, start + half) + part * H for part in range(3)]) for start in (0, half)]
    return Index(rows, 3 * H), Index([np.arange(half), np.arange(half, H)], H)


def _on_rank(block: Block, world: World) -> list[Any]:
    assert world.connect is not None
    grid = Grid(rank=world.rank, cp=2, tp=2)
    comm = Comm(grid, world.connect(grid))
    outer, inner = ContextOfSequences(TensorAxis(comm, "cp")), global_context(TensorAxis(comm, "tp"))
    (x, w_in, w_out, bias), (rows, columns), tp = _given(), _indices(), grid.index("tp")
    positions = zigzag(S, 2)
    sets = (None, positions, None)
    own_in = w_in.detach()[torch.as_tensor(rows.ranks[tp])].requires_grad_()
    own_out = w_out.detach()[:, torch.as_tensor(columns.ranks[tp])].requires_grad_()
    made = block(
        GlobalTensor(cut_operand_as(outer, x, sets), (B, S, H), sets, outer),
        GlobalTensor(own_in, (3 * H, H), (rows, None), inner),
        GlobalTensor(own_out, (H, H), (None, columns), inner),
        bias,
    )
    loss = gradient_to_owner(_loss(full(made, "output") if type(made) is GlobalTensor else made), outer.axis)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), x.grad, own_in.grad, own_out.grad, bias.grad]


@pytest.mark.parametrize("name", BLOCKS)
def test_values_and_gradients_equal_one_process(name: str) -> None:
    x, w_in, w_out, bias = _given()
    loss = _loss(BLOCKS[name](x, w_in, w_out, bias))
    loss.backward()  # type: ignore[no-untyped-call]
    rows, columns = _indices()
    found = run_thread_ranks(4, partial(_on_rank, BLOCKS[name]))
    for tp in range(2):
        first, second = found[tp], found[2 + tp]  # the context ranks of a tensor rank
        assert torch.allclose(first[0], loss) and torch.allclose(second[0], loss)
        whole = [x.grad, w_in.grad, w_out.grad, bias.grad]
        at: tuple[Any, ...] = (
            ...,
            torch.as_tensor(rows.ranks[tp]),
            (slice(None), torch.as_tensor(columns.ranks[tp])),
            ...,
        )
        for parts, grad, place in zip(zip(first[1:], second[1:], strict=True), whole, at, strict=True):
            if grad is not None:
                torch.testing.assert_close(sum(part for part in parts if part is not None), grad[place])
