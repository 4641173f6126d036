"""Sharding of the user's module on this rank, and the move of its parameters into flat buckets."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.build.held_module import leave_parts, refuse_calls
from engine.build.request import ModelSource, Request
from engine.errors import PlanError
from engine.kernels.codecs.weight_format import QuantizedShape
from engine.parallel.comm.agreement import all_or_none
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.world import Lender
from engine.parallel.grid import Grid, ShardHolder
from engine.parallel.model.adapters import adapter_names
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.materialize import materialize, replace_meta
from engine.parallel.model.placeholders import replace_absent
from engine.parallel.model.quantized_layers import quantize_part, read_quantized
from engine.parallel.model.rng_streams import keyed_generators
from engine.parallel.shard_table import ShardRow
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.layers.size_answers import WholeSizeAnswers
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.planning.budgets import hosts_parameters, reduces_each_microbatch, shards_parameters, wire_formats
from engine.planning.plan import Plan
from engine.precision.dtypes import place_rest
from engine.zero.flat_buckets import FlatBucket, Ownership, fill, reserve
from engine.zero.gather.encoded_gather import with_codecs
from engine.zero.layout import Slot
from engine.zero.offload.block_file import MomentBuffers
from engine.zero.offload.scratch_folder import MappedMemory, ScratchFolder
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

logger = logging.getLogger("trine")
_LOST = (
    "%d parameter(s), such as %s, are initialised by reset_parameters alone, because the model is on the meta device, "
    "and later writes of its __init__ are lost; move them to reset_parameters, or pass a callable that builds the model"
)


def make_model(source: ModelSource, seed: int, device: torch.device) -> nn.Module:
    """Returns ``source`` if it is a module, otherwise the result of its call under the random seed ``seed``.

    The random generators of the CPU and of ``device`` are restored.

    Raises:
        PlanError: ``source`` is neither a module nor a callable that returns one.
    """
    model: object = source
    if not isinstance(source, nn.Module):
        if not callable(source):
            raise PlanError(f"model is a {type(source).__name__}; give an nn.Module or a callable that returns one.")
        with keyed_generators(device, seed):
            model = source()
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model callable returned a {type(model).__name__}; it must return an nn.Module.")
    return model


def unwrap(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Returns the module inside wrappers of DDP and torch.compile, and a note for the user about each wrapper.

    Raises:
        PlanError: the parameters are sharded already, by FSDP or as DTensors.
    """
    notes: list[str] = []
    while True:
        kind = type(model).__name__
        if kind == "FullyShardedDataParallel" or any(type(p).__name__ == "DTensor" for p in model.parameters()):
            raise PlanError(
                f"the model is a {kind} with parameters that FSDP or DTensor has sharded already, but the engine "
                "shards them itself; pass the module without FSDP and DTensor, and set zero_optimization.stage to 3 or "
                "parallel.tensor to the number of tensor-parallel ranks."
            )
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner, instead = model.module, "data ranks are the engine's (parallel.data)"
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            instead = '"compile": true compiles its blocks'
        else:
            return model, tuple(notes)
        notes.append(f"model: the {type(inner).__name__} inside {kind} is trained, without the wrapper; {instead}")
        model = inner


