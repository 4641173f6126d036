"""Schedules written to files and read again."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule.actions import Op
from engine.parallel.pipeline.schedule.kinds import SCHEDULE_KINDS, make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import one_f_one_b
from engine.parallel.pipeline.schedule.schedule_file import parse_schedule, read_schedule
from engine.parallel.pipeline.schedule.validate import check
from tests.parallel.pipeline.torch_orders import lowered, torch_file, torch_order, torch_rows


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_every_kind_comes_back(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    schedule = make_schedule(kind, 3, 6, SCHEDULE_KINDS[kind].virtual_stages)
    path.write_text(schedule.text())
    again = read_schedule(str(path))
    assert (again.name, again.per_rank) == (str(path), schedule.per_rank)
    assert (again.stages_of_rank, again.microbatches) == (schedule.stages_of_rank, 6)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"^schedule no\.txt: No such file or directory; name the path"):
        read_schedule("no.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ScheduleError, match="is not a text file; name a file of actions"):
        read_schedule(str(tmp_path / "a.txt"))


# ---- files of torch


TORCH_KINDS = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)]


@pytest.mark.parametrize(("kind", "virtual_stages"), TORCH_KINDS)
@pytest.mark.parametrize("form", ["compute only", "with reductions and gathers", "with messages"])
def test_files_of_torch_load_whole(kind: str, virtual_stages: int, form: str) -> None:
    if kind == "1f1b":  # torch has no rule of rows for it in this form
        rows = [[pick(*action) for action in row] for row in one_f_one_b(3, 6).per_rank]
    else:
        rows = torch_rows(kind, 3, 6, virtual_stages)
    expected = one_f_one_b(3, 6) if kind == "1f1b" else torch_order(kind, 3, 6, virtual_stages)
    if form != "compute only":
        rows = lowered(rows, 6, messages=form == "with messages")
    schedule = parse_schedule(torch_file(rows), "a.csv")
    check(schedule)
    assert schedule.per_rank == expected.per_rank and schedule.microbatches == 6
    words = {
        "compute only": [],
        "with reductions and gathers": ["UNSHARD", "REDUCE_GRAD", "RESHARD"],
        "with messages": ["UNSHARD", "REDUCE_GRAD", "RESHARD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"],
    }[form]
    said = " ".join(schedule.notes)
    assert all(word in said for word in words) and bool(words) == ("are checked" in said)
    assert ("run one after the other" in said) == (kind == "dualpipe-v")
    assert len(schedule.notes) == bool(words) + (kind == "dualpipe-v")


def pick(op: Op, stage: int, microbatch: int) -> Any:
    return schedules._Action.from_str(f"{stage}{op}{microbatch}")


GOOD = """0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD 0REDUCE_GRAD
1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD
"""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("0SEND_F0 ", ""), "row of rank 0: 0SEND_F0 has to follow 0F0; correct it, or remove every SEND_F, because"),
        (("0F0 0SEND_F0", "0SEND_F0 0F0"), "row of rank 0: 0SEND_F0 has to follow 0F0; "),
        (("1RECV_F1 1B0 1SEND_B0 1F1", "1B0 1SEND_B0 1F1 1RECV_F1"), "rank 1: 1RECV_F1 has to come before 1F1; "),
        (("1RECV_F0", "1RECV_F0 1RECV_F0"), "row of rank 1: 1RECV_F0 appears twice; "),
        (("1RECV_F0", "1RECV_F0 1RECV_B0"), "1RECV_B0 is a message between no two actions of different ranks; "),
        (("0UNSHARD", "0UNSHARD 1UNSHARD"), "row of rank 0: 1UNSHARD is in a row without actions of stage 1; "),
        (("0UNSHARD", "0UNSHARD 0UNSHARD"), "row of rank 0: 0UNSHARD appears twice without a RESHARD between; "),
        (("0UNSHARD ", ""), "row of rank 0: 0UNSHARD has to come before 0F0; "),
        (("0B1 0RESHARD", "0RESHARD 0B1"), "row of rank 0: 0UNSHARD has to come before 0B1; "),
        (("0RESHARD", "0RESHARD 0RESHARD"), "row of rank 0: 0RESHARD has no UNSHARD before it; "),
        (("1B1 1SEND_B1 1REDUCE_GRAD", "1REDUCE_GRAD 1B1 1SEND_B1"), "1REDUCE_GRAD has to follow 1B1; "),
        (("1REDUCE_GRAD", "1REDUCE_GRAD 1REDUCE_GRAD"), "row of rank 1: 1REDUCE_GRAD appears twice; "),
        (("0F0 ", "(0F0;0F1)OVERLAP_F_B "), "a.csv, line 1: '(0F0;0F1)OVERLAP_F_B' is not an overlapped pair; write"),
        (("0F0 ", "(0F0;x)OVERLAP_F_B "), "a.csv, line 1: 'x' is not an action; "),
        (("0F0 ", "0UNSHARD3 "), "a.csv, line 1: '0UNSHARD3' is not an action; "),
        (("0F0 ", "0SEND_F "), "a.csv, line 1: '0SEND_F' is not an action; "),
    ],
)  # fmt: skip
def test_what_a_run_would_not_do_as_the_file_says_is_refused(change: tuple[str, str], sentence: str) -> None:
    check(parse_schedule(GOOD, "a.csv"))
    assert change[0] in GOOD
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(GOOD.replace(*change), "a.csv")
    assert sentence in str(caught.value)


def test_pairs_may_have_blanks_and_are_two_actions() -> None:
    schedule = parse_schedule("0F0,( 0F1 ; 0B0 )OVERLAP_F_B,,0B1", "a.csv")
    assert schedule.text() == "0F0 0F1 0B0 0B1\n"
    assert schedule.notes == ("schedule a.csv: the overlapped pairs of the file run one after the other",)
