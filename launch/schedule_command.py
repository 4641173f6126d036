"""Command ``trine schedule``: draws a pipeline schedule, prints its figures, compares kinds, writes files. No torch."""

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import Config, ScheduleCosts, load_config
from engine.errors import EngineError, ScheduleError
from engine.parallel.pipeline.report.perfetto import trace
from engine.parallel.pipeline.report.svg import svg
from engine.parallel.pipeline.report.text import Panel, Summary, cost_of_slices, draw, number, summarize
from engine.parallel.pipeline.schedule.actions import Schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.schedule_file import ENDINGS, read_schedule
from engine.parallel.pipeline.schedule.simulate import Cost, simulate
from engine.parallel.pipeline.schedule.validate import check

_SHORTEST = 1e-99
"""Shortest duration above 0, and one over the longest: sums and shares of them are finite."""
RANKS, MICROBATCHES = 4, 8
"""Default numbers of ranks and microbatches."""


def add_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine schedule`` to the parser ``command``."""
    command.add_argument("kind", nargs="?", metavar="KIND", help=(
        f"{', '.join(SCHEDULE_KINDS)}, or a .txt or .csv file of action tokens (default 1f1b)"
    ))  # fmt: skip
    command.add_argument("--config", type=Path, help="read kind and sizes from a JSON configuration")
    command.add_argument("--world", type=int, help="number of processes, if the configuration needs it")
    command.add_argument("--ranks", type=int, help=f"pipeline ranks (default {RANKS})")
    command.add_argument("--microbatches", type=int, help=f"microbatches per step (default {MICROBATCHES})")
    command.add_argument("--virtual-stages", type=int, help="stages on each rank (default: depends on the kind)")
    times = command.add_argument_group("times of a rank's whole part of the model; each stage takes its share")
    times.add_argument("--forward", type=float, help="default: from the configuration, or 1")
    times.add_argument("--backward", type=float, help="default: input + weight")
    times.add_argument("--input", type=float, help="gradient of the input (default: half a backward, or 1)")
    times.add_argument("--weight", type=float, help="gradient of the weights (default: half a backward, or 1)")
    times.add_argument("--transfer", type=float, help="time of one message (default: from the configuration, or 0)")
    command.add_argument("--compare", action="store_true", help="print a table of all kinds for these sizes")
    command.add_argument("--tokens", action="store_true", help="print the action tokens, as a start for your own file")
    command.add_argument("--width", type=int, help="columns of the picture (default: width of the terminal)")
    command.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG")
    command.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")


def run(options: Namespace) -> None:
    """Runs ``trine schedule``: prints pipeline schedules as pictures, with figures such as their idle time.

    Raises:
        EngineError: the kind of schedule does not exist or refuses the number of ranks, microbatches or virtual stages,
            or a file is malformed or cannot be written.
    """
    config = None if options.config is None else load_config(options.config, options.world)
    asked, cost = _asked(options, config), _cost(options, config)
    if options.compare and (options.kind or options.tokens):
        raise ScheduleError(
            f"--compare prints the figures of all kinds; leave out {options.kind or '--tokens'}, or --compare."
        )
    panels = _print_comparison(asked, cost) if options.compare else [_print_one(asked, cost, options)]
    for path, text in ((options.svg, svg), (options.trace, trace)):
        if path is not None:
            _write(path, text(panels))


@dataclass(frozen=True, slots=True)
class _Asked:
    """Kind and sizes of a schedule; None for a size that the user does not pass."""

    kind: str
    ranks: int | None
    microbatches: int | None
    virtual_stages: int | None


def _asked(options: Namespace, config: Config | None) -> _Asked:
    """Collects the request from the command line, then the configuration, then the defaults."""
    given = _Asked(options.kind or "1f1b", options.ranks, options.microbatches, options.virtual_stages)
    if config is None and options.world is not None:
        raise ScheduleError("--world completes the sizes of a configuration; give --config too, or leave --world out.")
    if config is None:
        return given
    kind = options.kind or config.parallel.schedule
    ranks = config.parallel.pipeline if given.ranks is None else given.ranks
    microbatches = config.gradient_accumulation_steps if given.microbatches is None else given.microbatches
    if not isinstance(ranks, int) or microbatches is None:
        raise ScheduleError(
            f"{options.config} derives pipeline ranks or microbatches (gradient_accumulation_steps) from "
            "the number of processes; give --world, or --ranks and --microbatches."
        )
    virtual = config.parallel.virtual_stages if given.virtual_stages is None else given.virtual_stages
    return _Asked(kind, ranks, microbatches, virtual)


def _cost(options: Namespace, config: Config | None) -> Cost:
    """Collects the times of a slice from the command line, then the configuration, then the defaults."""
    named = {word: getattr(options, word) for word in ("forward", "backward", "input", "weight", "transfer")}
    for word, time in named.items():
        if time is not None and not (_SHORTEST <= time <= 1 / _SHORTEST or (time == 0 and word != "forward")):
            least = "" if word == "forward" else "0, or "
            numbers = f"{least}a number from {_SHORTEST:g} to {1 / _SHORTEST:g}"
            raise ScheduleError(f"--{word} {time:g} is not a duration; give {numbers}.")
    known = (config and config.parallel.schedule_costs) or ScheduleCosts()
    half = None if options.backward is None else options.backward / 2
    into = _first(options.input, half, known.input)
    weight = _first(options.weight, half, known.weight)
    backward = _first(options.backward, into + weight)
    return Cost(
        _first(options.forward, known.forward), backward, into, weight, _first(options.transfer, known.transfer)
    )  # fmt: skip


def _first(*times: float | None) -> float:
    return next(time for time in times if time is not None)


def _made(asked: _Asked, cost: Cost) -> Schedule:
    """Builds the schedule of a kind, in an order that suits ``cost``, the times of a rank's whole part of the model."""
    ranks = RANKS if asked.ranks is None else asked.ranks
    microbatches = MICROBATCHES if asked.microbatches is None else asked.microbatches
    usual = SCHEDULE_KINDS[asked.kind].virtual_stages if asked.kind in SCHEDULE_KINDS else 1
    virtual = usual if asked.virtual_stages is None else asked.virtual_stages
    schedule = make_schedule(asked.kind, ranks, microbatches, virtual)
    if cost == Cost() or not schedule.splits:
        return schedule
    return make_schedule(asked.kind, ranks, microbatches, virtual, cost.shared(ranks, schedule.stages))


