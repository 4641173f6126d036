"""Sharded parameters for the user's eyes and hands, between steps (ZeRO 3)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from engine.bits import bit_sum
from engine.build import Parts
from engine.errors import EngineError
from engine.zero.storage import FlatBucket

LABEL = "full parameters"


@contextmanager
def full_parameters(parts: Parts, model: nn.Module, pattern: str) -> Iterator[dict[str, nn.Parameter]]:
    """See :meth:`engine.Engine.full_parameters`."""
    names = _matching(parts, pattern)
    named = dict(model.named_parameters())
    chosen = {name: named[name] for name in names}
    gathering = parts.bench.gathering
    if gathering is None:
        yield chosen
        return
    if gathering.running:
        raise EngineError(
            "full_parameters inside a forward, where parameters are whole while their module runs; call it between "
            "steps, or read them in the module that has them."
        )
    flats = (*parts.buckets, *parts.frozen)
    wanted = [i for i, flat in enumerate(flats) if any(slot.name in chosen for slot in flat.bucket.slots)]
    opened = gathering.open(wanted)
    try:
        yield chosen
        _take_back([flats[index] for index in sorted(opened)], parts)
    finally:
        gathering.close(opened)


def _matching(parts: Parts, pattern: str) -> list[str]:
    """Names on this rank's stage; a pattern has to match on some stage."""
    rows = [row for row in parts.plan.table if any(fnmatchcase(name, pattern) for name in (row.name, *row.aliases))]
    if not rows:
        raise EngineError(
            f"full_parameters({pattern!r}) matches no parameter; give a name or pattern of model.named_parameters()."
        )
    stage = parts.comm.grid.coord().pp
    return [row.name for row in rows if stage in row.stages]


@torch.no_grad()
def _take_back(flats: Sequence[FlatBucket], parts: Parts) -> None:
    """Keep what was written, if all data ranks have written the same."""
    if not flats:
        return
    comm = parts.comm
    sums = torch.stack([bit_sum(flat.params) for flat in flats])
    table = torch.empty((comm.grid.dp, len(flats)), dtype=sums.dtype, device=sums.device)
    comm.all_gather(table.view(-1), sums, "dp", LABEL).wait()
    differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
    if differing:
        slots = flats[differing[0]].bucket.slots
        raise EngineError(
            f"full_parameters: data ranks have written different values into {slots[0].name!r} or a parameter that is "
            "gathered with it, and none is kept; write the same on every rank."
        )
    for flat in flats:
        flat.kept.copy_(flat.params[flat.shard])
