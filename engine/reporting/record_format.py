"""Names and contents of the files of a recorded run that its ranks write and ``trine report`` reads. Needs no torch."""

from collections.abc import Mapping
from typing import Any, Final

from engine.parallel.pipeline.schedule.actions import Action, Schedule

FORMAT: Final = 1
"""Version of the files of ranks."""
STEPS: Final = "steps.jsonl"


def rank_file(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank:05}.json"


def trace_file(rank: int) -> str:
    """Name of the trace of a rank."""
    return f"trace-{rank:05}.json"


def schedule_facts(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain data."""
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "per_rank": [[str(action) for action in row] for row in schedule.per_rank],
        "stages_of_rank": [list(stages) for stages in schedule.stages_of_rank],
    }


def schedule_of(facts: Mapping[str, Any]) -> Schedule:
    """The schedule that ``schedule_facts`` has told.

    Raises:
        ScheduleError, KeyError, TypeError, ValueError: these are not its facts.
    """
    return Schedule(
        name=str(facts["name"]),
        stages=int(facts["stages"]),
        microbatches=int(facts["microbatches"]),
        per_rank=tuple(tuple(map(Action.parse, row)) for row in facts["per_rank"]),
        stages_of_rank=tuple(tuple(map(int, stages)) for stages in facts["stages_of_rank"]),
    )
