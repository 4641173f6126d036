"""Reads of a checkpoint into this rank's buckets and optimizer state, or of a Hugging Face folder into its weights.

    check    compare names and shapes, report the first difference          nothing is modified
    read     this rank's share of every bucket and of its moments           no communication
    -- all ranks agree that both succeeded --
    share    all-gather over dp the tensors that every data rank has in full    label "checkpoint"

So one data rank reads each byte of a bucket; every rank reads buffers and unsharded frozen parameters.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.checkpoint.contents.local_tensors import Held, LocalTensors
from engine.checkpoint.contents.optimizer_state import Families
from engine.checkpoint.format.host_image import as_bytes, torch_dtype
from engine.checkpoint.format.pieces import Part
from engine.checkpoint.format.safetensors_file import TensorKind, in_batches
from engine.checkpoint.format.step_reader import ReadRequest
from engine.errors import CheckpointError
from engine.kernels.device import is_host
from engine.parallel.comm.comm import Comm
from engine.parallel.model.side_effects import overwrite
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.encoded_gather import gather_masters
from engine.zero.optim.master_weights import sync_masters
from engine.zero.optim.optimizer_tensors import WholeUpdates, families_of

logger = logging.getLogger("trine")

LABEL = "checkpoint"
_REMEDY = "build the model that was saved, or load another checkpoint."
AT_ONCE = 1 << 28
"""Largest bytes of tensors that are staged in host memory at a time."""


class TensorSource(Protocol):
    """Interface of a checkpoint or Hugging Face folder from which a load reads tensors by name."""

    @property
    def kinds(self) -> Mapping[str, TensorKind]:
        """Dtype and full shape of each tensor, by name ("param/...", "buffer/..." and so on)."""

    @property
    def name(self) -> Path | str:
        """Folder of the tensors, or another description of the source, for use in messages."""

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Reads each requested piece from the source into the request's memory."""


