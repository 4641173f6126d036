"""What runs on zeros in a trace, because it does not run without content, is written down; a mistake of ours is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel.trace.meta_tensors import MetaTwins
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.tracer import trace_model

Change = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A linear layer, then ``change``."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x))


class Chain(nn.Module):
    """Two of them."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(change) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def traced(change: Change) -> ModelTrace:
    model = Chain(change)
    return trace_model(model, lambda: model(torch.ones(3, 4)))


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 0 else x


def plain(x: Tensor) -> Tensor:
    return x.relu()


def selecting(x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


@pytest.mark.parametrize(("change", "name"), [(branching, "__bool__"), (selecting, "__getitem__")])
def test_what_needs_content_is_counted_by_place(change: Change, name: str) -> None:
    found = traced(change).on_zeros
    assert [(entry.operation, entry.where) for entry in found] == [(name, "in blocks.0"), (name, "in blocks.1")]
    assert all(entry.why and "\n" not in entry.why for entry in found)


def test_what_runs_without_content_is_not() -> None:
    assert traced(plain).on_zeros == ()


def test_a_mistake_of_this_package_does_not_become_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(twins: MetaTwins, tree: Any) -> Any:
        raise KeyError("of this package")

    monkeypatch.setattr(MetaTwins, "swap", broken)
    with pytest.raises(KeyError, match="of this package"):
        traced(plain)
