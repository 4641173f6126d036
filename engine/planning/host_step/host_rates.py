"""What the processors of a host reach: measured seconds of operators and collectives by size. Data, no torch.

    operators     "product nt": tokens x inner x outer; "gelu": elements; "attention": rows, width of a head
    collectives   "dp all_reduce": bytes of the tensor
    engine        what the engine itself takes beside them: of a step, of a microbatch, of each operator

Between sizes that were measured, the logarithm of the seconds for a unit of work follows a straight line in the
logarithm of each size. Beyond them a unit of work takes what it takes at the edge, and nothing takes less than the
least that was measured.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from engine.errors import ConfigError
from engine.planning.cost_model.links import LinkSpeed

KEY = "host"
"""Of a hardware file: the entry that holds these rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsTable:
    """Seconds of an operator at all combinations of some sizes."""

    sizes: tuple[tuple[float, ...], ...]
    """Of each direction, ascending."""
    seconds: tuple[float, ...]
    """By combination, the last direction fastest."""

    def at(self, *wanted: float) -> float:
        """Seconds at these sizes."""
        places = [_place(steps, max(size, 1.0)) for steps, size in zip(self.sizes, wanted, strict=True)]
        found = 0.0
        for corner in product((0, 1), repeat=len(places)):
            share, index, work = 1.0, 0, 1.0
            for far, (low, high, part), steps in zip(corner, places, self.sizes, strict=True):
                here = high if far else low
                share *= part if far else 1 - part
                index = index * len(steps) + here
                work *= steps[here]
            if share:
                found += share * math.log(self.seconds[index] / work)
        return max(min(self.seconds), math.exp(found) * math.prod(max(size, 1.0) for size in wanted))


def _place(steps: Sequence[float], size: float) -> tuple[int, int, float]:
    """(index below, index above, how far between them, from 0 to 1)."""
    if size <= steps[0] or len(steps) == 1:
        return 0, 0, 0.0
    if size >= steps[-1]:
        return len(steps) - 1, len(steps) - 1, 0.0
    above = next(index for index, step in enumerate(steps) if step >= size)
    low, high = steps[above - 1], steps[above]
    return above - 1, above, math.log(size / low) / math.log(high / low)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeconds:
    """What the engine and Python take of a processor beside operators and collectives."""

    step: float
    microbatch: float
    """Of its forward and backward together."""
    operator: float
    """For each operator of a forward or backward: modules, autograd, hooks."""
    handover: float = 0.0
    """For each action of a pipeline."""
    gather: float = 0.0
    """For each group of parameters that is gathered and freed (ZeRO 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """The rates of a host while ``ranks`` ranks of one thread each are busy."""

    ranks: int
    operators: Mapping[str, SecondsTable]
    collectives: Mapping[str, SecondsTable]
    """By axis and operation; the size is the bytes of the whole tensor."""
    overlap: float
    """Of a collective beside computation: the part that costs nothing, from 0 to 1."""
    engine: EngineSeconds

    def seconds(self, operator: str, *sizes: float) -> float:
        """Of one call; an operator that was not measured takes what a sum of two tensors takes."""
        table = self.operators.get(operator)
        return self.operators["add"].at(math.prod(sizes)) if table is None else table.at(*sizes)

    def as_json(self) -> dict[str, Any]:
        """For a hardware file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MeasuredLink(LinkSpeed):
    """A collective whose rate depends on its size."""

    calls: SecondsTable
    """Seconds of a call by the bytes that a rank sends in it."""

    def seconds(self, calls: float, count: float) -> float:
        """Of ``calls`` of equal size that send ``count`` bytes together."""
        return calls * self.calls.at(count / calls) if calls else 0.0


def measured_link(table: SecondsTable, share: float) -> MeasuredLink:
    """The link of a collective of which a rank sends ``share`` of the bytes of the tensor."""
    sizes = tuple(share * size for size in table.sizes[0])
    return MeasuredLink(
        table.seconds[0],
        sizes[-1] / table.seconds[-1],
        SecondsTable(sizes=(sizes,), seconds=table.seconds),
    )


def typical_rates(rounds: Sequence[HostRates]) -> HostRates:
    """The median of each number of several measurements of the same tables."""
    first = rounds[0]
    engines = [each.engine for each in rounds]
    return replace(
        first,
        operators={name: _typical([each.operators[name] for each in rounds]) for name in first.operators},
        collectives={name: _typical([each.collectives[name] for each in rounds]) for name in first.collectives},
        overlap=median(each.overlap for each in rounds),
        engine=EngineSeconds(
            **{one.name: median(getattr(each, one.name) for each in engines) for one in fields(EngineSeconds)}
        ),
    )


def _typical(tables: Sequence[SecondsTable]) -> SecondsTable:
    seconds = zip(*(table.seconds for table in tables), strict=True)
    return replace(tables[0], seconds=tuple(map(median, seconds)))


def load_host_rates(path: Path) -> HostRates | None:
    """The rates that a hardware file holds; None if it has none, such as the file of a GPU.

    Raises:
        ConfigError: the entry is not what ``trine plan --calibrate`` writes.
    """
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return None if KEY not in raw else host_rates_of(raw[KEY])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--gpu {path} has an entry "{KEY}" that is not whole ({type(error).__name__}: {error}); write the file '
            "anew by trine plan --calibrate."
        ) from None


def host_rates_of(raw: Mapping[str, Any]) -> HostRates:
    """The rates that :meth:`HostRates.as_json` gave."""
    return HostRates(
        ranks=int(raw["ranks"]),
        operators=dict(_tables(raw["operators"])),
        collectives=dict(_tables(raw["collectives"])),
        overlap=float(raw["overlap"]),
        engine=EngineSeconds(**raw["engine"]),
    )


def _tables(raw: Mapping[str, Any]) -> Iterator[tuple[str, SecondsTable]]:
    for name, table in raw.items():
        sizes = tuple(tuple(float(size) for size in steps) for steps in table["sizes"])
        seconds = tuple(float(each) for each in table["seconds"])
        if len(seconds) != math.prod(map(len, sizes)) or min(seconds) <= 0:
            raise ValueError(f"the table of {name} has {len(seconds)} seconds")
        yield name, SecondsTable(sizes=sizes, seconds=seconds)
