"""Schedules in files: one line of tokens per rank, the format of ``trine schedule --tokens`` and of torch.

A file of ``torch.distributed.pipelining`` may contain other entries than actions. The run derives these entries from
the actions; the reader checks the file's entries, and a note warns that their position in the row has no effect:

    SEND_F RECV_F SEND_B RECV_B    messages: all of them or none, each next to its action
    UNSHARD RESHARD                gathers of a stage's parameters: around all of its actions
    REDUCE_GRAD                    reduction of a stage's gradients: after all of its backwards
    (2F5;3B1)OVERLAP_F_B           a forward and a backward that may overlap: they run one after the other
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule

ENDINGS = (".txt", ".csv")
"""File name extensions of schedule files; any other text names a kind of schedule."""

_CELL = re.compile(r"\([^()]*\)[^\s,]*|[^\s,]+")
_EXTRA = re.compile(r"([0-9]{1,9})(?:(SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,9})|(UNSHARD|RESHARD|REDUCE_GRAD))")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_OVERLAPS = "the overlapped pairs of the file run one after the other"


class Extra(NamedTuple):
    """Token of a schedule file that is no action, such as a send, a parameter gather or a gradient reduction.

    ``microbatch``: microbatch of a send or receive; None for other tokens.
    """

    word: str
    stage: int
    microbatch: int | None

    def __str__(self) -> str:
        return f"{self.stage}{self.word}{'' if self.microbatch is None else self.microbatch}"


Entries = tuple[Action | Extra, ...]
"""Tokens of one line of a file."""


def read_schedule(path: str) -> Schedule:
    """Reads the schedule file ``path``. It does not validate the order of the actions; call :func:`check`.

    Raises:
        ScheduleError: the file cannot be read, or is not a schedule.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"schedule {path}: {error.strerror}; name the path of a file of actions.") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"schedule {path} is not a text file; name a file of actions such as 0F0 0B0.") from None
    return parse_schedule(text, path)


def parse_schedule(text: str, name: str) -> Schedule:
    """Reads a schedule from ``text``: one line per rank, with tokens separated by blanks or commas.

    Tokens are actions such as ``2F5`` (stage 2, forward, microbatch 5), and torch's tokens such as ``2SEND_F5``. ``#``
    starts a comment. ``name`` identifies the schedule in error texts. The order of the actions is not validated; call
    :func:`check`.

    Raises:
        ScheduleError: a token is wrong, a stage is missing or on several lines, or messages, gathers or reductions do
            not match the actions.
    """
    lines: list[Entries] = []
    overlaps = False
    for number, line in enumerate(text.splitlines(), start=1):
        cells = _CELL.findall(line.partition("#")[0])
        try:
            entries = tuple(entry for cell in cells for entry in _entries(cell))
        except ScheduleError as error:
            raise ScheduleError(f"{name}, line {number}: {error}") from None
        overlaps = overlaps or any(cell.startswith("(") for cell in cells)
        if entries:
            lines.append(entries)
    rows = tuple(tuple(entry for entry in entries if isinstance(entry, Action)) for entries in lines)
    actions = [action for row in rows for action in row]
    # count distinct numbers: the largest may be a typing error such as 0F10000000
    schedule = Schedule(
        name=name,
        stages=len({action.stage for action in actions}),
        microbatches=len({action.microbatch for action in actions}),
        per_rank=rows,
        stages_of_rank=tuple(tuple(sorted({action.stage for action in row})) for row in rows),
        training=any(action.op is not Op.FORWARD for action in actions),
    )
    words = _check_extras(schedule, lines)
    notes = [f"the {', '.join(words)} of the file are checked, but made where the run needs them"] if words else []
    return replace(schedule, notes=tuple(f"schedule {name}: {note}" for note in [*notes, *[_OVERLAPS] * overlaps]))


def _entries(cell: str) -> Iterator[Action | Extra]:
    """Yields the actions of a cell, two for an overlapped pair, or the other entry."""
    extra = _EXTRA.fullmatch(cell)
    if extra is not None:
        stage, message, microbatch, other = extra.groups()
        yield Extra(message or other, int(stage), None if microbatch is None else int(microbatch))
    elif cell.startswith("("):
        yield from _pair(cell)
    else:
        yield Action.parse(cell)


