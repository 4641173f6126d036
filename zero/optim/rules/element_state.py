"""Optimizer state of every element, as tensors in the shapes of the parameters, in any stored form."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.zero.optim.composite import CompositeOptimizer
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

ElementState = dict[nn.Parameter, dict[str, Tensor]]
"""Per-element state by flat optimizer parameter, then by name."""


def element_state(optimizer: ShardedOptimizer, device: torch.device | None = None) -> ElementState:
    """Returns the state tensors, or decoded copies on ``device`` of encoded state; empty before the first update."""
    inner = optimizer.inner
    known = [place for place in optimizer.places if place.parameter in inner.state]
    if isinstance(inner, FlatOptimizer):
        return {place.parameter: inner.values(place.parameter, device) for place in known}
    return {
        place.parameter: {
            name: value
            for name, value in inner.state[place.parameter].items()
            if isinstance(value, Tensor) and name != "step" and value.shape == place.parameter.shape
        }
        for place in known
    }


def kept_encoded(optimizer: ShardedOptimizer, parameter: nn.Parameter) -> bool:
    """Returns True if the state of ``parameter`` is encoded, so that ``element_state`` returns copies."""
    return isinstance(optimizer.inner, FlatOptimizer) and optimizer.inner.encoded(parameter)


def keep_state(optimizer: ShardedOptimizer, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Encodes and stores changed copies from ``element_state``; does nothing for state that is not encoded."""
    inner = optimizer.inner
    for parameter, values in state.items():
        if isinstance(inner, FlatOptimizer) and inner.encoded(parameter):
            inner.keep(parameter, values)


@contextmanager
def opened_state(optimizer: ShardedOptimizer) -> Iterator[ElementState]:
    """Yields the state for in-place reads and writes; encoded state is encoded again at the end."""
    state = element_state(optimizer)
    yield state
    keep_state(optimizer, state)


def state_names(optimizer: ShardedOptimizer) -> list[str]:
    """Returns the names of state tensors with one number per element on this rank, such as "exp_avg", sorted.

    For several optimizers: the names of all, independent of this rank's elements.
    """
    if optimizer.delayed is not None:
        optimizer.delayed.join()
    inner = optimizer.inner
    if isinstance(inner, FlatOptimizer) and inner.state and (inner.encodes or isinstance(inner, CompositeOptimizer)):
        return sorted(inner.moment_names)
    return sorted({name for state in element_state(optimizer).values() for name in state})
