"""Turns kernel measurements into shares of the limits, verdicts, a table, and rows of ``kernels/tuned.json``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.figures import markdown_table
from benchmarks.kernels.cases.case import Case, Cost, Direction, Target, short
from benchmarks.kernels.trial import COMPILED, EAGER, REFERENCE, TRITON

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")
Measured = Mapping[str, Any]
"""Result of ``trial.measure_case``, or {"error": reason}."""
Rates = Mapping[str, float]


def seconds(found: Measured, contender: str, direction: Direction) -> float | None:
    """Returns the median seconds of a contender; None if not measured."""
    value = found.get("contenders", {}).get(contender, {}).get("seconds", {}).get(direction)
    return None if value is None else float(value)


def cost_of(case: Case, direction: Direction) -> Cost:
    """Returns minimum bytes and FLOPs of a direction."""
    return {"forward": case.forward, "backward": case.backward or Cost(), "both": case.both}[direction]


def share(case: Case, found: Measured, direction: Direction, rates: Rates) -> float | None:
    """Returns our kernel's fraction of the copy rate, or of the product rate for compute-bound cases."""
    cost, taken = cost_of(case, direction), seconds(found, TRITON, direction)
    if not taken:
        return None
    if cost.flops and "product_flops_per_second" in rates:
        return cost.flops / taken / rates["product_flops_per_second"]
    if cost.bytes and "copy_bytes_per_second" in rates:
        return cost.bytes / taken / rates["copy_bytes_per_second"]
    return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result for a target of a case."""

    case: str
    wanted: str
    reached: float | None
    least: float

    @property
    def word(self) -> str:
        """Result as text: pass, FAIL, or not measured."""
        if self.reached is None:
            return "not measured"
        return "pass" if self.reached >= self.least else "FAIL"

    def __str__(self) -> str:
        figure = "" if self.reached is None else f" {self.reached:.2f}"
        return f"{self.word}: {self.case}: {self.wanted}{figure}; at least {self.least:.2f}"


def judge(case: Case, found: Measured, rates: Rates) -> list[Verdict]:
    """Checks all targets of a case."""
    verdicts = [_judge(case, target, found, rates) for target in case.targets]
    peak = found.get("contenders", {}).get(TRITON, {}).get("peak_bytes")
    if case.memory_limit is not None:
        reached = case.memory_limit / peak if peak else None
        verdicts.append(Verdict(case.name, f"memory limit of {case.memory_limit} bytes over what it took", reached, 1))
    return verdicts


def _judge(case: Case, target: Target, found: Measured, rates: Rates) -> Verdict:
    if target.against in ("copy", "product"):
        reached = share(case, found, target.direction, rates)
        wanted = f"{target.direction}, share of the rate of a {target.against}"
    else:
        its, own = (seconds(found, name, target.direction) for name in (target.against, TRITON))
        reached = its / own if its and own else None
        wanted = f"{target.direction}, speed over that of {target.against}"
    return Verdict(case.name, wanted, reached, target.least)


HEADINGS = ("operator", "slice", "shape", "fwd ms", "bwd ms", "fwd", "bwd", "x ref", "x eager", "x compile",
            "x best peer", "peak MB", "error", "eager's")  # fmt: skip


def table(cases: Sequence[Case], found: Mapping[str, Measured], rates: Rates) -> str:
    """Formats results as a Markdown table, one line per case. Fractions are of the copy rate, or of the product rate
    (*).
    """
    lines = []
    for case in cases:
        measured = found.get(case.name, {"error": "not measured"})
        own = measured.get("contenders", {}).get(TRITON, measured)
        told = _figures(case, measured, rates) if "seconds" in own else [own.get("error", "not measured")]
        title = f"{case.operator}, {case.form}, {short(case.dtype)}"
        lines.append([title, case.where.name, case.shape, *told])
    return markdown_table(HEADINGS, lines)


def _figures(case: Case, found: Measured, rates: Rates) -> list[str]:
    own = found["contenders"][TRITON]
    accuracy, peak = found.get("accuracy", {}), own["peak_bytes"]
    peers = ((seconds(found, name, "both"), name) for name in case.peers)
    best = min(((taken, name) for taken, name in peers if taken is not None), default=None)
    return [
        *(_milliseconds(seconds(found, TRITON, direction)) for direction in ("forward", "backward")),
        *(_share(case, found, direction, rates) for direction in ("forward", "backward")),
        *(_times(seconds(found, name, "both"), own) for name in (REFERENCE, EAGER, COMPILED)),
        "-" if best is None else f"{_times(best[0], own)} {best[1]}",
        "-" if peak is None else f"{peak / 1e6:.0f}",
        *(f"{accuracy[name]:.1e}" if name in accuracy else "-" for name in ("error", "eager_error")),
    ]


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.3f}"


def _share(case: Case, found: Measured, direction: Direction, rates: Rates) -> str:
    value = share(case, found, direction, rates)
    mark = "*" if cost_of(case, direction).flops else ""
    return "-" if value is None else f"{value:.0%}{mark}"


def _times(other: float | None, own: Measured) -> str:
    return "-" if other is None else f"{other / own['seconds']['both']:.2f}"


def losses(found: Mapping[str, Measured]) -> list[str]:
    """Lists cases in which a peer is faster than our kernel."""
    lines = []
    for name, measured in found.items():
        own = seconds(measured, TRITON, "both")
        for other, row in measured.get("contenders", {}).items():
            its = row.get("seconds", {}).get("both")
            if own and its and other != TRITON and its < own:
                lines.append(f"{name}: {other} is {own / its:.2f}x as fast as triton")
    return lines


def failures(found: Mapping[str, Measured]) -> list[str]:
    """Lists failures by name with their errors; a missing peer once."""
    lines = []
    absent = set()
    for name, measured in found.items():
        if "error" in measured:
            lines.append(f"{name}: {measured['error']}")
        for other, row in measured.get("contenders", {}).items():
            if row.get("error", "").startswith("ModuleNotFoundError"):
                absent.add(f"{other}: {row['error']}")
            elif "error" in row:
                lines.append(f"{name}, {other}: {row['error']}")
        if "failed" in measured.get("accuracy", {}):
            lines.append(f"{name}, error against float64: {measured['accuracy']['failed']}")
    return [*sorted(absent), *lines]
