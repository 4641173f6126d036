"""Full state dict on rank 0, gathered from any grid: weights over dp, tp and pp, buffers from their stages.

every stage    all-gathers its buckets over dp, one at a time    label "full state"
every tensor   is assembled over tp on its first stage           label "full state"
then           is sent from there to stage 0                     label "full state"
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.codecs.weight_format import dequantize
from engine.parallel.comm.backend import state_link
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis
from engine.parallel.shard_table import ShardRow
from engine.parallel.tensor.layers.apply_plan import assemble
from engine.parallel.tensor.plan.tensor_plan import ParameterCut
from engine.planning.plan import Plan
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.averaged_weights import Average, average_dtype
from engine.zero.optim.master_weights import full_weights

LABEL = "full state"
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DIMS = 16
"""Most dims of a buffer in a pipeline."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Origin of one key of ``model.state_dict()``: a parameter, a buffer or another value."""

    kind: str
    """ "parameter", "buffer", or "other" for a value from a state-dict hook."""
    name: str
    """First name of the parameter, or name of the buffer."""
    dtype: torch.dtype | None
    """Dtype in the user's model; None for a value that is not a tensor."""


def state_entries(model: nn.Module) -> dict[str, Entry]:
    """Returns the origin of each key of ``model.state_dict()``: a parameter, a buffer or another value. Call it before
    sharding.
    """
    parameters = {id(p): name for name, p in model.named_parameters()}
    buffers = {id(b): name for name, b in model.named_buffers()}
    entries: dict[str, Entry] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        dtype = value.dtype if isinstance(value, Tensor) else None
        if id(value) in parameters:
            entries[key] = Entry("parameter", parameters[id(value)], dtype)
        elif id(value) in buffers:
            entries[key] = Entry("buffer", buffers[id(value)], dtype)
        else:
            entries[key] = Entry("other", key, dtype)
    return entries


