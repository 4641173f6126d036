"""Turns the samples of the checkpoint benchmark into a table, verdicts on its goals, and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

GIGABYTE = 10**9


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurement of one operation in one format."""

    part: str
    """Operation, such as "write" or "read warm"."""
    mode: str
    """Name of the checkpoint format."""
    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads of this process, user and system."""
    bytes: int
    """Bytes of the needed tensors."""
    disk_bytes: int
    """Bytes read from disk."""


Rounds = Sequence[Sequence[Sample]]
"""Samples by round; each round has the same (operation, format) pairs in any order."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal for one operation in one format, relative to a peer."""

    part: str
    mode: str
    peer: str = ""
    """Format with the reference time; empty: disk bytes over needed bytes."""
    at_most: float | None = None
    """Maximum ratio of the time to the peer's."""
    at_least: float | None = None
    """Minimum ratio of the speed to the peer's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Goal with the measured ratio that it is checked against."""

    goal: Goal
    figure: float
    """Median over rounds of the ratio within a round."""

    @property
    def passed(self) -> bool:
        """True if the goal is reached."""
        if self.goal.at_least is not None:
            return self.figure >= self.goal.at_least
        return self.goal.at_most is None or self.figure <= self.goal.at_most

    def __str__(self) -> str:
        goal, end = self.goal, "pass" if self.passed else "FAIL"
        what = f"{goal.part}: {goal.mode}"
        if not goal.peer:
            return f"{what} reads {self.figure:.2f}x the wanted bytes from the disk; at most {goal.at_most} -> {end}"
        if goal.at_most is not None:
            return f"{what} takes {self.figure:.2f}x the time of {goal.peer}; at most {goal.at_most} -> {end}"
        limit = "no goal" if goal.at_least is None else f"at least {goal.at_least} -> {end}"
        return f"{what} is {self.figure:.2f}x as fast as {goal.peer}; {limit}"


def judge(rounds: Rounds, goal: Goal) -> Verdict:
    """Computes the figure for a goal, from ratios within rounds, since a disturbance affects both formats."""
    found = [{sample.mode: sample for sample in samples if sample.part == goal.part} for samples in rounds]
    if not goal.peer:
        return Verdict(goal, median(modes[goal.mode].disk_bytes / modes[goal.mode].bytes for modes in found))
    ratios = [modes[goal.mode].seconds / modes[goal.peer].seconds for modes in found]
    return Verdict(goal, median(ratios if goal.at_most is not None else [1 / ratio for ratio in ratios]))


def table(rounds: Rounds, bases: Mapping[str, str]) -> str:
    """Formats the results as aligned text, one line per format; *x*: median ratio of seconds to the base in the same
    round.
    """
    lines: list[list[str]] = []
    for part, base in bases.items():
        lines.append([part, "s", "fastest-slowest", "GB/s", f"x {base}", "CPU s/GB", "disk/wanted"])
        members = [sample.mode for sample in rounds[0] if sample.part == part]
        order = {mode: median(s.seconds for s in _of(rounds, part, mode)) for mode in members}
        lines += [_line(rounds, part, mode, base) for mode in sorted(members, key=lambda mode: order[mode])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text: list[str] = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        heading = line[0] in bases
        text += ["", "  ".join(cells), "  ".join("-" * width for width in widths)] if heading else ["  ".join(cells)]
    return "\n".join(text[1:])


def _line(rounds: Rounds, part: str, mode: str, base: str) -> list[str]:
    samples = _of(rounds, part, mode)
    seconds = [sample.seconds for sample in samples]
    times = judge(rounds, Goal(part, mode, base, at_most=0)).figure
    disk = median(sample.disk_bytes / sample.bytes for sample in samples)
    return [
        mode, f"{median(seconds):.3f}", f"{min(seconds):.3f}-{max(seconds):.3f}",
        f"{median(s.bytes / s.seconds for s in samples) / GIGABYTE:.2f}", f"{times:.2f}",
        f"{median(s.cpu_seconds / s.bytes for s in samples) * GIGABYTE:.3f}",
        f"{disk:.2f}" if part.startswith(("read", "rows")) else "",
    ]  # fmt: skip


def _of(rounds: Rounds, part: str, mode: str) -> list[Sample]:
    return [sample for samples in rounds for sample in samples if (sample.part, sample.mode) == (part, mode)]


def as_json(rounds: Rounds, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns verdicts and all samples as a JSON object."""
    return {
        "verdicts": [asdict(v.goal) | {"figure": v.figure, "passed": v.passed} for v in verdicts],
        "rounds": [[asdict(sample) for sample in samples] for samples in rounds],
    }
