"""Full access to sharded parameters between steps, for reading and writing (ZeRO 3)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from engine.errors import EngineError
from engine.parallel.comm.agreement import bit_sum
from engine.parallel.comm.comm import Comm
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.parallel.model.whole_sizes import sizes_of_parts
from engine.parallel.shard_table import ShardTable
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.full_tensors import check_data_ranks, check_holders, matching_rows
from engine.zero.gather.gatherer import ParameterGatherer


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
            check_data_ranks(digests, "full_parameters", sharded.comm)
            held, device = {name: bit_sum(parameter) for name, parameter in chosen.items()}, flats[0].params.device
            check_holders(held, matching_rows(sharded.table, pattern), "full_parameters", sharded.comm, device)
        for flat in written:
            flat.kept.copy_(flat.params[flat.shard])
    finally:
        gatherer.close(opened)


def _matching(sharded: ShardedModel, pattern: str) -> list[str]:
    """Return the matching names on this rank's stage; the pattern must match on some stage."""
    names = [name for row in sharded.table for name in (row.name, *row.aliases)]
    refuse_unmatched([("full_parameters", pattern)], names, "parameter", EngineError)
    stage = sharded.comm.grid.coord().pp
    matching = matching_rows(sharded.table, pattern)
    if all(row.quantized is not None for row in matching):
        raise EngineError(
            f"full_parameters({pattern!r}) names weights that are held as codes alone (quantize_frozen), which cannot "
            "be written; read them in eng.full_state_dict(), or name them in quantize_frozen.skip."
        )
    return [row.name for row in matching if stage in row.owners and row.quantized is None]
