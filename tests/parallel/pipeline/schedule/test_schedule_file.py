"""Schedules written to files and read again."""

from pathlib import Path

import pytest

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import read_schedule
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_every_kind_comes_back(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    schedule = make_schedule(kind, 3, 6, SCHEDULE_KINDS[kind].virtual_stages)
    path.write_text(schedule.text())
    again = read_schedule(str(path))
    assert (again.name, again.per_rank) == (str(path), schedule.per_rank)
    assert (again.stages_of_rank, again.microbatches) == (schedule.stages_of_rank, 6)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"^schedule no\.txt: No such file or directory; give the path"):
        read_schedule("no.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="is not a text file; give a file of actions"):
        read_schedule(str(tmp_path / "a.txt"))