def place_model(
    model: nn.Module, plan: Plan, comm: Comm, device: torch.device, axis: TensorAxis, request: Request
) -> tuple[FlatBucket, ...]:
    """Shards ``model`` in place: its parameters become views of flat buckets (1-D tensors) on ``device``.

    Returns the buckets of trainable parameters, then the buckets of frozen ones. With ``request.lender`` (another
    engine), frozen parameters of ``model`` on the meta device use the lender's tensors.
    """
    holder, config, patches = comm.grid.holder(), plan.config, request.patches
    parameters = dict(model.named_parameters())
    sizes = WholeSizeAnswers(model, plan.tensor)  # notes full sizes, so before layers are sharded
    rows = {row.name: row for row in plan.table.held_by(holder)}
    lent = borrow(request.lender, plan, holder) if request.lender is not None else {}
    shards = request.lender.shards if request.lender is not None else {}
    buckets = reserve(plan.layouts[holder], parameters, replace(_ownership(plan, comm.grid), lent=shards), device)
    codes, experts = _codes(rows.values(), holder), {row.name: row for row in plan.table if row.experts}
    parts = _Parts(plan, holder, device, rows, codes, lent, _places(buckets))
    if _forget_backward(parameters.values()) and comm.grid.rank == 0:
        logger.warning("the gradients that an earlier backward has left on the model are dropped")
    meta = {name for name, p in parameters.items() if p.is_meta and name in rows}
    drawn = meta if config.checkpoint.init_from is None else adapter_names(model, meta)  # a folder replaces the others
    lost = materialize(model, drawn - lent.keys() - set().union(*shards), config.seed, device, parts.keep)
    if lost and comm.grid.rank == 0:
        logger.warning(_LOST, len(lost), lost[0])
    replace_meta(model, {name: parts.empty(name) for name in meta})
    for name in codes.keys() - meta:
        parameters[name].data = _quantized(parameters[name].data.to(device), rows[name], plan, holder)
    read_quantized(model, {n: (form, _frozen_dtype(rows[n], plan)) for n, form in codes.items()}, axis.kernels)
    for name in experts.keys() - meta - codes.keys():  # of other stages too: a trace reads their shapes
        parameters[name].data = experts[name].local(parameters[name].data, holder)
    _shard(model, plan, axis, patches, already_cut=meta | codes.keys() | experts.keys())
    place_rest(model, plan.precision, device, parameters.keys() - rows.keys(), parts.places)
    replace_absent(model, rows.keys(), device)
    sizes.install(model, patches, passed=codes)
    for flat in buckets:  # after sharding, which changes the parameters' data
        fill(flat, placed=meta)
    refuse_calls(model, plan.config, bool(codes), patches)
    leave_parts(model, config, any(row.sharded for row in rows.values()), patches)
    return with_codecs(buckets, wire_formats(config, plan.precision), axis.kernels)


_Place = tuple[FlatBucket, Slot, Tensor]
"""Bucket, slot and view of a parameter."""


def _places(buckets: Iterable[FlatBucket]) -> Mapping[str, _Place]:
    return {
        slot.name: (flat, slot, view)
        for flat in buckets
        for slot, view in zip(flat.bucket.slots, flat.views, strict=True)
    }


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of parameters on this rank, and their places."""

    plan: Plan
    holder: ShardHolder
    device: torch.device
    rows: Mapping[str, ShardRow]
    codes: Mapping[str, QuantizedShape]
    lent: Mapping[str, Tensor]
    places: Mapping[str, _Place]

    def keep(self, name: str, full: Tensor) -> Tensor:
        """Returns this rank's part of a full parameter, in its bucket if it has one."""
        row = self.rows[name]
        part = _quantized(full, row, self.plan, self.holder) if name in self.codes else row.local(full, self.holder)
        if name not in self.places:
            return part
        flat, slot, view = self.places[name]
        flat.place(slot, part)
        return view

    def empty(self, name: str) -> Tensor:
        """Returns the memory of a parameter: its bucket's, the lender's, or new zeros."""
        if name in self.places:
            return self.places[name][2]
        if name in self.lent:
            return self.lent[name]
        if name in self.codes:
            return torch.zeros(self.codes[name].bytes, dtype=torch.uint8, device=self.device)
        row = self.rows[name]
        return torch.zeros(row.local_shape(self.holder), dtype=row.dtype, device=self.device)


def borrow(lender: Lender, plan: Plan, holder: ShardHolder) -> Mapping[str, Tensor]:
    """Returns the frozen weights outside of flat buckets that this rank takes from the other engine ``lender``, by
    parameter name.

    Checks that ``lender`` has the flat buckets of frozen parameters in ``plan``; does not return them.

    Args:
        holder: tensor, pipeline and expert coordinates of this rank.

    Raises:
        PlanError: ``lender`` lacks a frozen parameter that ``plan`` assigns to this rank, or stores it in another shape
            or dtype.
    """
    found: dict[str, Tensor] = {}
    frozen = [tuple(slot.name for slot in bucket.slots) for bucket in plan.layouts[holder].frozen]
    lacking = [names[0] for names in frozen if names not in lender.shards]
    bucketed = set().union(*frozen)
    for row in plan.table.held_by(holder):
        if row.trainable or row.name in bucketed:
            continue
        codes, given = row.quantized_shape(holder), lender.tensors.get(row.name)
        shape, dtype = row.local_shape(holder), _frozen_dtype(row, plan)
        if codes is not None:
            shape, dtype = (codes.bytes,), torch.uint8
        if given is None or (tuple(given.shape), given.dtype) != (shape, dtype):
            lacking.append(row.name)
        else:
            found[row.name] = given
    if lacking:
        raise PlanError(
            f"this engine needs other shards, dtypes or formats of {lacking[0]!r} and {len(lacking) - 1} further "
            "frozen parameters than the base engine has, but both share the same tensors; put the adapters on other "
            "layers, or set equal parallel.tensor_plan and parallel.split for both engines."
        )
    return found


