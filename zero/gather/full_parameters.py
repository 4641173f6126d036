"""Full access to sharded parameters between steps, for reading and writing (ZeRO 3)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from engine.errors import EngineError
from engine.parallel.comm.agreement import bit_sum, gather_from_all
from engine.parallel.comm.comm import Comm
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.parallel.shard_table import ShardRow, ShardTable
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gatherer import ParameterGatherer

LABEL = "full parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """Model and flat buckets that :func:`full_parameters` works on."""

    model: nn.Module
    table: ShardTable
    buckets: Sequence[FlatBucket]
    """All buckets of this rank, including those of frozen parameters."""
    gatherer: ParameterGatherer | None
    """Gatherer of the parameters; None if they are not sharded."""
    comm: Comm


@contextmanager
def full_parameters(sharded: ShardedModel, pattern: str) -> Iterator[dict[str, nn.Parameter]]:
    """Implementation of :meth:`engine.Engine.full_parameters`."""
    named = dict(sharded.model.named_parameters())
    chosen = {name: named[name] for name in _matching(sharded, pattern)}
    gatherer, flats = sharded.gatherer, sharded.buckets
    if gatherer is None:
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
        yield chosen
        written = [flats[index] for index in sorted(opened)]
        _check_data_ranks(written, sharded)
        _check_holders(chosen, pattern, sharded)
        for flat in written:
            flat.kept.copy_(flat.params[flat.shard])
    finally:
        gatherer.close(opened)


def _matching(sharded: ShardedModel, pattern: str) -> list[str]:
    """Return the matching names on this rank's stage; the pattern must match on some stage."""
    names = [name for row in sharded.table for name in (row.name, *row.aliases)]
    refuse_unmatched([("full_parameters", pattern)], names, "parameter", EngineError)
    stage = sharded.comm.grid.coord().pp
    return [row.name for row in _rows(sharded, pattern) if stage in row.owners]


def _rows(sharded: ShardedModel, pattern: str) -> list[ShardRow]:
    return [row for row in sharded.table if any(fnmatchcase(name, pattern) for name in (row.name, *row.aliases))]


@torch.no_grad()
def _check_data_ranks(flats: Sequence[FlatBucket], sharded: ShardedModel) -> None:
    """Refuse different writes on data ranks: of the gathered bucket, each rank keeps only its own shard."""
    if not flats:
        return
    mine = torch.stack([bit_sum(flat.params) for flat in flats])
    table = gather_from_all(mine, sharded.comm, mine.device, LABEL, "dp")
    differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
    if differing:
        slots = flats[differing[0]].bucket.slots
        raise EngineError(
            f"full_parameters: data ranks have written different values into {slots[0].name!r} or a parameter that is "
            "gathered with it, and none of them is kept; write the same values on every rank."
        )


@torch.no_grad()
def _check_holders(chosen: Mapping[str, nn.Parameter], pattern: str, sharded: ShardedModel) -> None:
    """Refuse different writes to tied parameters on their stages, and to uncut parameters on tensor ranks."""
    tp = sharded.comm.grid.tp
    shared = [row.name for row in _rows(sharded, pattern) if len(row.owners) > 1 or (row.dim is None and tp > 1)]
    if not shared:
        return
    absent = torch.iinfo(torch.int64).min
    device = next(iter(sharded.buckets)).params.device
    sums = [bit_sum(chosen[name]) if name in chosen else torch.tensor(absent, device=device) for name in shared]
    table = gather_from_all(torch.stack(sums), sharded.comm, device, LABEL, "replica")
    for name, column in zip(shared, table.T.tolist(), strict=True):
        if len({held for held in column if held != absent}) > 1:
            raise EngineError(
                f"full_parameters: {name!r} lies on several stages or tensor ranks, which have written different "
                "values into it, and none of them is kept; write the same values on every rank that holds it."
            )