def _read(asked: _Asked) -> Schedule:
    schedule = read_schedule(asked.kind)
    ranks = len(schedule.per_rank)
    for word, wanted, found in (
        ("ranks", asked.ranks, ranks),
        ("microbatches", asked.microbatches, schedule.microbatches),
        ("virtual-stages", asked.virtual_stages, schedule.stages / ranks),
    ):
        if wanted is not None and wanted != found:
            raise ScheduleError(
                f"schedule {asked.kind} has {found:g} {word.replace('-', ' ')}, not {wanted}: a file fixes its sizes; "
                f"leave --{word} out."
            )
    return schedule


def _print_one(asked: _Asked, cost: Cost, options: Namespace) -> Panel:
    schedule = _read(asked) if asked.kind.endswith(ENDINGS) else _made(asked, cost)
    check(schedule)
    timeline = simulate(schedule, cost_of_slices(schedule, cost))
    if options.tokens:
        print(schedule.text(), end="")
        return Panel(timeline)
    print(draw(timeline, options.width or shutil.get_terminal_size((120, 24)).columns))
    figures = summarize(timeline)
    lines = {
        "stages": f"{figures.stages}: {_places(schedule)}, by rank",
        "idle share (bubble)": f"{figures.bubble:.1%}",
        "time of the step": f"{figures.makespan:.6g}, {_times(cost)}",
        "peak of activations": f"{' '.join(map(number, figures.peak_slices))} slices, by rank",
        "messages sent": f"{' '.join(map(str, figures.messages))}, by rank",
    }
    for name, text in lines.items():
        print(f"{name:<22} {text}")
    for note in schedule.notes:
        print(f"note: {note}")
    return Panel(timeline)


def _places(schedule: Schedule, most: int = 8) -> str:
    places = ["+".join(map(str, stages)) for stages in schedule.stages_of_rank]
    return " ".join(places[:most]) + (" ..." if len(places) > most else "")


def _times(cost: Cost) -> str:
    backward = f"{cost.backward:g} (split: {cost.backward_input:g} + {cost.backward_weight:g})"
    transfer = f", a transfer {cost.transfer:g}" if cost.transfer else ""
    return f"if the forward of a slice takes {cost.forward:g} and its backward {backward}{transfer}"


_COLUMNS = ("kind", "stages", "idle", "time", "held", "messages", "backward")
_MEANING = """\
time: of a step, {times}
held: peak of activations on one rank, in slices (a rank's activations of one microbatch in its part of the model)
messages: of all ranks"""


def _print_comparison(asked: _Asked, cost: Cost) -> list[Panel]:
    """Prints all kinds, the least idle first, and returns the panels of kinds that allow these sizes."""
    found: list[tuple[Summary, Panel]] = []
    refused: dict[str, str] = {}
    for kind in SCHEDULE_KINDS.values():
        virtual = asked.virtual_stages if kind.most is None else None  # the other kinds fix their number of stages
        try:
            schedule = _made(_Asked(kind.name, asked.ranks, asked.microbatches, virtual), cost)
        except ScheduleError as error:
            refused[kind.name] = str(error)
            continue
        timeline = simulate(schedule, cost_of_slices(schedule, cost))
        found.append((summarize(timeline), Panel(timeline)))
    if not found:
        raise ScheduleError(next(iter(refused.values())))
    found.sort(key=lambda pair: (round(pair[0].bubble, 9), pair[0].peak, pair[0].messages))
    rows = [_COLUMNS, *(_cells(panel.timeline.schedule.name, figures) for figures, panel in found)]
    print(_table(rows))
    print(_MEANING.format(times=_times(cost)))
    for name, reason in refused.items():
        print(f"{name} is left out: {reason}")
    return [panel for _, panel in found]


def _cells(kind: str, figures: Summary) -> tuple[str, ...]:
    return (
        kind, str(figures.stages), f"{figures.bubble:.1%}", f"{figures.makespan:.6g}", number(figures.peak),
        str(sum(figures.messages)), "split" if figures.splits else "whole",
    )  # fmt: skip


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Formats a table with the first column left-aligned and all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) if column else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{path} cannot be written ({error.strerror}); name a file in an existing folder.") from None
