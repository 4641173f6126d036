"""Scaling record: results of several jobs in one JSON file.

One row for each node count, grid and mode, with one sample for each round. The file is rewritten after every sample,
and samples already in the file are not measured again.
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
    """Measured links of one axis: the slowest of its groups, all measured at once."""

    axis: str
    ranks: int
    hosts: int
    """Number of hosts that the widest group spans."""
    latency: float
    """Seconds of an 8-byte all-reduce, or of an 8-byte message and its answer."""
    rate: float
    """Bytes per second that a rank sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Measured computation and links of one round, the prediction's inputs."""

    nodes: int
    ranks: int
    """Number of ranks per node."""
    computation: Computation
    links: HostLinks

    @property
    def key(self) -> tuple[int, int]:
        """Pair (nodes, ranks per node)."""
        return self.nodes, self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Measurement of one round of a grid."""

    seconds: float
    """Median seconds per step of the round."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Mean waiting seconds per step and rank, by axis."""


RowKey = tuple[int, int, str, GridChoice]
"""Key of a row: nodes, ranks per node, mode and grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """Results of a grid on a number of nodes."""

    nodes: int
    ranks: int
    """Number of ranks per node."""
    mode: str
    choice: GridChoice
    tokens: int
    """Number of tokens per step, over all ranks."""
    flops: int
    samples: tuple[Sample, ...] = ()
    axes: tuple[AxisMeasurement, ...] = ()
    predicted: StepTime | None = None
    refused: str = ""
    """Reason why the grid is impossible; empty if it ran."""

    @property
    def key(self) -> RowKey:
        """Key that identifies the row in the record."""
        return self.nodes, self.ranks, self.mode, self.choice

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.ranks

    @property
    def seconds(self) -> float | None:
        """Median seconds per step over rounds; None: not measured."""
        return median(sample.seconds for sample in self.samples) if self.samples else None

    @property
    def waits(self) -> dict[str, float]:
        """Median waiting seconds per step over rounds, by axis."""
        axes = dict.fromkeys(axis for sample in self.samples for axis in sample.waits)
        return {axis: median(sample.waits.get(axis, 0.0) for sample in self.samples) for axis in axes}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord:
    """Contents of a scaling record file."""

    task: Mapping[str, Any]
    """Sizes of the task, one per file."""
    peak_flops: float | None = None
    """Peak FLOP/s of a rank's device."""
    machines: tuple[Machine, ...] = ()
    rows: tuple[ScalingRow, ...] = ()

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """Pairs (nodes, ranks per node) of all machines."""
        return tuple(sorted({machine.key for machine in self.machines}))

    def row(self, key: RowKey) -> ScalingRow | None:
        """Returns the row with this key; None if missing."""
        return next((row for row in self.rows if row.key == key), None)

    def with_row(self, row: ScalingRow) -> Self:
        """Returns the record with ``row`` added or replaced by its key."""
        if self.row(row.key) is None:
            return replace(self, rows=(*self.rows, row))
        return replace(self, rows=tuple(row if row.key == old.key else old for old in self.rows))

    def machine(self, key: tuple[int, int]) -> Machine | None:
        """Returns the medians of all rounds' measurements for these nodes and ranks."""
        found = [machine for machine in self.machines if machine.key == key]
        return _middle(found) if found else None


def merged(records: Iterable[ScalingRecord]) -> ScalingRecord:
    """Merges records: rows with equal keys are joined, with the later prediction.

    Raises:
        ValueError: ``records`` is empty, or contains different tasks.
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
    """Reads a scaling record from its file."""
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
    """Writes a scaling record to its file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"version": VERSION, **asdict(record)}, indent=1)
    with beside.open("w", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _computation(given: Mapping[str, Any]) -> Computation:
    fields: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    return Computation(**fields)


def _machine(given: Mapping[str, Any]) -> Machine:
    links = HostLinks(**{name: LinkSpeed(**speed) for name, speed in given["links"].items()})
    return Machine(**{**given, "computation": _computation(given["computation"]), "links": links})


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
    """Yields (row, seconds per step) for the measured rows of ``mode``."""
    for row in record.rows:
        if row.mode == mode and (seconds := row.seconds) is not None:
            yield row, seconds
