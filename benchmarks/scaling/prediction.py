"""Predicts all rows of a scaling record from measured speeds of ranks and links."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.scaling.ranking import GridChoice, RankedGrid, rank_grids
from benchmarks.scaling.record import Machine, ScalingRecord, ScalingRow
from benchmarks.scaling.task import Mode, Task
from engine.parallel.grid import Grid
from engine.planning.step_time.prediction import AxisLinks, place_axes


def links_of(choice: GridChoice, machine: Machine) -> AxisLinks:
    """Returns the links of a grid that fills one node after another."""
    grid = Grid(pp=choice.pp, dp=choice.dp, tp=choice.tp)
    hosts = [str(rank // machine.ranks) for rank in range(grid.world_size)]
    return place_axes(grid, hosts, machine.links)


def ranked(task: Task, mode: Mode, machine: Machine, choices: Sequence[GridChoice]) -> tuple[RankedGrid, ...]:
    """Ranks ``choices`` by predicted time on this machine, fastest first."""
    return rank_grids(
        choices,
        lambda choice: task.plan(choice, mode),
        lambda choice: links_of(choice, machine),
        machine.computation,
    )


def with_predictions(
    record: ScalingRecord, task: Task, machine: Machine, chosen: Sequence[RankedGrid], mode: Mode
) -> ScalingRecord:
    """Returns the record with rows and predictions for the grids ``chosen``."""
    for grid in chosen:
        row = ScalingRow(
            nodes=machine.nodes,
            ranks=machine.ranks,
            mode=mode,
            choice=grid.choice,
            tokens=task.tokens(grid.choice, mode) if grid.time else 0,
            flops=task.flops(grid.choice, mode) if grid.time else 0,
            predicted=grid.time,
            refused=grid.refused,
        )
        old = record.row(row.key)
        record = record.with_row(row if old is None else replace(old, predicted=grid.time, refused=grid.refused))
    return record
