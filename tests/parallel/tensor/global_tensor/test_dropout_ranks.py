"""Dropout on real ranks: masks differ where each rank holds its own, agree elsewhere, and generators agree after."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import checkpoint

from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.global_tensor.rig import index
from tests.parallel.tensor.sharded import open_comm
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


class Drawn(NamedTuple):
    """What one rank saw."""

    mask: Tensor
    again: Tensor
    state: Tensor
    untouched: bool
    gathers: dict[str, int]


def draw(kind: str | None, function: str) -> Drawn:
    """Body of a rank."""
    comm = open_comm()
    views = global_context(TensorAxis(comm))
    sets = (None, None if kind is None else index(kind, 96, 2), None, None)
    size = 96 if sets[1] is None else sets[1].counts[views.axis.index]
    ones = GlobalTensor(torch.ones(2, size, 4, 4, requires_grad=True), (2, 96, 4, 4), sets, views)

    def run(x: Tensor) -> Any:
        if function == "attention":
            return functional.scaled_dot_product_attention(x, x, torch.eye(4).expand(2, 96, 4, 4), dropout_p=0.5)
        if function == "inplace":
            return functional.dropout(x * 1, 0.5, True, True)
        return getattr(functional, function)(x, 0.5, True)

    torch.manual_seed(7)
    out = run(ones)
    mask = (out.local if isinstance(out, GlobalTensor) else out) == 0
    state = torch.get_rng_state()
    torch.manual_seed(7)
    out = checkpoint.checkpoint(run, ones, use_reentrant=False)
    again = (out.local if isinstance(out, GlobalTensor) else out) == 0
    before = torch.get_rng_state()
    functional.dropout(ones, 0.5, training=False)
    functional.dropout(ones, 0.0)
    untouched = torch.equal(before, torch.get_rng_state())
    loss: Any = out.sum()
    torch.autograd.backward(loss.local if isinstance(loss, GlobalTensor) else loss)
    comm.close()
    return Drawn(mask, again, state, untouched, views.gathers)


@pytest.mark.parametrize("function", ["dropout", "attention", wide("inplace"), "alpha_dropout"])
@pytest.mark.parametrize("kind", ["blocks", wide("thirds"), None, "shared"])
def test_masks(run_ranks: RunRanks, kind: str | None, function: str) -> None:
    if function != "dropout" and kind not in ("blocks", "shared"):
        kind = "interleaved" if kind else None
    first, second = run_ranks(draw, 2, kind, function)
    if function != "alpha_dropout":  # it has no zeros
        assert 0.4 < first.mask.float().mean() < 0.6
        own = kind is not None and not first.gathers
        assert torch.equal(first.mask, second.mask) != own
    assert torch.equal(first.state, second.state)
    assert first.untouched and second.untouched
    assert all(torch.equal(one.mask, one.again) for one in (first, second))
    assert bool(first.gathers) == (kind == "shared" and function in ("attention", "alpha_dropout"))
    if kind == "shared" and function == "dropout":  # index 47 is held by both
        assert torch.equal(first.mask[:, 47], second.mask[:, 0])
