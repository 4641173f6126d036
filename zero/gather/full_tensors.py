"""Sharded tensors by parameter name (gradients, master weights, moments), to read and to write.

    pieces                [ shard 1 ]                        what this rank holds of a bucket
    whole     [ shard 0 | shard 1 | shard 2 | shard 3 ]      gathered over axis dp; given out as views by name

Afterwards each rank copies back the elements of its pieces that differ from the gathered values, so that reading
changes no bit.

Full access to sharded parameters between steps, for reading and writing (ZeRO 3).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.comm.agreement import bit_sum, first_rank, gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.parallel.model.whole_sizes import sizes_of_parts
from engine.parallel.shard_table import ShardRow, ShardTable
from engine.zero.flat_buckets import FlatBucket, lay_apart, slot_view
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.layout import Slot

LABEL = "full tensors"


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Elements of a bucket in this rank's memory. Users see ``values * factor``, for example an averaged gradient while
    ``values`` is a sum.
    """

    flat: FlatBucket
    part: slice
    values: Tensor
    """Stored elements, [part]."""
    factor: float = 1.0
    """Factor from stored ``values`` to the values that users see."""

    def given(self) -> Tensor:
        """Returns the elements as users see them: ``values`` times ``factor``."""
        return self.values * self.factor if self.factor != 1.0 else self.values

    def take(self, written: Tensor) -> bool:
        """Compares ``written`` with :meth:`given`, and stores changed elements, divided by ``factor``, in ``values``.
        Returns True if any differs. Synchronizes the device.
        """
        written = written.to(self.values.device)
        changed = written != self.given()
        if not changed.any():
            return False
        self.values.copy_(torch.where(changed, (written / self.factor).to(self.values.dtype), self.values))
        return True

    def of(self, slot: Slot) -> "HeldPart | None":
        """Returns this part's elements of the parameter with the range ``slot``; None if there are none."""
        start, stop = max(slot.start, self.part.start), min(slot.stop, self.part.stop)
        if start >= stop:
            return None
        own = slice(start - self.part.start, stop - self.part.start)
        return HeldPart(self.flat, slice(start, stop), self.values[own], self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShards:
    """This rank's shards of one kind of tensor (master weights, gradients or a moment) of all trainable parameters."""

    call: str
    """Name of the public method, for error messages."""
    table: ShardTable
    comm: Comm
    device: torch.device
    buckets: Sequence[FlatBucket]
    """All trained buckets of this rank."""
    pieces: Sequence[HeldPart]
    sharded: bool
    """True if each data rank stores a shard; False if each stores everything."""
    refresh: Callable[[Sequence[FlatBucket]], None] | None = None
    """Function called on all data ranks with the buckets that some rank has written to."""


@contextmanager
def full_tensors(shards: NamedShards, pattern: str) -> Iterator[dict[str, Tensor]]:
    """Yields parameter name -> tensor, gathered over dp, for the parameters that match ``pattern``. Tensor-parallel
    shards are not gathered. The end of the context stores the user's writes.

    Collective: one all-gather over dp for each bucket if ``shards.sharded``; at the end, ranks all-gather digests of
    the written values. Label "full tensors".

    Raises:
        EngineError: no parameter matches, or ranks have written different values.
    """
    chosen = _matching(shards, pattern)
    with torch.no_grad():
        wholes = {id(flat): (flat, _gather(flat, shards)) for flat in _flats(shards, chosen)}
        views = {
            slot.name: slot_view(whole, slot)
            for flat, whole in wholes.values()
            for slot in flat.bucket.slots
            if slot.name in chosen
        }
        for view in views.values():
            lay_apart(view, {})
        firsts = {flat.bucket.slots[0].name: whole for flat, whole in wholes.values()}
        axes = {flat.bucket.slots[0].name: flat.bucket.spread.copies for flat, _ in wholes.values()}
        before, before_views = _digests(firsts), _digests(views)
    yield views
    with torch.no_grad():
        # what has changed, and not what is there: copies that were never equal to the bit may still be read
        check_data_ranks(_changes(firsts, before), axes, shards.call, shards.comm, shards.device)
        rows = matching_rows(shards.table, pattern)
        check_holders(_changes(views, before_views), rows, shards.call, shards.comm, shards.device)
        pieces = [piece for piece in shards.pieces if id(piece.flat) in wholes]
        _finish(shards, [(piece, wholes[id(piece.flat)][1][piece.part]) for piece in pieces])


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: bit_sum(tensor) for name, tensor in tensors.items()}


