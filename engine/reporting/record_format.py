"""Names and contents of a recorded run's files, which ranks write and ``trine report`` reads. Needs no torch."""

from collections.abc import Mapping
from typing import Any, Final

from engine.parallel.pipeline.schedule.actions import Action, Schedule

FORMAT: Final = 1
"""Version number of the format of ``rank-N.json``."""
STEPS: Final = "steps.jsonl"


def rank_file(rank: int) -> str:
    """Returns the name of rank ``rank``'s file with plan and measurements, such as "rank-00001.json"."""
    return f"rank-{rank:05}.json"


def trace_file(rank: int) -> str:
    """Returns the name of rank ``rank``'s file with profiled events, such as "trace-00001.json"."""
    return f"trace-{rank:05}.json"


def schedule_facts(schedule: Schedule) -> dict[str, Any]:
    """Returns a pipeline schedule as a JSON dict; ``schedule_of`` reverses it."""
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "per_rank": [[str(action) for action in row] for row in schedule.per_rank],
        "stages_of_rank": [list(stages) for stages in schedule.stages_of_rank],
    }


def schedule_of(facts: Mapping[str, Any]) -> Schedule:
    """Returns the pipeline schedule of a dict from ``schedule_facts``.

    Raises:
        ScheduleError, KeyError, TypeError, ValueError: ``facts`` describes no valid schedule.
    """
    return Schedule(
        name=str(facts["name"]),
        stages=int(facts["stages"]),
        microbatches=int(facts["microbatches"]),
        per_rank=tuple(tuple(map(Action.parse, row)) for row in facts["per_rank"]),
        stages_of_rank=tuple(tuple(map(int, stages)) for stages in facts["stages_of_rank"]),
    )
