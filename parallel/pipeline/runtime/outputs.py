"""Outputs of the model on the last stage, brought to rank 0."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.comm.backend import state_link
from engine.parallel.comm.comm import Comm
from engine.parallel.trace.model_trace import FreeTensor, FromParameter, FromValue, Leaf, ModelTrace

LABEL = "outputs"


@dataclass(frozen=True, slots=True)
class Carrier:
    """The path of the outputs to rank 0."""

    comm: Comm
    device: torch.device
    last: int
    """Index of axis pp that has the last stage."""


def bring_outputs(
    results: Sequence[Any], traces: Sequence[ModelTrace], model: nn.Module, carrier: Carrier
) -> list[Any]:
    """Results of the microbatches from the last stage of rank 0's replica, on rank 0; an empty list elsewhere.

    Args:
        results: (output, sum, weight) of each microbatch, on the rank with the last stage.

    Rank 0 knows their structure from the traces, and the shapes of parameters from ``model``, so only tensors are sent,
    over axis pp, label "outputs".
    """
    comm, last = carrier.comm, carrier.last
    coord = comm.grid.coord()
    if coord.dp or coord.tp or coord.pp not in (0, last):
        return []
    if last == 0:
        return list(results)
    if coord.pp == last:
        for result in results:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    comm.send(leaf.detach().contiguous(), state_link(last, 0), LABEL).wait()
        return []
    parameters = dict(model.named_parameters())
    return [_receive(trace, parameters, carrier) for trace in traces]


def _receive(trace: ModelTrace, parameters: Mapping[str, Tensor], carrier: Carrier) -> Any:
    leaves: list[Any] = []
    for leaf in trace.result.leaves:
        found = _like(leaf, trace, parameters)
        if found is None:
            leaves.append(getattr(leaf, "content", None))
            continue
        tensor = torch.empty(found[0], dtype=found[1], device=carrier.device)
        carrier.comm.receive(tensor, state_link(carrier.last, 0), LABEL).wait()
        leaves.append(tensor)
    return pytree.tree_unflatten(leaves, trace.result.spec)


def _like(
    leaf: Leaf, trace: ModelTrace, parameters: Mapping[str, Tensor]
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of a leaf that is a tensor, otherwise None."""
    if isinstance(leaf, FromValue):
        value = trace.values[leaf.value]
        return value.shape, value.dtype
    if isinstance(leaf, FreeTensor):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, FromParameter):
        parameter = parameters[leaf.parameter]  # a placeholder has the same shape and dtype
        return tuple(parameter.shape), parameter.dtype
    return None