def _changes(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns digests of the written values; 0 without a write."""
    return {name: now - before[name] for name, now in _digests(tensors).items()}


@contextmanager
def local_tensors(shards: NamedShards, pattern: str) -> Iterator[dict[str, Tensor]]:
    """Yields parameter name -> flat copy of this rank's shard in ``shards``, for the parameters that match ``pattern``.
    The copy may be empty. The end of the context stores the user's writes.

    If the shards are master weights, the end is collective: data ranks all-gather the buckets that any of them has
    written to. For other shards, nothing is communicated.
    """
    chosen = _matching(shards, pattern)
    parts: dict[str, tuple[HeldPart, Tensor]] = {}
    given = {}
    with torch.no_grad():
        for flat in _flats(shards, chosen):
            own = [piece for piece in shards.pieces if piece.flat is flat]
            for slot in (slot for slot in flat.bucket.slots if slot.name in chosen):
                found = next((part for piece in own if (part := piece.of(slot)) is not None), None)
                given[slot.name] = found.given().clone() if found else flat.params.new_empty(0)
                if found is not None:
                    parts[slot.name] = found, given[slot.name]
    yield given
    with torch.no_grad():
        _finish(shards, list(parts.values()))


def _finish(shards: NamedShards, written: Sequence[tuple[HeldPart, Tensor]]) -> None:
    """Copies the written values into each shard, and gathers again the buckets into which any data rank has written."""
    changed = {id(piece.flat) for piece, values in written if piece.take(values)}
    if shards.refresh is None or not shards.buckets:
        return
    stale = set[int]()
    for axis in sorted({flat.bucket.spread.copies for flat in shards.buckets}):
        flats = [flat for flat in shards.buckets if flat.bucket.spread.copies == axis]
        own = torch.tensor([id(flat) in changed for flat in flats], dtype=torch.int64)
        table = gather_from_all(own, shards.comm, shards.device, LABEL, axis)
        stale |= {id(flat) for flat, any_ in zip(flats, table.any(dim=0).tolist(), strict=True) if any_}
    shards.refresh([flat for flat in shards.buckets if id(flat) in stale])


def _matching(shards: NamedShards, pattern: str) -> frozenset[str]:
    """Returns names of this rank's trained parameters that match; the pattern must match on some stage."""
    trained = [row for row in shards.table if row.trainable]
    names = [name for row in trained for name in (row.name, *row.aliases)]
    refuse_unmatched([(shards.call, pattern)], names, "trained parameter", EngineError)
    return frozenset(row.name for row in matching_rows(shards.table, pattern))


def matching_rows(table: ShardTable, pattern: str) -> list[ShardRow]:
    """Returns the shard-table rows of the parameters with a name or alias that matches the shell-style ``pattern``."""
    return [row for row in table if any(fnmatchcase(name, pattern) for name in (row.name, *row.aliases))]


def _flats(shards: NamedShards, chosen: frozenset[str]) -> list[FlatBucket]:
    return [flat for flat in shards.buckets if any(slot.name in chosen for slot in flat.bucket.slots)]


def _gather(flat: FlatBucket, shards: NamedShards) -> Tensor:
    own = [piece for piece in shards.pieces if piece.flat is flat]
    dtype = next((piece.values.dtype for piece in (*own, *shards.pieces)), flat.params.dtype)
    whole = torch.zeros(flat.bucket.elements, dtype=dtype, device=flat.params.device)
    for piece in own:
        whole[piece.part] = piece.given()
    if shards.sharded:
        shards.comm.all_gather(whole, whole[flat.shard], flat.bucket.spread.sharding, LABEL).wait()
    return whole


def check_data_ranks(
    written: Mapping[str, Tensor], axes: Mapping[str, Axis], call: str, comm: Comm, device: torch.device
) -> None:
    """Raises on all ranks if any data ranks have written different values into a gathered bucket. Collective over dp,
    then over the world (8 bytes).

    Args:
        written: name of the first parameter of each gathered bucket -> digest of the bucket's values.
        axes: name of the first parameter of each bucket -> axis of the ranks on which its gathered values must be
            equal.
        call: name of the public method, for the message.

    Raises:
        EngineError: the digests differ between ranks.
    """
    found = None
    for axis in sorted({axes[name] for name in written}):
        names = [name for name in written if axes[name] == axis]
        table = gather_from_all(torch.stack([written[name] for name in names]), comm, device, LABEL, axis)
        differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
        if differing and found is None:
            found = names[differing[0]]
    first = first_rank(found is not None, comm, device, LABEL)  # other ranks still have collectives of this call
    if first is not None:
        where = f"{found!r} or a parameter that is gathered with it" if found else f"a parameter of rank {first}"
        raise EngineError(
            f"{call}: data ranks have written different values into {where}, and the engine drops them all; write the "
            "same values on every rank."
        )


def check_holders(
    written: Mapping[str, Tensor], rows: Sequence[ShardRow], call: str, comm: Comm, device: torch.device
) -> None:
    """Raises if ranks that share a parameter in ``rows`` (tied between stages, or unsharded on tensor ranks) have
    written different values into it. Collective.

    ``written``: parameter name -> digest of its values on this rank. ``call``: name of the public method, for the
    message.

    Raises:
        EngineError: the digests differ between ranks.
    """
    shared = [row.name for row in rows if len(row.owners) > 1 or (row.equal_on_tensor_ranks and comm.grid.tp > 1)]
    if not shared:
        return
    absent = torch.iinfo(torch.int64).min
    mine = torch.stack([written.get(name, torch.tensor(absent, device=device)) for name in shared])
    table = gather_from_all(mine, comm, device, LABEL, "replica")
    for name, column in zip(shared, table.T.tolist(), strict=True):
        if len({held for held in column if held != absent}) > 1:
            raise EngineError(
                f"{call}: {name!r} is on several stages or tensor ranks, which have written different values into it, "
                "and the engine drops them all; write the same values on each of these ranks."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """Model and its flat buckets (tensors that concatenate parameters), from which :func:`full_parameters` gathers."""

    model: nn.Module
    table: ShardTable
    buckets: Sequence[FlatBucket]
    """All buckets of this rank, trained and frozen."""
    gatherer: ParameterGatherer | None
    """Gatherer of the parameters; None if they are not sharded."""
    comm: Comm


@contextmanager
def full_parameters(sharded: ShardedModel, pattern: str) -> Iterator[dict[str, nn.Parameter]]:
    """Implements :meth:`engine.Engine.full_parameters`: yields name -> full parameter. The caller may write to the
    parameters; the end of the context stores the written shards.

    Raises:
        EngineError: a forward or backward runs, no parameter matches ``pattern``, or ranks have written different
            values.
    """
    named = dict(sharded.model.named_parameters())
    chosen = {name: named[name] for name in _matching_parameters(sharded, pattern)}
    gatherer, flats = sharded.gatherer, sharded.buckets
    if gatherer is None:
        with sizes_of_parts(chosen.values()):
            yield chosen
        return
    if gatherer.running:
        raise EngineError(
            "full_parameters was called inside a forward, where parameters are gathered while their module runs; call "
            "it between steps, or read them in the module that owns them."
        )
    wanted = [i for i, flat in enumerate(flats) if any(slot.name in chosen for slot in flat.bucket.slots)]
    opened = gatherer.open(wanted)
    try:
        with sizes_of_parts(chosen.values()):
            yield chosen
        written = [flats[index] for index in sorted(opened)]
        with torch.no_grad():
            digests = {flat.bucket.slots[0].name: bit_sum(flat.params) for flat in written}
            axes = {flat.bucket.slots[0].name: flat.bucket.spread.copies for flat in written}
            held, device = {name: bit_sum(parameter) for name, parameter in chosen.items()}, flats[0].params.device
            check_data_ranks(digests, axes, "full_parameters", sharded.comm, device)
            check_holders(held, matching_rows(sharded.table, pattern), "full_parameters", sharded.comm, device)
        for flat in written:
            flat.kept.copy_(flat.params[flat.shard])
    finally:
        gatherer.close(opened)


def _matching_parameters(sharded: ShardedModel, pattern: str) -> list[str]:
    """Returns the matching names on this rank's stage; the pattern must match on some stage."""
    names = [name for row in sharded.table for name in (row.name, *row.aliases)]
    refuse_unmatched([("full_parameters", pattern)], names, "parameter", EngineError)
    holder = sharded.comm.grid.holder()
    matching = matching_rows(sharded.table, pattern)
    if all(row.quantized is not None for row in matching):
        raise EngineError(
            f"full_parameters({pattern!r}) names weights that are stored only as codes (quantize_frozen) and cannot be "
            "written; read them in eng.full_state_dict(), or name them in quantize_frozen.skip."
        )
    return [row.name for row in matching if row.held(holder) and row.quantized is None]
