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
    """Returns the optimizer's moments: flat parameter of the optimizer -> moment name -> tensor. Omits parameters
    without state. Encoded moments, such as in 8 bits, are decoded to copies on ``device`` (default: the device of the
    parameter); others are the live tensors.
    """
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
    """Returns True if the optimizer stores the moments of ``parameter`` encoded, so that ``element_state`` returns
    copies.
    """
    return isinstance(optimizer.inner, FlatOptimizer) and optimizer.inner.encoded(parameter)


def keep_state(optimizer: ShardedOptimizer, state: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Stores the moments in ``state``, a changed result of ``element_state``, in the optimizer. Skips parameters with
    unencoded moments: for them ``state`` has the optimizer's own tensors, which have changed already.
    """
    inner = optimizer.inner
    for parameter, values in state.items():
        if isinstance(inner, FlatOptimizer) and inner.encoded(parameter):
            inner.keep(parameter, values)


@contextmanager
def opened_state(optimizer: ShardedOptimizer) -> Iterator[ElementState]:
    """Yields the optimizer's moments for reads and in-place writes: flat parameter of the optimizer -> moment name ->
    tensor. The end of the context stores writes to encoded moments.
    """
    state = element_state(optimizer)
    yield state
    keep_state(optimizer, state)


def state_names(optimizer: ShardedOptimizer) -> list[str]:
    """Returns the sorted names of the optimizer's moments on this rank, such as "exp_avg". For several combined
    optimizers, includes the moments of each.
    """
    if optimizer.delayed is not None:
        optimizer.delayed.join()
    inner = optimizer.inner
    if isinstance(inner, FlatOptimizer) and inner.state and (inner.encodes or isinstance(inner, CompositeOptimizer)):
        return sorted(inner.moment_names)
    return sorted({name for state in element_state(optimizer).values() for name in state})
