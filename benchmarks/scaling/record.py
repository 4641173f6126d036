"""What a benchmark of scaling has found, as one JSON file that several jobs fill.

One row for each node count, grid and mode, with one sample for each round. The file is written anew after every sample,
and a job leaves out what it finds there.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from benchmarks.scaling.ranking import GridChoice
from engine.planning.cost_model.links import LinkSpeed
from engine.planning.step_time.prediction import Computation, HostLinks, StepTime

VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMeasurement:
    """An axis alone, the slowest of its groups, all of them at once."""

    axis: str
    ranks: int
    hosts: int
    """Over which its widest group lies."""
    latency: float
    """Seconds of an all-reduce, or of a message and its answer, of 8 bytes."""
    rate: float
    """Bytes a second that a rank sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one round has measured of the ranks and their links, for the prediction."""

    nodes: int
    ranks: int
    """Of a node."""
    computation: Computation
    links: HostLinks

    @property
    def key(self) -> tuple[int, int]:
        """Nodes and ranks of a node."""
        return self.nodes, self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One round of a grid."""

    seconds: float
    """Of a step, the median of the round."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds a step for which a rank has waited, by axis; the mean of all ranks."""


RowKey = tuple[int, int, str, GridChoice]
"""Nodes, ranks of a node, mode and grid: what a file has one row of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """A grid on a number of nodes."""

    nodes: int
    ranks: int
    """Of a node."""
    mode: str
    choice: GridChoice
    tokens: int
    """Of a step, all ranks together."""
    flops: int
    samples: tuple[Sample, ...] = ()
    axes: tuple[AxisMeasurement, ...] = ()
    predicted: StepTime | None = None
    refused: str = ""
    """Why there is no such grid."""

    @property
    def key(self) -> RowKey:
        """What a file has one row of."""
        return self.nodes, self.ranks, self.mode, self.choice

    @property
    def world(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks

    @property
    def seconds(self) -> float | None:
        """Of a step, the median of its rounds; None: not measured."""
        return median(sample.seconds for sample in self.samples) if self.samples else None

    @property
    def waits(self) -> dict[str, float]:
        """By axis, the median of its rounds."""
        axes = dict.fromkeys(axis for sample in self.samples for axis in sample.waits)
        return {axis: median(sample.waits.get(axis, 0.0) for sample in self.samples) for axis in axes}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord:
    """The whole file."""

    task: Mapping[str, Any]
    """Sizes; a file has those of one task."""
    peak_flops: float | None = None
    """Of a rank's device."""
    machines: tuple[Machine, ...] = ()
    rows: tuple[ScalingRow, ...] = ()

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """(nodes, ranks of a node) of all machines."""
        return tuple(sorted({machine.key for machine in self.machines}))

    def row(self, key: RowKey) -> ScalingRow | None:
        """The row of this key."""
        return next((row for row in self.rows if row.key == key), None)

    def with_row(self, row: ScalingRow) -> Self:
        """With ``row`` in place of that of its key, or at the end."""
        if self.row(row.key) is None:
            return replace(self, rows=(*self.rows, row))
        return replace(self, rows=tuple(row if row.key == old.key else old for old in self.rows))

    def machine(self, key: tuple[int, int]) -> Machine | None:
        """The medians of what all rounds have measured of these nodes and ranks."""
        found = [machine for machine in self.machines if machine.key == key]
        return _middle(found) if found else None


def merged(records: Iterable[ScalingRecord]) -> ScalingRecord:
    """One record of several: rows of one key are joined, the later one's prediction counts.

    Raises:
        ValueError: there is none, or they are of different tasks.
    """
    first, *others = records
    for other in others:
        if other.task != first.task:
            raise ValueError(f"results of {other.task} and of {first.task} cannot be merged.")
        machines = (*first.machines, *(each for each in other.machines if each not in first.machines))
        first = replace(first, machines=machines)
        for row in other.rows:
            old = first.row(row.key)
            first = first.with_row(row if old is None else _joined(old, row))
    return first


def _joined(old: ScalingRow, new: ScalingRow) -> ScalingRow:
    samples = (*old.samples, *(sample for sample in new.samples if sample not in old.samples))
    return replace(new, samples=samples, axes=new.axes or old.axes, predicted=new.predicted or old.predicted)


def _middle(found: Sequence[Machine]) -> Machine:
    def of(parts: Sequence[Any]) -> Any:
        first = parts[0]
        names = [each.name for each in fields(first)]
        values = {name: [getattr(part, name) for part in parts] for name in names}
        return replace(first, **{
            name: median(given) for name, given in values.items() if isinstance(given[0], float)
        })  # fmt: skip

    links = [machine.links for machine in found]
    return replace(
        found[0],
        computation=of([machine.computation for machine in found]),
        links=HostLinks(within=of([each.within for each in links]), between=of([each.between for each in links])),
    )


# ------------------------------------------------------------------ the file


def read_record(path: Path) -> ScalingRecord:
    """Read a file.

    Raises:
        ValueError: it is no such file.
    """
    given = json.loads(path.read_text(encoding="utf-8"))
    if given.get("version") != VERSION:
        raise ValueError(f"{path} is no file of this benchmark of version {VERSION}.")
    return ScalingRecord(
        task=given["task"],
        peak_flops=given["peak_flops"],
        machines=tuple(map(_machine, given["machines"])),
        rows=tuple(map(_row, given["rows"])),
    )


def write_record(record: ScalingRecord, path: Path) -> None:
    """Write a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"version": VERSION, **asdict(record)}, indent=1)
    with beside.open("w", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _machine(given: Mapping[str, Any]) -> Machine:
    links = HostLinks(**{name: LinkSpeed(**speed) for name, speed in given["links"].items()})
    return Machine(**{**given, "computation": Computation(**given["computation"]), "links": links})


def _row(given: Mapping[str, Any]) -> ScalingRow:
    return ScalingRow(
        **{
            **given,
            "choice": GridChoice(**given["choice"]),
            "samples": tuple(Sample(**each) for each in given["samples"]),
            "axes": tuple(AxisMeasurement(**each) for each in given["axes"]),
            "predicted": StepTime(**given["predicted"]) if given["predicted"] else None,
        }
    )


def measured_rows(record: ScalingRecord, mode: str) -> Iterator[tuple[ScalingRow, float]]:
    """(row, seconds of a step) of a mode."""
    for row in record.rows:
        if row.mode == mode and (seconds := row.seconds) is not None:
            yield row, seconds
