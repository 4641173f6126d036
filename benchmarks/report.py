"""From the samples of all rounds to rows, verdicts, a table and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

LIMIT = 1.03
"""CPU seconds of Trine over those of DDP, before the spread of the measurement is added."""
LOSS_TOLERANCE = 1e-5
"""Nats by which the modes may differ after the same number of steps."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One mode in one round, per step."""

    mode: str
    seconds: float
    cpu_seconds: float
    """Summed over ranks."""
    sent_bytes: int
    """Per rank, by ring convention."""
    loopback_bytes: int | None
    """Per rank, as the loopback interface counted it."""
    live_bytes: int
    """Per rank, when the optimizer has just updated."""
    peak_resident_bytes: int
    startup_seconds: float
    loss: float
    """Global loss of the last step of the round."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One Trine mode against DDP."""

    mode: str
    ratio: float
    """Median over rounds of CPU seconds over those of DDP in the same round."""
    spread: float
    """Median over rounds of the distance from 1 of the ratio of DDP's two teams.

    A median, not the largest: one disturbed round must not widen the limit, or noise would help to pass.
    """

    @property
    def passed(self) -> bool:
        """Whether the ratio keeps the limit."""
        return self.ratio <= LIMIT + self.spread

    def __str__(self) -> str:
        limit = f"limit {LIMIT:.2f} + spread of DDP against itself ({self.spread:.3f})"
        return f"CPU seconds of {self.mode} = {self.ratio:.3f}x DDP; {limit} -> {'pass' if self.passed else 'FAIL'}"


Rounds = Sequence[Sequence[Sample]]
"""By round; in each the same modes, in any order."""


def judge(rounds: Rounds, trine: str, ddp: str, control: str) -> Verdict:
    """Pair ``trine`` with the mean of both DDP teams of its round."""
    ratios, spreads = [], []
    for samples in rounds:
        cpu = {sample.mode: sample.cpu_seconds for sample in samples}
        ratios.append(cpu[trine] / mean((cpu[ddp], cpu[control])))
        spreads.append(abs(cpu[control] / cpu[ddp] - 1))
    return Verdict(trine, median(ratios), median(spreads))


def loss_spread(rounds: Rounds) -> float:
    """Largest difference in loss between any two samples: every round repeats the same steps."""
    losses = [sample.loss for samples in rounds for sample in samples]
    return max(losses) - min(losses)


def medians(rounds: Rounds) -> list[Sample]:
    """One row a mode, in the order of the first round; bytes on the interface are the smallest seen."""
    return [_middle([s for samples in rounds for s in samples if s.mode == first.mode]) for first in rounds[0]]


def _middle(samples: Sequence[Sample]) -> Sample:
    crossed = [sample.loopback_bytes for sample in samples if sample.loopback_bytes is not None]
    return Sample(
        mode=samples[0].mode,
        seconds=median(sample.seconds for sample in samples),
        cpu_seconds=median(sample.cpu_seconds for sample in samples),
        sent_bytes=max(sample.sent_bytes for sample in samples),
        loopback_bytes=min(crossed) if crossed else None,
        live_bytes=max(sample.live_bytes for sample in samples),
        peak_resident_bytes=max(sample.peak_resident_bytes for sample in samples),
        startup_seconds=median(sample.startup_seconds for sample in samples),
        loss=samples[-1].loss,
    )


_HEADINGS = (
    "mode",
    "wall s",
    "x DDP",
    "CPU s",
    "x DDP",
    "sent MB",
    "on wire MB",
    "live MB",
    "peak MB",
    "start s",
    "loss",
)


def table(rounds: Rounds, ddp: str, control: str) -> str:
    """Aligned text, one line a mode; ratios are medians of ratios within a round. MB are 10^6 bytes."""
    lines = [list(_HEADINGS)]
    for row in medians(rounds):
        wall = median(_ratios(rounds, row.mode, (ddp, control), "seconds"))
        cpu = median(_ratios(rounds, row.mode, (ddp, control), "cpu_seconds"))
        lines.append([
            row.mode, f"{row.seconds:.3f}", f"{wall:.2f}", f"{row.cpu_seconds:.3f}", f"{cpu:.3f}",
            _megabytes(row.sent_bytes), _megabytes(row.loopback_bytes), _megabytes(row.live_bytes),
            _megabytes(row.peak_resident_bytes, 0), f"{row.startup_seconds:.2f}", f"{row.loss:.6f}",
        ])  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(_aligned(line, widths) for line in lines)


def _ratios(rounds: Rounds, mode: str, baseline: tuple[str, str], field: str) -> list[float]:
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
    """Rows, verdicts and all samples."""
    return {
        "rows": [asdict(row) for row in medians(rounds)],
        "verdicts": [asdict(verdict) | {"limit": LIMIT, "passed": verdict.passed} for verdict in verdicts],
        "loss_spread": loss_spread(rounds),
        "rounds": [[asdict(sample) for sample in samples] for samples in rounds],
    }
