"""A model and its sharded copy on this rank, and the gradients of the copy put together again."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.parallel.comm.comm import Comm
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.grid import Grid
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import ParameterCut, TensorPlan
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.plans import written_plan


def open_comm() -> Comm:
    """All running ranks as one tensor axis."""
    grid = Grid(tp=dist.get_world_size(), rank=dist.get_rank())
    return Comm(grid, TorchBackend(grid, torch.device("cpu")))


@dataclass
class Sharded:
    """A model cut over all running ranks."""

    model: nn.Module
    plan: TensorPlan
    axis: TensorAxis
    comm: Comm


def shard(model: nn.Module, setting: Any = None) -> Sharded:
    """Cut ``model`` in place, by default as its family is."""
    comm = open_comm()
    axis = TensorAxis(comm)
    plan = find_tensor_plan(model, setting or written_plan(model), axis.size)
    apply_plan(model, plan, axis, ForwardPatches())
    return Sharded(model, plan, axis, comm)


def place(part: Tensor, cut: ParameterCut, rows: int, index: int) -> Tensor:
    """``part`` where it lies in a full tensor of zeros."""
    full = part.new_zeros((*part.shape[: cut.dim], rows, *part.shape[cut.dim + 1 :]))
    taken = 0
    for piece in cut.ranges:
        if index in piece.holders:
            size = piece.stop - piece.start
            full.narrow(cut.dim, piece.start, size).copy_(part.narrow(cut.dim, taken, size))
            taken += size
    return full


def full_gradients(sharded: Sharded) -> dict[str, Tensor]:
    """Every parameter's whole gradient: parts in their places, shared and partial ones summed, as the engine does."""
    found: dict[str, Tensor] = {}
    for name, parameter in sharded.model.named_parameters():
        if parameter.grad is None:
            continue
        full, cut = parameter.grad.clone(), sharded.plan.parameters.get(name)
        if cut is not None:
            full = place(full, cut, max(piece.stop for piece in cut.ranges), sharded.axis.index)
        if cut is not None or name in sharded.plan.partial:
            dist.all_reduce(full)
        found[name] = full
    return found


def assert_close(ours: Tensor, reference: Tensor, what: str, bound: float = 1e-6, floor: float = 0.0) -> float:
    """Equal to ``bound`` of the largest entry of the reference, or of ``floor`` if that is larger."""
    assert ours.shape == reference.shape, (what, ours.shape, reference.shape)
    ours, reference = ours.detach(), reference.detach()
    scale = max(float(reference.abs().max()), floor)
    deviation = float((ours - reference).abs().max()) / scale if scale else float(ours.abs().max())
    assert deviation <= bound, f"{what}: {deviation:.2e} of its largest entry {scale:.2e}"
    return deviation
