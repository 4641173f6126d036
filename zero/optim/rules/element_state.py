"""Optimizer state of every element, as tensors in the shapes of the parameters, in any stored form."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.zero.optim.composite import CompositeOptimizer
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

ElementState = dict[nn.Parameter, dict[str, Tensor]]
"""By the flat parameter that the optimizer updates, then by name."""


def element_state(optimizer: ShardedOptimizer, device: torch.device | None = None) -> ElementState:
    """Returns the state itself, or copies on ``device`` of state in another form; empty before the first update."""
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
    """Returns True if the state of a tensor is stored in another form than ``element_state`` returns."""
    return isinstance(optimizer.inner, FlatOptimizer) and optimizer.inner.encoded(parameter)


def keep_state(optimizer: ShardedOptimizer, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Stores values that were loaded or written into copies; nothing if ``element_state`` returns the state itself."""
    inner = optimizer.inner
    for parameter, values in state.items():
        if isinstance(inner, FlatOptimizer) and inner.encoded(parameter):
            inner.keep(parameter, values)


@contextmanager
def opened_state(optimizer: ShardedOptimizer) -> Iterator[ElementState]:
    """Yields the state to read and to write in place; state in another form is encoded at the end."""
    state = element_state(optimizer)
    yield state
    keep_state(optimizer, state)


def state_names(optimizer: ShardedOptimizer) -> list[str]:
    """Returns names of the states with a value for each element on this rank, such as "exp_avg", sorted.

    Several optimizers have the names of all of them, independent of this rank's elements.
    """
    if optimizer.delayed is not None:
        optimizer.delayed.join()
    inner = optimizer.inner
    if isinstance(inner, FlatOptimizer) and inner.state and (inner.encodes or isinstance(inner, CompositeOptimizer)):
        return sorted(inner.moment_names)
    return sorted({name for state in element_state(optimizer).values() for name in state})
