"""The exchange of boxes between ranks, against slices of the full tensor."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.parallel.context.cuts import contiguous, zigzag
from engine.parallel.context.recut import boxes_of, recut, sent_elements
from engine.parallel.context.sequences import ContextOfSequences
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError, Sets
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis

SHAPE = (2, 6, 37)


def _part(full: Tensor, sets: Sets, rank: int) -> Tensor:
    for dim, index in enumerate(sets):
        if index is not None:
            full = full.index_select(dim, torch.as_tensor(index.ranks[rank]))
    return full


def _drawn(size: int, ranks: int, seed: int) -> Index:
    draw = np.random.default_rng(seed)
    return Index([np.flatnonzero(draw.random(size) < share) for share in draw.random(ranks)], size)


WANTED = {
    "all": (None, None, None),
    "heads": (None, contiguous(6, 3), None),
    "another sharding": (None, None, contiguous(37, 3)),
    "shared heads": (None, Index([np.array([0, 1]), np.array([1, 2]), np.arange(2, 6)], 6), None),
    "random": (None, None, _drawn(37, 3, 0)),
    "two dims": (None, contiguous(6, 3), _drawn(37, 3, 1)),
}


@pytest.mark.parametrize("wanted", WANTED)
def test_elements_travel_to_those_who_want_them_and_gradients_back(wanted: str) -> None:
    have, want = (None, None, zigzag(37, 3)), WANTED[wanted]
    full = torch.randn(SHAPE, dtype=torch.float64)
    weights = [torch.randn(_part(full, want, rank).shape, dtype=torch.float64) for rank in range(3)]

    def body(axis: TensorAxis) -> tuple[Tensor, Tensor]:
        local = _part(full, have, axis.index).clone().requires_grad_()
        x = GlobalTensor(local, SHAPE, have, ContextOfSequences(axis))
        made = recut((x,), (want,), "test")[0].local
        torch.autograd.backward(made, weights[axis.index])
        assert local.grad is not None
        return made.detach(), local.grad

    expected = torch.zeros(SHAPE, dtype=torch.float64)
    for rank, weight in enumerate(weights):
        places = [
            torch.arange(n) if i is None else torch.as_tensor(i.ranks[rank]) for n, i in zip(SHAPE, want, strict=True)
        ]
        expected.index_put_(tuple(torch.meshgrid(*places, indexing="ij")), weight, accumulate=True)
    for rank, (made, grad) in enumerate(run_tensor_ranks(3, body)):
        assert torch.equal(made, _part(full, want, rank))
        assert torch.allclose(grad, _part(expected, have, rank), rtol=1e-15)


@pytest.mark.parametrize("wanted", WANTED)
def test_no_element_is_sent_that_nobody_wants(wanted: str) -> None:
    have, want = (None, None, zigzag(37, 3)), WANTED[wanted]
    number = torch.arange(2 * 6 * 37).view(SHAPE)
    sets = [[set(_part(number, each, rank).flatten().tolist()) for rank in range(3)] for each in (have, want)]
    for rank in range(3):
        wished = sum(len(sets[0][rank] & sets[1][other]) for other in range(3) if other != rank)
        assert sent_elements(SHAPE, have, want, 3)[rank] == wished


def test_shared_elements_have_no_sender() -> None:
    with pytest.raises(NoRuleError):
        boxes_of((4,), (Index([np.arange(4), np.arange(2)], 4),), (None,), 0, 2)