def _pair(cell: str) -> tuple[Action, ...]:
    found = _PAIR.fullmatch(cell)
    parts = tuple(Action.parse(part.strip()) for part in found[1].split(";")) if found else ()
    if tuple(part.op for part in parts) != (Op.FORWARD, Op.BACKWARD):
        raise ScheduleError(
            f"{cell!r} is not an overlapped pair; write a forward and a whole backward, such as (2F5;3B1)OVERLAP_F_B."
        )
    return parts


# ---- entries that a run derives


def _check_extras(schedule: Schedule, lines: Sequence[Entries]) -> list[str]:
    """Checks extra entries against the actions; returns their words, each once."""
    words = list(dict.fromkeys(entry.word for entries in lines for entry in entries if isinstance(entry, Extra)))
    for rank, entries in enumerate(lines):
        for entry in entries:
            if isinstance(entry, Extra) and entry.stage not in schedule.stages_of_rank[rank]:
                _refuse(schedule, rank, entry, f"is in a row without actions of stage {entry.stage}")
    if any(word.startswith(("SEND", "RECV")) for word in words):
        for rank, entries in enumerate(lines):
            _check_messages(schedule, rank, entries)
    for rank, entries in enumerate(lines):
        _check_gathers(schedule, rank, entries)
        _check_reductions(schedule, rank, entries)
    return words


def _check_messages(schedule: Schedule, rank: int, entries: Entries) -> None:
    """Checks that every message appears once: sent after the action that makes it, received before its use."""
    place: dict[Action | Extra, int] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, Extra) and entry.microbatch is not None and entry in place:
            _refuse(schedule, rank, entry, "appears twice")
        place[entry] = index
    needed: set[Extra] = set()
    for action in schedule.per_rank[rank]:
        if action.op is Op.BACKWARD_WEIGHT:
            continue
        letter = "F" if action.op is Op.FORWARD else "B"
        if schedule.sends(action) is not None:
            needed.add(send := Extra(f"SEND_{letter}", action.stage, action.microbatch))
            if place.get(send, -1) < place[action]:
                _refuse(schedule, rank, send, f"has to follow {action}")
        if schedule.receives(action) is not None:
            needed.add(receive := Extra(f"RECV_{letter}", action.stage, action.microbatch))
            if place.get(receive, len(entries)) > place[action]:
                _refuse(schedule, rank, receive, f"has to come before {action}")
    for entry in entries:
        if isinstance(entry, Extra) and entry.microbatch is not None and entry not in needed:
            _refuse(schedule, rank, entry, "is a message between no two actions of different ranks")


def _check_gathers(schedule: Schedule, rank: int, entries: Entries) -> None:
    """Checks that a stage with gathers in the row has gathered parameters in all of its actions."""
    gathers = {entry.stage for entry in entries if isinstance(entry, Extra) and entry.word in ("UNSHARD", "RESHARD")}
    held: set[int] = set()
    for entry in entries:
        if isinstance(entry, Action):
            if entry.stage in gathers - held:
                _refuse(schedule, rank, Extra("UNSHARD", entry.stage, None), f"has to come before {entry}")
        elif entry.word == "UNSHARD":
            if entry.stage in held:
                _refuse(schedule, rank, entry, "appears twice without a RESHARD between")
            held.add(entry.stage)
        elif entry.word == "RESHARD":
            if entry.stage not in held:
                _refuse(schedule, rank, entry, "has no UNSHARD before it")
            held.remove(entry.stage)


def _check_reductions(schedule: Schedule, rank: int, entries: Entries) -> None:
    """Checks that the gradients of a stage are reduced once, after they are complete."""
    reduced: set[int] = set()
    for entry in entries:
        if isinstance(entry, Extra) and entry.word == "REDUCE_GRAD":
            if entry.stage in reduced:
                _refuse(schedule, rank, entry, "appears twice")
            reduced.add(entry.stage)
        elif isinstance(entry, Action) and entry.op is not Op.FORWARD and entry.stage in reduced:
            _refuse(schedule, rank, Extra("REDUCE_GRAD", entry.stage, None), f"has to follow {entry}")


def _refuse(schedule: Schedule, rank: int, entry: Extra, why: str) -> None:
    raise ScheduleError(
        f"schedule {schedule.name}, row of rank {rank}: {entry} {why}; correct it, or remove every {entry.word}, "
        "because the run derives them from the actions."
    )
