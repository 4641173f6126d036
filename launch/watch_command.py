"""Command ``trine watch``: current actions of this host's ranks, or the watchdog's report about a hung job.

rank  host   pid   step  is in                                   for     finished before
0     node0  8123  70    gradients over dp (#70 of 'dp', ..)     5.3 s   control over world (..)
1     node0  8124  70    forward of stage 0, microbatch 0        5.3 s   control over world (..)
outer loop of site 1: clock 7, version 9, staleness 1, 3 members, 560 rows, waited 4.2 s (rank 0)
"""

import json
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.parallel.comm.rendezvous import name_ranks
from engine.reporting.console import aligned
from engine.watchdog.local_ranks import LocalRanks, flight_folder
from engine.watchdog.monitor import REPORT
from engine.watchdog.view import RankView

_HEAD = ("rank", "host", "pid", "step", "is in", "for", "finished before")
_MOST_SECONDS = 10**6
_LATEST_DEAD, _RECENT_HOURS = 3, 1
"""Maximum number of listed dead jobs, and hours since their end; older ones are only counted."""
_WAITS_HEAD = ("rank", "has waited in", "between", "times", "in all")


def add_watch_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine watch`` to the parser ``command``."""
    about = "folder of the watchdog's report (watchdog.folder or checkpoint.folder); default: jobs of this host"
    command.add_argument("folder", type=Path, nargs="?", help=about)
    command.add_argument("--all", action="store_true", help=(
        f"list every dead job instead of the latest {_LATEST_DEAD} of the last {_RECENT_HOURS} h"
    ))  # fmt: skip
    command.add_argument("--waits", action="store_true", help="also show the waits of each rank by stream")
    command.add_argument(
        "--every", type=_seconds, default=0.0, metavar="SECONDS", help="repeat the output at this interval"
    )


def _seconds(text: str) -> float:
    """Parses a number of seconds, 0 or more, for which a process can sleep."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ArgumentTypeError(f"{text!r} is not a number from 0 to {_MOST_SECONDS}")
    return seconds


def show_ranks(options: Namespace) -> None:
    """Prints a table with the state of each rank, from the watchdog's report in ``options.folder``.

    Without a folder, the table shows the watchdog's records on this host.

    Raises:
        EngineError: the folder contains no report, or a damaged one.
    """
    while True:
        reported = options.folder is not None
        lines = _report(options.folder, options.waits) if reported else _jobs(options.waits, options.all)
        print("\n".join(lines), flush=True)
        if not options.every:
            return
        time.sleep(options.every)


def _jobs(waits: bool, every: bool) -> list[str]:
    """Returns the lines of this user's jobs on this host: all running jobs, and the latest that have ended."""
    live: list[tuple[float, list[str]]] = []
    dead: list[tuple[float, list[str]]] = []
    for folder in sorted(flight_folder().iterdir()):
        local = LocalRanks(folder)
        local.refresh()
        if views := local.views(detailed=False):
            runs, idle = any(view.runs for view in views), min(view.idle for view in views)
            name = f"job {folder.name}, {len(views)} of {_size(local)} ranks on this host"
            name += "" if runs else f", ended {_duration(idle)} ago"
            (live if runs else dead).append((idle, [name, *_tables(views, waits), ""]))
        local.close(remove=False)
    dead.sort(key=lambda job: job[0])
    recent = [job for job in dead if job[0] < _RECENT_HOURS * 3600]
    shown = dead if every else recent[:_LATEST_DEAD]
    lines = [line for _, job in (*live, *reversed(shown)) for line in job]
    if len(dead) > len(shown):
        more = len(dead) - len(shown)
        ended, them = ("jobs have", "them") if more > 1 else ("job has", "it")
        lines += [f"{more} {'more ' * bool(lines)}{ended} ended here; trine watch --all lists {them}", ""]
    if not live:
        lines = ["no rank of this user runs on this host under a watchdog", "", *lines]
    return lines[:-1]


def _duration(seconds: float) -> str:
    """Returns a duration in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(local: LocalRanks) -> int:
    return next(iter(local.ranks.values())).file.read().size


def _report(folder: Path, waits: bool) -> list[str]:
    path = folder / REPORT
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stacks = {int(data["rank"]): str(data.pop("stack")) for data in report["views"]}
        views = [RankView.from_json(data) for data in report["views"]]
        lines = [f"{report['time']}: {report['sentence']}", *_tables(views, waits)]
        blamed = [rank for rank in report["ranks"] if stacks.get(rank)]
    except FileNotFoundError as error:
        raise EngineError(
            f"{folder} has no {REPORT}, which the watchdog writes when a job hangs; pass the watchdog.folder or "
            "checkpoint.folder of the job to trine watch, or run trine watch without a folder to see the jobs on this "
            "host."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(
            f"{path} cannot be read ({type(error).__name__}: {error}); it may be damaged; remove it, and let the job "
            "write it again."
        ) from error
    for rank in blamed:
        lines += ["", f"stack of rank {rank}:", stacks[rank].rstrip()]
    return lines


def _tables(views: list[RankView], waits: bool) -> list[str]:
    first = min(views, key=lambda view: view.rank, default=None)
    noted = [f"{first.note} (rank {first.rank})"] if first is not None and first.note else []
    return [*rank_table(views), *noted, *(["", *wait_table(views)] if waits else [])]


def rank_table(views: list[RankView]) -> list[str]:
    """Returns the lines of a table with the current action of each rank in ``views`` and its duration."""
    return aligned([_HEAD, *(_row(view) for view in sorted(views, key=lambda view: view.rank))])


def wait_table(views: list[RankView]) -> list[str]:
    """Returns the lines of a table with the time that each rank of ``views`` has waited for communication."""
    rows = [
        (str(view.rank), f"{one.axis} {one.stream!r}", name_ranks(one.ranks), str(one.count), f"{one.seconds:.3f} s")
        for view in sorted(views, key=lambda view: view.rank)
        for one in sorted(view.streams, key=lambda one: -one.seconds)
    ]  # fmt: skip
    return aligned([_WAITS_HEAD, *rows])


def _row(view: RankView) -> tuple[str, ...]:
    place, seconds = _place(view)
    last = view.last.text if view.last is not None else ""
    step = str(view.step + (view.phase == "STEP"))
    return (str(view.rank), view.host, str(view.pid), step, place, f"{seconds:.1f} s", last)


def _place(view: RankView) -> tuple[str, float]:
    """Returns the current action of a rank, and the seconds that it has lasted."""
    if not view.runs:
        return f"ended: {view.words or view.ended or 'without a word'}", view.idle
    stopped = "stopped, " * (view.process in ("T", "t"))
    if view.waiting is not None:
        return stopped + view.waiting.text, view.waiting.seconds
    if view.action is not None:
        return stopped + view.action.text, view.action.seconds
    words = {"STEP": "a step", "USER": "the user's code", "ENDED": "a closed engine"}
    return stopped + words[view.phase], view.in_phase
