"""Rows of ``kernels/tuned.json``, from measurements."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.kernels.cases.case import Case, short
from benchmarks.kernels.report import Measured, seconds
from benchmarks.kernels.trial import REFERENCE, TRITON
from engine.kernels.dispatch import TunedChoice
from engine.kernels.overlap import OverlapChoice

LEAST_SPEEDUP = 1.05
"""Smallest speedup of a row that chooses Triton; a smaller one is within the noise of a run."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speedup of Triton over the reference in one case; None if the kernel failed."""

    operator: str
    """Name of the operator in ``tuned.json``."""
    dtype: str
    width: int
    value: float | None


def speedups(cases: Sequence[Case], found: Mapping[str, Measured], wrong: Collection[tuple[str, str]]) -> list[Speedup]:
    """Returns the speedups of measured cases; ``wrong``: (operator, dtype) with failed checks."""
    rows = []
    for case in cases:
        measured = found.get(case.name, {})
        failed = "error" in measured.get("contenders", {}).get(TRITON, {})
        right = not failed and (case.operator, short(case.dtype)) not in wrong
        for row, direction in case.decides.items():
            reference, own = (seconds(measured, name, direction) for name in (REFERENCE, TRITON))
            if reference and (own or failed):
                value = reference / own if own and right else None
                rows.append(Speedup(row, short(case.dtype), case.width, value))
    return rows


def propose_winners(measured: Sequence[Speedup], device: str, shipped: Sequence[TunedChoice]) -> list[TunedChoice]:
    """Returns the shipped rows, with new ones for ``device``: Triton if correct and at least 1.05 times as fast in
    every case of an operator, dtype and width.
    """
    groups: dict[tuple[str, str, int], list[float | None]] = {}
    for one in measured:
        groups.setdefault((one.operator, one.dtype, one.width), []).append(one.value)
    rows = [_winner(device, key, values) for key, values in sorted(groups.items())]
    replaced = {(row.operator, row.dtype) for row in rows}
    return [*rows, *(row for row in shipped if row.device != device or (row.operator, row.dtype) not in replaced)]


def _winner(device: str, key: tuple[str, str, int], values: Sequence[float | None]) -> TunedChoice:
    known = [value for value in values if value is not None]
    least = round(min(known), 3) if known else None
    faster = len(known) == len(values) and least is not None and least >= LEAST_SPEEDUP
    return TunedChoice(key[0], device, *key[1:], faster, least)


def winners_json(rows: Sequence[TunedChoice] | Sequence[OverlapChoice]) -> str:
    """Formats rows as ``kernels/tuned.json`` or ``kernels/overlap.json``, one line per row."""
    lines = [json.dumps({name: value for name, value in asdict(row).items() if value is not None}) for row in rows]
    body = ",".join(f"\n    {line}" for line in lines) + "\n  " * bool(lines)
    return f'{{\n  "winners": [{body}]\n}}\n'
