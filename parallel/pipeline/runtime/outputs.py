"""Transfer of the model's outputs from the last stage to rank 0, or to all ranks of each replica."""

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
    """Source and destinations of a transfer of the model's outputs from the last pipeline stage."""

    comm: Comm
    device: torch.device
    last: int
    """Index on axis pp of the rank with the last stage."""
    everywhere: bool = False
    """True: every rank gets the outputs of its own replica; False: rank 0 gets the outputs of its replica."""


def bring_outputs(
    results: Sequence[Any], traces: Sequence[ModelTrace], model: nn.Module, carrier: Carrier
) -> list[Any]:
    """Sends the model's outputs of all microbatches from the last stage to the destination ranks of ``carrier``.

    Returns one entry per microbatch on these ranks, an empty list on others. Communicates over axis pp, label
    "outputs".

    Args:
        results: on the last stage, the result of the recorded forward of each microbatch.
        traces: recorded forward of each microbatch.
    """
    comm, last = carrier.comm, carrier.last
    coord, first_replica = comm.grid.coord(), comm.grid.is_first("stage")
    targets = [pp for pp in range(comm.grid.pp if carrier.everywhere else 1) if pp != last]
    if not (carrier.everywhere or first_replica):
        return []
    if coord.pp == last:
        leaves = [leaf for leaf in pytree.tree_leaves(list(results)) if isinstance(leaf, Tensor)]
        for target in targets:
            for leaf in leaves:
                comm.send(leaf.detach().contiguous(), state_link(last, target), LABEL).wait()
        return list(results) if carrier.everywhere or last == 0 else []
    if coord.pp not in targets:
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
        tensor, here = torch.empty(found[0], dtype=found[1], device=carrier.device), carrier.comm.grid.coord().pp
        carrier.comm.receive(tensor, state_link(carrier.last, here), LABEL).wait()
        leaves.append(tensor)
    return pytree.tree_unflatten(leaves, trace.result.spec)


def _like(
    leaf: Leaf, trace: ModelTrace, parameters: Mapping[str, Tensor]
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Returns shape and dtype of a leaf that is a tensor, otherwise None."""
    if isinstance(leaf, FromValue):
        value = trace.values[leaf.value]
        return value.shape, value.dtype
    if isinstance(leaf, FreeTensor):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, FromParameter):
        parameter = parameters[leaf.parameter]  # a placeholder has the same shape and dtype
        return tuple(parameter.shape), parameter.dtype
    return None