@dataclass(frozen=True)
class Loader:
    """Reader of weights and optimizer state from ``source`` (a checkpoint or Hugging Face folder) into one rank's
    shards.
    """

    source: TensorSource
    local_tensors: LocalTensors
    buffers: Mapping[str, Tensor]
    """Live buffers of the model, by "buffer/..."."""
    strict: bool = True
    """True if tensors missing or unknown in the source raise; False: missing tensors keep their current values."""
    left_out: frozenset[str] = frozenset()
    """Names ("param/...") of tensors that the checkpoint was saved without; they keep their current values."""

    def check(self) -> None:
        """Checks that the weights and buffers in ``source`` have the model's names, shapes and dtypes.

        Floating-point dtypes may differ.

        Raises:
            CheckpointError: names the first difference.
        """
        kinds, ownership = self._kinds, self.local_tensors.ownership
        wanted = {f"param/{row.name}": row.shape for row in ownership.plan.table}
        dtypes = {f"param/{row.name}": row.dtype for row in ownership.plan.table}
        wanted |= {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}
        dtypes |= {name: buffer.dtype for name, buffer in self.buffers.items()}
        for name, shape in wanted.items():
            kind, leaf = kinds.get(name), name.partition("/")[2]
            if self._left_out(name):
                continue
            if kind is None:
                raise CheckpointError(f"{self.source.name} lacks {leaf!r}, which this model has; {_REMEDY}")
            if kind.shape != shape:
                given = f"shape {list(kind.shape)} in {self.source.name} and {list(shape)} in this model"
                raise CheckpointError(f"{leaf!r} has {given}; {_REMEDY}")
            master = kinds.get(f"master/{leaf}", kind) if name.startswith("param/") else kind
            for stored in (kind, master):
                own, dtype = dtypes[name], torch_dtype(stored)
                fits = dtype == own or (own.is_floating_point and dtype.is_floating_point)
                if stored.shape != shape or not fits:
                    raise CheckpointError(
                        f"{leaf!r} is {stored.dtype} {list(stored.shape)} in {self.source.name} and {own} "
                        f"{list(shape)} in this model; {_REMEDY}"
                    )
        more = self._surplus()
        if more and self.strict:
            raise CheckpointError(f"{self.source.name} has {more[0]!r}, which this model lacks; {_REMEDY}")

    @cached_property
    def _kinds(self) -> dict[str, TensorKind]:
        """Tensors of the source by our names: files of other engines may have a buffer among the parameters."""
        kinds = dict(self.source.kinds)
        for name in self.buffers:
            if name not in kinds and (stored := self._stored(name)) in kinds:
                kinds[name] = kinds.pop(stored)
        return kinds

    def _stored(self, buffer: str) -> str:
        """Returns the source's name of a buffer."""
        leaf = buffer.partition("/")[2]
        return buffer if buffer in self.source.kinds else f"param/{leaf}"

    def tell_differences(self) -> None:
        """Logs the names of tensors that only ``source`` has, or only the model has."""
        for names, told in (
            (self._absent(), "the checkpoint lacks %d tensor(s), which keep their values: %s%s"),
            (self._surplus(), "the checkpoint has %d tensor(s) that the model lacks: %s%s"),
        ):
            if names:
                logger.warning(told, len(names), ", ".join(names[:3]), f" and {len(names) - 3} more" * (len(names) > 3))

    def _left_out(self, tensor: str) -> bool:
        """Returns True if a tensor keeps its values, because the source may lack it and does."""
        return tensor not in self._kinds and (not self.strict or tensor in self.left_out)

    def _wanted(self) -> list[str]:
        return [*(f"param/{row.name}" for row in self.local_tensors.ownership.plan.table), *self.buffers]

    def _absent(self) -> list[str]:
        absent = (name for name in self._wanted() if name not in self._kinds and name not in self.left_out)
        return [name.partition("/")[2] for name in absent]

    def _surplus(self) -> list[str]:
        known = set(self._wanted())
        names = (name for name in self._kinds if name.startswith(("param/", "buffer/")) and name not in known)
        return [name.partition("/")[2] for name in names]

    def check_moments(self, families: Families) -> None:
        """Checks that ``source`` has the optimizer moments that ``families`` lists for this rank's parameters.

        Call it before the memory of the moments is allocated. Parameters in the same flat tensor of the optimizer need
        the same moments.

        Raises:
            CheckpointError: names the first moment that is missing, has another shape than its parameter, or is boolean
                or complex.
        """
        rows = {row.name: row for row in self.local_tensors.ownership.plan.table}
        for place in self.local_tensors.places:
            names = place.names()
            for family, row in product(sorted(families.of(names)), (rows[name] for name in names)):
                if self._left_out(f"{family}/{row.name}"):
                    continue
                kind = self._kind(f"{family}/{row.name}")
                if kind.shape != row.shape:
                    raise CheckpointError(
                        f"{family}/{row.name} has shape {list(kind.shape)} in {self.source.name} and "
                        f"{list(row.shape)} in this model; {_REMEDY}"
                    )
                if kind.dtype in ("BOOL", "C64"):
                    raise CheckpointError(
                        f"{self.source.name}: {family}/{row.name} is {kind.dtype}, but moments are real numbers; "
                        "load with load_optimizer_states=False."
                    )

    @torch.no_grad()
    def read_weights(self) -> None:
        """Reads this rank's shards of the weights, and all buffers. A weight with an fp32 master is read into the
        master only; :func:`share_weights` rounds it into the weight.
        """
        kinds = self.source.kinds
        wide = {held.tensor.partition("/")[2]: held for held in self.local_tensors.masters()}
        landings: list[Held] = []
        for held in self.local_tensors.weights():
            name = held.tensor.partition("/")[2]
            if self._left_out(f"param/{name}"):
                continue
            target = wide.get(name, held)
            narrow, master = kinds[f"param/{name}"], kinds.get(f"master/{name}")
            wider = master is not None and torch_dtype(narrow) != target.values.dtype
            landings.append(replace(target, tensor=f"{'master' if wider else 'param'}/{name}"))
        self._fill(landings)
        self._read_quantized()
        for name, buffer in self.buffers.items():
            if not self._left_out(name):
                self._read_one(name, Part(tuple(buffer.shape)), buffer)

    def _read_quantized(self) -> None:
        """Reads each weight that is stored as codes in full, because scales cover whole rows, and quantizes it."""
        ownership = self.local_tensors.ownership
        for row in ownership.plan.table.held_by(ownership.grid.holder(self.local_tensors.coord)):
            name = f"param/{row.name}"
            if row.quantized is not None and not self._left_out(name):
                values = torch.empty(row.shape, dtype=torch_dtype(self._kind(name)))
                self.source.read([ReadRequest(name, Part(row.shape).whole(), as_bytes(values))])
                self.local_tensors.place_quantized(row, values)

    @torch.no_grad()
    def read_moments(self, moments: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        """Reads this rank's shards of optimizer moments into ``moments``: flat parameter -> moment name -> tensor.

        Moments that ``source`` lacks do not change, if ``strict`` is False or they are in ``left_out``.

        Raises:
            CheckpointError: ``source`` lacks another moment.
        """
        self._fill(held for held in self.local_tensors.state(moments) if not self._left_out(held.tensor))

    @torch.no_grad()
    def read_apart(self, whole: Iterable[WholeUpdates]) -> None:
        """Reads optimizer tensors with other shapes than their parameters, such as the preconditioners of Shampoo.

        ``whole``: parts of the optimizer that receive these tensors. A parameter without saved state starts afresh.
        """
        for updates in whole:
            updates.forget()
            known = self._stored_apart(updates)
            if known:
                updates.prepare()
                self._fill(held for held in self.local_tensors.apart(updates) if held.row.name in known)

    def check_apart(self, whole: Iterable[WholeUpdates], updated: Collection[str]) -> None:
        """Checks saved optimizer tensors with other shapes than their parameters, such as the preconditioners of
        Shampoo, against this run's optimizer.

        Args:
            whole: parts of this run's optimizer that store such state.
            updated: names of the parameters that the saved run has updated; other parameters may lack state.

        Raises:
            CheckpointError: names the first parameter for which saved tensors and this run's differ in names or shapes.
        """
        for updates in whole:
            found = self._stored_apart(updates)
            for name, wanted in updates.shapes.items():
                stored = found.get(name, {})
                if stored != wanted and (stored or (self.strict and name in updated)):
                    given, own = (_listed(shapes) for shapes in (stored, wanted))
                    raise CheckpointError(
                        f"{self.source.name}: the optimizer state of {name!r} is {given}, but this run's optimizer "
                        f"has {own}; configure the optimizer as in the saved run, or load with "
                        "load_optimizer_states=False."
                    )

    def _stored_apart(self, updates: WholeUpdates) -> dict[str, dict[str, tuple[int, ...]]]:
        """Returns the shapes of such state in the source, by parameter and name."""
        families, found = families_of([updates]), dict[str, dict[str, tuple[int, ...]]]()
        for tensor, kind in self.source.kinds.items():
            family, _, name = tensor.partition("/")
            if family in families:
                found.setdefault(name, {})[family] = kind.shape
        return found

    def _fill(self, targets: Iterable[Held]) -> None:
        """Reads into ``values``, through a staging tensor if dtype, device or strides differ."""
        for batch in in_batches(targets, lambda held: held.values.nbytes, AT_ONCE):
            wanted, moved = [], []
            for held in batch:
                dtype = torch_dtype(self._kind(held.tensor))
                values = held.values
                if not is_host(values.device) or values.dtype != dtype or not values.is_contiguous():
                    values = torch.empty(values.shape, dtype=dtype)
                    moved.append((held.values, values))
                wanted.append(ReadRequest(held.tensor, held.own, as_bytes(values)))
            self.source.read(wanted)
            for target, values in moved:
                target.copy_(values)

    def _kind(self, tensor: str) -> TensorKind:
        kind = self.source.kinds.get(tensor)
        if kind is None:
            raise CheckpointError(
                f"{self.source.name} has no {tensor!r}: the parameter was frozen, or was trained by another optimizer; "
                "load with strict=False, or with load_optimizer_states=False."
            )
        return kind

    def _read_one(self, name: str, part: Part, target: Tensor) -> None:
        values = torch.empty(target.shape, dtype=torch_dtype(self._kinds[name]))
        self.source.read([ReadRequest(self._stored(name), part.whole(), as_bytes(values))])
        overwrite(target, values)


@torch.no_grad()
def read_unplaced(source: TensorSource, model: nn.Module) -> None:
    """Reads full weights and buffers into a model that is not sharded yet.

    Skips tensors on the meta device or with another shape; the load after sharding checks them.
    """
    kinds = source.kinds
    tensors: dict[tuple[str, str], Tensor] = {}
    tensors |= {(f"master/{name}", f"param/{name}"): each for name, each in model.named_parameters()}
    tensors |= {(f"buffer/{name}", f"param/{name}"): each for name, each in model.named_buffers()}
    for names, target in tensors.items():
        stored = next((name for name in names if name in kinds), None)
        if stored is None or kinds[stored].shape != target.shape or target.is_meta or not target.numel():
            continue
        values = torch.empty(target.shape, dtype=torch_dtype(kinds[stored]))
        source.read([ReadRequest(stored, Part(tuple(target.shape)).whole(), as_bytes(values))])
        overwrite(target, values)


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "none"


@torch.no_grad()
def share_weights(buckets: Sequence[FlatBucket], comm: Comm) -> None:
    """All-gathers weights over data ranks after each has loaded only its shard, at ZeRO 0 too.

    ZeRO 0 gathers fp32 masters, then rounds them into the parameters; without masters it gathers the parameters. ZeRO 1
    and 2 round each shard first, then gather the parameters, or quantized masters if all-gathers are quantized. ZeRO 3
    gathers nothing.
    """
    pending = []
    for flat in buckets:
        if flat.wide is not None:
            if flat.owned != flat.shard:
                _gather_whole(flat.wide, flat, comm)
            flat.kept.copy_(flat.wide)
        if flat.rounds_in_gathers:
            pending.append(gather_masters(flat, comm, LABEL))
            continue
        apart = flat.owned == flat.shard or flat.wide is None
        if flat.bucket.spread.ranks > 1 and apart and not flat.sharded:
            pending.append(
                comm.all_gather(flat.params, flat.params[flat.shard].clone(), flat.bucket.spread.sharding, LABEL)
            )
    for gather in pending:
        gather.wait()
    for flat in buckets:
        if flat.wide is None:  # the host has a copy in the dtype of the parameters
            sync_masters(flat)
    parameters = [parameter for flat in buckets for parameter in flat.parameters]
    torch.autograd.graph.increment_version(parameters)  # as after an update: graphs of the old weights are stale
    torch.clear_autocast_cache()


@torch.no_grad()
def share_moments(
    local_tensors: LocalTensors, moments: Mapping[nn.Parameter, Mapping[str, Tensor]], comm: Comm
) -> None:
    """All-gathers optimizer moments, or tensors of companions such as averages, over data ranks at ZeRO 0, after each
    rank has loaded its part. Does nothing at other stages.
    """
    for flat in local_tensors.buckets:
        places = [place for place in local_tensors.places if place.flat is flat]
        if not places or flat.owned == flat.shard or flat.bucket.spread.ranks == 1:
            continue
        kinds = {name: values for place in places for name, values in moments.get(place.parameter, {}).items()}
        for name, values in kinds.items():
            having = [place for place in places if name in moments.get(place.parameter, {})]
            whole = torch.zeros(flat.bucket.elements, dtype=values.dtype, device=flat.params.device)
            for place in having:
                whole[place.part].copy_(moments[place.parameter][name].view(-1))
            comm.all_gather(whole, whole[flat.shard].clone(), flat.bucket.spread.sharding, LABEL).wait()
            for place in having:
                moments[place.parameter][name].view(-1).copy_(whole[place.part])


def _gather_whole(values: Tensor, flat: FlatBucket, comm: Comm) -> None:
    """All-gathers over dp the shards of a tensor [elements], on the device or on the host."""
    whole = values.to(flat.params.device)
    comm.all_gather(whole, whole[flat.shard].clone(), flat.bucket.spread.sharding, LABEL).wait()
    if whole is not values:
        values.copy_(whole)