class FullState:
    """Gatherer of the full ``model.state_dict()`` from the shards of all ranks into CPU memory of rank 0."""

    def __init__(self, model: nn.Module, plan: Plan, entries: Mapping[str, Entry], comm: Comm) -> None:
        self._model, self._plan, self.entries, self._comm = model, plan, entries, comm
        self._coord, self._first = comm.grid.coord(), comm.grid.is_first(comm.grid.copies)
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def gather(
        self,
        buckets: Sequence[FlatBucket],
        average: Average | None = None,
        keys: Set[str] | None = None,
    ) -> dict[str, Tensor]:
        """Returns ``model.state_dict()`` with full CPU tensors on rank 0, and {} on other ranks. Collective over the
        world.

        Args:
            buckets: flat buckets of trainable and frozen parameters.
            average: weight average to return in place of the trained parameters; None: the parameters.
            keys: keys of the state dict to return, the same on all ranks; None: all keys.
        """
        entries = {key: entry for key, entry in self.entries.items() if keys is None or key in keys}
        wanted = {entry.name for entry in entries.values() if entry.kind == "parameter"}
        rows = [row for row in self._plan.table if keys is None or row.name in wanted]
        held = self._local(buckets, average, {row.name for row in rows})
        weights: dict[str, Tensor] = {}
        for row in rows:
            whole = self._whole(row, held, average is not None) if self._takes_part(row) else None
            if whole is not None and self._comm.grid.rank == 0:
                weights[row.name] = whole.cpu()
        live, kinds = dict(self._model.named_buffers()), self.buffer_kinds()
        buffers = {
            entry.name: self._buffer(entry.name, live[entry.name], kinds[entry.name])
            for entry in entries.values()
            if entry.kind == "buffer" and self._first
        }
        return self._named(weights, buffers, entries) if self._comm.grid.rank == 0 else {}

    def _local(self, buckets: Sequence[FlatBucket], average: Average | None, wanted: Set[str]) -> dict[str, Tensor]:
        """Returns this rank's part of each wanted row, full over dp; on the CPU, so that the device has only one
        gathered bucket."""
        names = [[slot.name for slot in flat.bucket.slots] for flat in buckets]
        chosen = [flat for flat, own in zip(buckets, names, strict=True) if not wanted.isdisjoint(own)]
        found = full_weights(chosen, self._comm, average.of if average is not None else None)
        taking = {row.name for row in self._plan.table if self._takes_part(row)}
        held = {name: weight.cpu() for name, weight in found if name in taking}
        parameters = dict(self._model.named_parameters())
        filled = {name for own in names for name in own}
        for row in self._plan.table.held_by(self._comm.grid.holder()):
            if row.name in wanted and row.name not in filled:
                held[row.name] = parameters[row.name].detach()
        return held

    def _takes_part(self, row: ShardRow) -> bool:
        """Returns True if this rank's elements of a row are gathered: those of the first ranks that hold them."""
        return self._first if not row.experts else self._comm.grid.is_first("edp")

    def _whole(self, row: ShardRow, held: Mapping[str, Tensor], averaged: bool) -> Tensor | None:
        """Returns the full row on rank 0 and on its first stage; None elsewhere."""
        stage, here = row.owners[0], self._coord.pp
        whole: Tensor | None = None
        if here == stage:
            whole = self._over_holders(row, held.get(row.name))
        if stage and self._comm.grid.is_first("stage"):
            dtype = self.widest_dtype(row)
            dtype = average_dtype(dtype) if averaged and row.trainable else dtype
            whole = self._to_first_stage(whole, row.shape, dtype, stage)
        return whole

    def _values(self, row: ShardRow, part: Tensor) -> Tensor:
        """Returns the values of this rank's part, decoded if the rank stores codes."""
        codes = row.quantized_shape(self._comm.grid.holder())
        return part if codes is None else dequantize(part, codes, self.widest_dtype(row))

    def _over_holders(self, row: ShardRow, given: Tensor | None) -> Tensor:
        """Returns the full row, from the elements of all tensor and expert ranks that shard it; None: here are none."""
        grid = self._comm.grid
        here = grid.holder()
        shape = row.local_shape(here)
        part = torch.zeros(shape, dtype=self.widest_dtype(row)) if given is None else self._values(row, given)
        if row.dim is not None and grid.tp > 1:
            shapes = [row.local_shape(here._replace(tp=index)) for index in range(grid.tp)]
            part = assemble(self._from_all(part, shapes, "tp"), ParameterCut(row.dim, row.ranges))
        if len(row.experts) > 1:
            sizes = [row.local_shape(here._replace(ep=index))[row.expert_dim] for index in range(grid.size("ep"))]
            before, after = row.shape[: row.expert_dim], row.shape[row.expert_dim + 1 :]
            parts = self._from_all(part, [(*before, size, *after) for size in sizes], "ep")
            return assemble(parts, ParameterCut(row.expert_dim, row.experts))
        if row.experts:  # an expert of one rank
            part = part.to(self._device)
            self._comm.all_reduce(part, "ep", LABEL).wait()
        return part

    def _from_all(self, part: Tensor, shapes: Sequence[tuple[int, ...]], axis: Axis) -> list[Tensor]:
        """Returns the parts of all ranks along ``axis``, which have ``shapes``."""
        own, widest = self._comm.grid.index(axis), max(map(prod, shapes))
        full = torch.zeros(len(shapes), widest, dtype=part.dtype, device=self._device)
        full[own, : part.numel()] = part.reshape(-1).to(self._device)
        self._comm.all_gather(full.view(-1), full[own].clone(), axis, LABEL).wait()
        return [line[: prod(shape)].view(shape) for line, shape in zip(full, shapes, strict=True)]

    def _to_first_stage(
        self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, stage: int
    ) -> Tensor | None:
        if self._coord.pp == stage and tensor is not None:
            self._comm.send(tensor.to(self._device, dtype).contiguous(), state_link(stage, 0), LABEL).wait()
        elif self._coord.pp == 0:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            self._comm.receive(tensor, state_link(stage, 0), LABEL).wait()
        return tensor

    def widest_dtype(self, row: ShardRow) -> torch.dtype:
        """Returns the widest dtype that the row is stored in."""
        precision = self._plan.precision
        if row.trainable:
            widths = precision.widths(str(precision.parameter(row.name, row.dtype)).removeprefix("torch."))
            return widths.master or widths.compute
        return precision.frozen(row.name, row.dtype)

    def buffer_kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each persistent buffer by name, as the rank that owns it has it. A model may have
        replaced a buffer there since it was built.

        With a pipeline, all-reduces 144 bytes for each buffer over the world, label "full state".
        """
        live = dict(self._model.named_buffers())
        names = [*dict.fromkeys(entry.name for entry in self.entries.values() if entry.kind == "buffer")]
        if self._comm.grid.pp == 1 or not names:
            return {name: (live[name].dtype, tuple(live[name].shape)) for name in names}
        told = torch.zeros(len(names), 2 + _DIMS, dtype=torch.int64)
        for row, name in zip(told, names, strict=True):
            if self._comm.grid.rank_at(pp=self._plan.owner_of_buffer(name)) == self._comm.grid.rank:
                own = live[name]
                row[: 2 + own.dim()] = torch.tensor([_DTYPES.index(own.dtype), own.dim(), *own.shape])
        told = told.to(self._device)
        self._comm.all_reduce(told, "world", LABEL, "max").wait()
        found = dict(zip(names, told.tolist(), strict=True))
        return {name: (_DTYPES[code], tuple(sizes[:dims])) for name, (code, dims, *sizes) in found.items()}

    def _buffer(self, name: str, buffer: Tensor, kind: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        """Returns the buffer, sent from the stage that owns it."""
        stage = self._plan.owner_of_buffer(name)
        if stage and self._comm.grid.is_first("stage"):
            moved = self._to_first_stage(buffer, kind[1], kind[0], stage)
            return buffer if moved is None else moved
        return buffer

    def _named(
        self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor], entries: Mapping[str, Entry]
    ) -> dict[str, Tensor]:
        whole = len(entries) == len(self.entries)
        live = self._model.state_dict(keep_vars=True)
        state: dict[str, Any] = {key: value for key, value in live.items() if whole or key in entries}
        for key, entry in entries.items():
            if entry.kind == "other" or entry.dtype is None:
                continue
            tensor = weights[entry.name] if entry.kind == "parameter" else buffers[entry.name]
            state[key] = tensor.detach().to("cpu", entry.dtype, copy=True)
        return state