def _shard(
    model: nn.Module, plan: Plan, axis: TensorAxis, patches: ForwardPatches, already_cut: Collection[str]
) -> None:
    if plan.tensor is not None:
        parameters = dict(model.named_parameters())
        views = apply_plan(model, plan.tensor, axis, patches, already_cut)
        views.planned = frozenset(parameters[name] for name in plan.tensor.partial)


def offload_to_disk(optimizer: ShardedOptimizer, plan: Plan, comm: Comm, device: torch.device) -> None:
    """Moves optimizer moments of this rank from host memory to files, if ``offload_optimizer.device`` is "nvme".

    All ranks must call it; if one fails, all raise.

    Raises:
        ConfigError: the optimizer does not update bucket by bucket.
        EngineError: the folder for the files cannot be made.
    """
    offload, hosted = plan.config.zero_optimization.offload_optimizer, plan.hosted(comm.grid.coord())
    if offload.device != "nvme":
        return
    with all_or_none(comm, device):
        if offload.nvme_path is not None:  # without a bucket, too: the ranks agree on every update
            count = min(offload.buffer_count, len(hosted))
            size = plan.rank(comm.grid.rank).host_bytes.get("buffers", 0) // max(count, 1)
            folder = ScratchFolder(offload.nvme_path, comm.grid.rank)
            optimizer.use_disk_moments(folder, MomentBuffers(count, size), device)


def _ownership(plan: Plan, grid: Grid) -> Ownership:
    config = plan.config
    offload = config.zero_optimization.offload_optimizer
    mapped = offload.device == "nvme" and offload.map_memory and offload.nvme_path is not None
    return Ownership(
        grid.index(grid.sharding),
        config.shards,
        sharded=config.zero_optimization.stage > 0,
        sharded_gradients=reduces_each_microbatch(config),
        sharded_parameters=shards_parameters(config),
        master=plan.precision.master,
        hosted=plan.hosted(grid.coord()),
        delayed=offload.delayed_update,
        hosted_parameters=hosts_parameters(config),
        pinned_parameters=config.zero_optimization.offload_param.pin_memory,
        grid=grid,
        pinned=offload.pin_memory,
        mapped=MappedMemory(str(offload.nvme_path)).zeros if mapped else None,
    )


def _codes(rows: Iterable[ShardRow], holder: ShardHolder) -> dict[str, QuantizedShape]:
    """Returns the codes and scales that this rank stores in place of weights."""
    found = {row.name: row.quantized_shape(holder) for row in rows}
    return {name: form for name, form in found.items() if form is not None}


def _quantized(full: Tensor, row: ShardRow, plan: Plan, holder: ShardHolder) -> Tensor:
    return quantize_part(full.to(_frozen_dtype(row, plan)), row, holder)


def _frozen_dtype(row: ShardRow, plan: Plan) -> torch.dtype:
    return plan.precision.frozen(row.name, row.dtype)


def _forget_backward(parameters: Iterable[nn.Parameter]) -> bool:
    """Drops the gradients and graphs that the user's own forwards and backwards have left on parameters; returns True
    if there was a gradient.

    An output that is still alive holds the node that accumulates a parameter's gradient, which expects the full shape.
    torch makes another node after the data has had another dtype.
    """
    found = False
    for parameter in parameters:
        found, parameter.grad = found or parameter.grad is not None, None
        data, other = parameter.data, torch.float32 if parameter.dtype == torch.float64 else torch.float64
        if data.is_floating_point():
            parameter.data = torch.empty(0, dtype=other, device=data.device)
            parameter.data = data
    return found
