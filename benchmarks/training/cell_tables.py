"""Tables of modes that are measured in turns, one row of cells a mode, beside the first mode of their table."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.harness.figures import Cells, record_cells
from benchmarks.harness.report import Comparison, Rounds, judge, medians
from benchmarks.harness.team import RankError, Team, start_server
from benchmarks.peers.workload import Kind, Mode, Workload
from benchmarks.training.comparison import Effort, measure

COLUMNS = ("CPU ms a step", "beside", "sent MB", "calls", "state MB", "step MB", "loss")
NOTE = "note"
"""Last column, of tables with a mode that has a note."""
TOLERANCE = 1e-5
"""Maximum loss difference in nats between equal models."""
TRIED: tuple[Kind, ...] = ("context_parallel", "deepspeed")
"""Peers that may be missing, or may not run on this device."""


@dataclass(frozen=True, slots=True)
class Table:
    """Modes measured in turns with one workload; the first is the reference."""

    modes: tuple[Mode, ...]
    workload: Workload
    equal: tuple[str, ...] = ()
    """Names of the modes with equal models."""


def cells(table: Table, rounds: Rounds) -> Cells:
    """Formats the medians over rounds."""
    made: dict[tuple[str, str], str] = {}
    base = table.modes[0].name
    for row in medians(rounds):
        size, beside = row.footprint, f"{judge(rounds, Comparison(row.mode, base)).ratio:.2f} x {base}"
        megabytes = [f"{count / 1e6:.2f}" for count in (size.sent_bytes, size.state_bytes, size.step_peak_bytes)]
        texts = [f"{1e3 * row.cpu_seconds:.1f}", "" if row.mode == base else beside, megabytes[0], str(size.calls)]
        texts += [*megabytes[1:], f"{row.loss:.6f}" if row.loss and "rows" not in table.modes[0].kind else ""]
        made |= {(row.mode, column): text for column, text in zip(COLUMNS, texts, strict=True)}
    return made | {(mode.name, NOTE): mode.note for mode in table.modes if mode.note}


def startable(table: Table) -> tuple[Table, Cells]:
    """Returns the table without modes of peers that cannot start a step, and a cell with the error of each."""
    refused: dict[tuple[str, str], str] = {}
    for mode in table.modes:
        if mode.kind in TRIED:
            try:
                with Team(mode, table.workload) as team:
                    team.run(1)
            except RankError as error:
                refused[mode.name, COLUMNS[0]] = str(error).strip().splitlines()[-1][:120]
    return replace(table, modes=tuple(m for m in table.modes if (m.name, COLUMNS[0]) not in refused)), refused


def equal_losses(table: Table, rounds: Rounds) -> bool:
    """Returns True if the modes with equal models have equal losses."""
    losses = [sample.loss for samples in rounds for sample in samples if sample.mode in table.equal]
    return not losses or max(losses) - min(losses) <= TOLERANCE


def report(name: str, tables: Iterable[Table], effort: Effort, write_figures: bool) -> int:
    """Measures and prints all tables, and stores them as figure ``name``; returns 0 if equal models have equal losses.

    The figure keeps rows that a run does not measure.
    """
    start_server()
    found: dict[tuple[str, str], str] = {}
    equal = True
    for table in tables:
        left, refused = startable(table)
        rounds = measure(left.modes, left.workload, effort)
        found |= {**cells(left, rounds), **refused}
        equal &= equal_losses(left, rounds)
    for row in dict.fromkeys(row for row, _ in found):
        print(f"{row:32}", "  ".join(found.get((row, column), "") for column in (*COLUMNS, NOTE)).rstrip())
    print(f"losses of equal models within {TOLERANCE:.0e} -> {'pass' if equal else 'FAIL'}")
    if write_figures:
        record_cells(name, "ranks", found)
    return 0 if equal else 1
