"""Turns the samples of all rounds into rows, verdicts, a table and JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from benchmarks.harness.footprint import Footprint, largest

LOSS_STEP = 10
LOSS_TOLERANCE = 1e-5
"""Maximum difference in nats between modes after equal steps."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurement of one mode in one round, per step."""

    mode: str
    seconds: float
    cpu_seconds: float
    """CPU seconds per step, summed over ranks."""
    startup_seconds: float
    loss: float
    """Global loss of step LOSS_STEP, or of the last timed step if there are fewer."""
    loopback_bytes: int | None
    """Bytes per step and rank, as counted by the loopback interface; None if unknown."""
    footprint: Footprint
    """Memory and traffic of the largest rank."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of one mode with another, the peer."""

    mode: str
    peer: str
    control: str | None = None
    """Name of a second team of the peer, for the measurement's noise."""
    limit: float | None = None
    """Maximum ratio of CPU seconds to the peer's, before the spread is added; None: no limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of two modes, with the measured ratio of CPU seconds and its limit."""

    asked: Comparison
    ratio: float
    """Median over rounds of CPU seconds over the peer's in the same round."""
    spread: float = 0.0
    """Median over rounds of |1 - ratio| between the peer's two teams.

    A median rather than a maximum, so that one disturbed round does not widen the limit.
    """

    @property
    def passed(self) -> bool:
        """True if the ratio is within limit plus spread."""
        return self.asked.limit is None or self.ratio <= self.asked.limit + self.spread

    def __str__(self) -> str:
        found = f"CPU seconds of {self.asked.mode} = {self.ratio:.3f}x {self.asked.peer}"
        if self.asked.limit is None:
            return f"{found}; no limit"
        noise = f" + spread of {self.asked.peer} against itself ({self.spread:.3f})" if self.asked.control else ""
        limit = max(f"{self.asked.limit:.2f}", f"{self.asked.limit:g}", key=len)
        return f"{found}; limit {limit}{noise} -> {'pass' if self.passed else 'FAIL'}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """Mode that the table's ratios refer to: the mean of these modes in the same round."""

    heading: str
    modes: tuple[str, ...]


Rounds = Sequence[Sequence[Sample]]
"""Samples by round; each round has the same modes in any order."""


def judge(rounds: Rounds, asked: Comparison) -> Verdict:
    """Compares CPU seconds of a mode with the mean of its peer's teams in the same round."""
    if asked.control is None:
        return Verdict(asked, median(_ratios(rounds, asked.mode, (asked.peer,), "cpu_seconds")))
    teams = (asked.peer, asked.control)
    apart = [abs(ratio - 1) for ratio in _ratios(rounds, asked.control, (asked.peer,), "cpu_seconds")]
    return Verdict(asked, median(_ratios(rounds, asked.mode, teams, "cpu_seconds")), median(apart))


def loss_spread(rounds: Rounds) -> float:
    """Returns the maximum difference in loss between any two samples, which repeat the same steps."""
    losses = [sample.loss for samples in rounds for sample in samples]
    return max(losses) - min(losses)


def wrong_losses(rounds: Rounds, baseline: Sequence[str], tolerance: float = LOSS_TOLERANCE) -> dict[str, float]:
    """Returns the maximum loss difference to ``baseline`` in nats, for modes beyond ``tolerance``."""
    apart: dict[str, float] = {}
    for samples in rounds:
        right = mean(sample.loss for sample in samples if sample.mode in baseline)
        for sample in samples:
            apart[sample.mode] = max(apart.get(sample.mode, 0.0), abs(sample.loss - right))
    return {mode: distance for mode, distance in apart.items() if not distance <= tolerance}  # also not a number


def medians(rounds: Rounds) -> list[Sample]:
    """Returns one sample of medians per mode, in the order of the first round; interface bytes are minima."""
    return [_middle([s for samples in rounds for s in samples if s.mode == first.mode]) for first in rounds[0]]


def _middle(samples: Sequence[Sample]) -> Sample:
    crossed = [sample.loopback_bytes for sample in samples if sample.loopback_bytes is not None]
    return Sample(
        mode=samples[0].mode,
        seconds=median(sample.seconds for sample in samples),
        cpu_seconds=median(sample.cpu_seconds for sample in samples),
        startup_seconds=median(sample.startup_seconds for sample in samples),
        loss=samples[-1].loss,
        loopback_bytes=min(crossed) if crossed else None,
        footprint=largest([sample.footprint for sample in samples]),
    )


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the table after the seconds: heading and format."""

    heading: str
    show: Callable[[Sample], str]


SENT = (
    Column("sent MB", lambda row: _megabytes(row.footprint.sent_bytes)),
    Column("on wire MB", lambda row: _megabytes(row.loopback_bytes)),
)
CALLS = Column("calls", lambda row: str(row.footprint.calls))
STATE = Column("state MB", lambda row: _megabytes(row.footprint.state_bytes))
LIVE = Column("live MB", lambda row: _megabytes(row.footprint.live_bytes))
STEP_PEAK = Column("step MB", lambda row: _megabytes(row.footprint.step_peak_bytes))
ACTIVATIONS = Column("held MB", lambda row: _megabytes(row.footprint.activation_bytes))
RESIDENT = Column("peak MB", lambda row: _megabytes(row.footprint.peak_resident_bytes, 0))
END = (
    Column("start s", lambda row: f"{row.startup_seconds:.2f}"),
    Column("loss", lambda row: f"{row.loss:.6f}"),
)


def table(rounds: Rounds, baseline: Baseline, columns: Sequence[Column]) -> str:
    """Formats results as aligned text, one line per mode, with median ratios within rounds. MB: 10^6 bytes."""
    against = baseline.heading
    lines = [["mode", "wall s", against, "CPU s", against, *(column.heading for column in columns)]]
    for row in medians(rounds):
        wall = median(_ratios(rounds, row.mode, baseline.modes, "seconds"))
        cpu = median(_ratios(rounds, row.mode, baseline.modes, "cpu_seconds"))
        spent = [f"{row.seconds:.3f}", f"{wall:.2f}", f"{row.cpu_seconds:.3f}", f"{cpu:.3f}"]
        lines.append([row.mode, *spent, *(column.show(row) for column in columns)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(_aligned(line, widths) for line in lines)


def _ratios(rounds: Rounds, mode: str, baseline: Sequence[str], field: str) -> list[float]:
    found = []
    for samples in rounds:
        value = {sample.mode: float(getattr(sample, field)) for sample in samples}
        found.append(value[mode] / mean(value[name] for name in baseline))
    return found


def _megabytes(count: int | None, digits: int = 1) -> str:
    return "-" if count is None else f"{count / 1e6:.{digits}f}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest])


def as_json(rounds: Rounds, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns rows, verdicts and all samples as a JSON object."""
    return {
        "rows": [_flat(row) for row in medians(rounds)],
        "verdicts": [_as_json(verdict) for verdict in verdicts],
        "loss_spread": loss_spread(rounds),
        "rounds": [[_flat(sample) for sample in samples] for samples in rounds],
    }


def _flat(sample: Sample) -> dict[str, Any]:
    fields = asdict(sample)
    footprint: dict[str, int] = fields.pop("footprint")
    return fields | footprint


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return asdict(verdict.asked) | {"ratio": verdict.ratio, "spread": verdict.spread, "passed": verdict.passed}
