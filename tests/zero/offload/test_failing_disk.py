"""A disk that fails in an update: the step is repeated, or none on any rank, and the state from before it is whole."""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.errors import EngineError
from engine.zero.offload.block_file import BLOCK, SECTOR, BlockFile, DiskCalls, sector_memory
from engine.zero.offload.disk_moments import DiskMoments
from engine.zero.offload.scratch_folder import PREFIX
from tests.zero.offload.failing_disk import EIO, ENOSPC, FOREVER, failing, garbled, short, torn
from tests.zero.offload.test_disk import on_disk, read, write
from tests.zero.offload.test_offloaded_training import Case, bits, settings, trained, unequal
from tests.zero.small import batch, start

RunRanks = Callable[..., list[Any]]
BF16: Case = ("AdamW", "bf16", (1, "step"), 1.0)
HALF: Case = ("AdamW", "bf16", (1, "step"), 0.4)
ROUNDED: Case = ("AdamW", "bf16 alone, all of it", (1, "step"), 1.0)
FP16: Case = ("AdamW", "fp16", (3, "microbatch"), 0.5)
FP32: Case = ("Lion", "fp32", (3, "step"), 1.0)
FAULTS = {"EIO": EIO, "ENOSPC": ENOSPC, "torn": torn, "garbled": garbled, "short": short}
Fault = tuple[str, str, str, int]
"""Call, what goes wrong with it, beginning of the file's name, how many times."""


def calls(eng: Engine) -> int:
    """Collectives of the agreement so far."""
    return sum(row.calls for row in eng._runtime.comm.tally.rows() if row.label == "disk")


def gathers(eng: Engine) -> int:
    return sum(row.calls for row in eng._runtime.comm.tally.rows() if row.label == "parameters")


def step_with(eng: Engine, step: int, fault: Fault, rank: int) -> tuple[str, int, list[str]]:
    """A step in which the disk of ``rank`` has the fault: what is raised, and the calls it took."""
    call, kind, file, times = fault
    before = calls(eng)
    sound: AbstractContextManager[list[str]] = nullcontext([])
    where = failing(call, FAULTS[kind], file, times) if eng.grid.rank == rank else sound
    with where as met:
        try:
            eng.train_batch(batch(eng, step))
            said = ""
        except EngineError as error:
            said = str(error)
    return said, calls(eng) - before, met


def broken_off(folder: Path, case: Case, fault: Fault) -> list[Any]:
    """Body of a rank: what is said of a step that the last rank's disk breaks off, and what is wrong afterwards."""
    with start(on_disk(folder / "disk", case)) as eng:
        rank = eng.grid.world_size - 1
        for step in range(2):
            eng.train_batch(batch(eng, step))
        before = bits(eng)
        said, count, _ = step_with(eng, 2, fault, rank)
        wrong = [f"after: {name}" for name in unequal(before, bits(eng))]
        eng.save_checkpoint(str(folder / "saved")).wait()
        eng.train_batch(batch(eng, 2))
        end = bits(eng)
    wrong += [f"gone on: {name}" for name in unequal(trained(settings(case, "none"), 3)[1], end)]
    with start(settings(case, "none")) as eng:
        eng.load_checkpoint(str(folder / "saved"))
        wrong += [f"loaded: {name}" for name in unequal(before, bits(eng))]
    return [said, count, wrong]


def check_broken_off(answers: list[list[Any]], file: str, error: int) -> None:
    says = answers[0][0]
    last = len(answers) - 1
    assert says.startswith(f"rank {last} could not read or write its optimizer files on disk in two attempts")
    assert f"{PREFIX}rank{last}-" in says and f"/{file}" in says and os.strerror(error) in says
    assert says.count(". ") == 0 and says.endswith(".")
    # two attempts, after each whether state is lost; on several ranks the length and the bytes of the sentence
    expected = 6 if last else 0
    assert answers == [[says, expected, []] for _ in answers]


def test_a_disk_that_takes_no_more_leaves_the_step_before(tmp_path: Path) -> None:
    check_broken_off([broken_off(tmp_path, BF16, ("write", "EIO", "bucket-1-", FOREVER))], "bucket-1-", errno.EIO)


def test_all_ranks_stop_with_the_sentence_of_the_one_that_failed(run_ranks: RunRanks, tmp_path: Path) -> None:
    answers = run_ranks(broken_off, 2, tmp_path, BF16, ("write", "EIO", "bucket-1-", FOREVER))
    check_broken_off(answers, "bucket-1-", errno.EIO)


@pytest.mark.long
@pytest.mark.parametrize("case", [BF16, HALF, FP32], ids=["bf16", "half of it", "fp32, stage 3"])
@pytest.mark.parametrize("file", ["bucket-0-", "before-1", ""])
@pytest.mark.parametrize("kind", ["EIO", "ENOSPC"])
def test_any_write_that_fails(run_ranks: RunRanks, tmp_path: Path, case: Case, file: str, kind: str) -> None:
    if case == HALF and file == "before-1":
        file = "before-0"
    answers = run_ranks(broken_off, 2, tmp_path, case, ("write", kind, file, FOREVER))
    check_broken_off(answers, file, getattr(errno, kind))


def repeated(folder: Path, case: Case, fault: Fault) -> list[Any]:
    """Body of a rank: a step whose disk fails for some time: what is said, calls, gathers, bits that differ."""
    with start(on_disk(folder, case)) as eng:
        for step in range(2):
            eng.train_batch(batch(eng, step))
        before = gathers(eng)
        said, count, met = step_with(eng, 2, fault, eng.grid.world_size - 1)
        rounds = (gathers(eng) - before) // len(eng.plan.layout(eng.grid.coord()).buckets)
        eng.train_batch(batch(eng, 3))
        end = bits(eng)
    return [said, count, rounds, len(met), unequal(trained(settings(case, "none"))[1], end)]


def loaded_and_failing(folder: Path, times: int) -> list[Any]:
    """Body of a rank: a step whose disk fails for moments that were loaded: what is said, and what is wrong."""
    with start(settings(BF16, "none")) as eng:
        for step in range(2):
            eng.train_batch(batch(eng, step))
        eng.save_checkpoint(str(folder / "saved")).wait()
        before = bits(eng)
    with start(on_disk(folder / "disk")) as eng:
        eng.load_checkpoint(str(folder / "saved"))
        said, _, met = step_with(eng, 2, ("write", "EIO", "bucket-1-", times), 0)
        if not said:
            return [said, len(met), unequal(trained(settings(BF16, "none"), 3)[1], bits(eng))]
        wrong = unequal(before, bits(eng))
        eng.train_batch(batch(eng, 2))
        return [said, len(met), wrong + unequal(trained(settings(BF16, "none"), 3)[1], bits(eng))]


def test_loaded_moments_that_a_disk_does_not_take_stay(tmp_path: Path) -> None:
    assert loaded_and_failing(tmp_path / "once", 2) == ["", 2, []]
    said, met, wrong = loaded_and_failing(tmp_path / "always", FOREVER)
    assert said.startswith("rank 0 could not read or write its optimizer files on disk in two attempts") and met >= 4
    assert wrong == []


def sent(folder: Path, case: Case) -> list[dict[tuple[str, str], tuple[int, int]]]:
    """Body of a rank: calls and bytes of a step with a sound disk, and those of the plan."""
    with start(on_disk(folder, case)) as eng:
        eng.train_batch(batch(eng, 0))
        before = eng.sent
        eng.train_batch(batch(eng, 1))
        both = (eng.sent.since(before).rows(), eng.plan.rank(eng.grid.rank).traffic)
        return [{(row.axis, row.label): (row.calls, row.bytes) for row in rows} for rows in both]


@pytest.mark.long
@pytest.mark.parametrize("case", [BF16, HALF, FP32], ids=["bf16", "half of it", "fp32, stage 3"])
def test_the_ranks_ask_each_other_once_an_update(run_ranks: RunRanks, tmp_path: Path, case: Case) -> None:
    for found, planned in run_ranks(sent, 2, tmp_path, case):
        assert found == planned and found["world", "disk"] == (1, 8)


MOVED_AGAIN: list[Fault] = [
    ("write", "EIO", "bucket-1-", 1),
    ("read", "EIO", "bucket-1-", 1),
    ("read", "garbled", "bucket-1-", 1),
    ("write", "short", "", FOREVER),
    ("read", "short", "", FOREVER),
]
"""Faults of a block that is moved once more, of which no rank hears."""


@pytest.mark.parametrize("fault", MOVED_AGAIN, ids=lambda fault: " ".join(map(str, fault[:2])))
def test_a_block_that_fails_is_moved_again(tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    undone: list[DiskMoments] = []
    monkeypatch.setattr(DiskMoments, "put_back", undone.append)
    said, _, _, met, wrong = repeated(tmp_path, BF16, fault)
    assert met and (said, wrong, undone) == ("", [], [])


@pytest.mark.parametrize("size", [SECTOR, 5 * SECTOR, 3 * BLOCK + 100])
def test_transfers_that_move_less_are_gone_on_with(tmp_path: Path, size: int) -> None:
    file, data = BlockFile(tmp_path / "file", size), torch.arange(size, dtype=torch.int32).to(torch.uint8)
    direct = file.direct
    with failing("write", short, "file") as writes, failing("read", short, "file") as reads:
        for place in (bytearray(size), sector_memory(size).numpy().data):  # without and with a begin on a sector
            write(file, data.numpy().data)
            read(file, memoryview(place))
            assert bytes(place) == data.numpy().tobytes()
    assert len(writes) >= 2 * size // (2 * SECTOR) <= len(reads)
    assert file.direct == direct, "each call begins on a sector"
    file.close()


def test_an_update_that_fails_once_is_repeated(tmp_path: Path) -> None:
    assert repeated(tmp_path, BF16, ("write", "EIO", "bucket-1-", 2)) == ["", 0, 0, 2, []]


@pytest.mark.long
@pytest.mark.parametrize("case", [ROUNDED, FP16], ids=["bf16 alone", "fp16"])
@pytest.mark.parametrize("fault", [("write", "EIO", "bucket-0-", 2), ("read", "EIO", "bucket-0-", 2)])
def test_a_repeated_update_rounds_and_scales_as_the_first(tmp_path: Path, case: Case, fault: Fault) -> None:
    assert repeated(tmp_path, case, fault) == ["", 0, 0, 2, []]


@pytest.mark.long
@pytest.mark.parametrize("fault", [("write", "EIO", "bucket-1-", 2), ("read", "EIO", "bucket-1-", 2)])
def test_an_update_that_fails_once_is_repeated_on_all_ranks(run_ranks: RunRanks, tmp_path: Path, fault: Fault) -> None:
    answers = run_ranks(repeated, 2, tmp_path, BF16, fault)
    # did the first one fail, was anything lost, did the second one fail; gathered by both and between them
    assert answers == [["", 3, 3, 0, []], ["", 3, 3, 2, []]]


def lose(folder: Path) -> list[str]:
    """Body of a rank: what is said when a block was torn in the last rank's step, and by what comes then."""
    with start(on_disk(folder / "disk")) as eng:
        eng.train_batch(batch(eng, 0))
        said = [step_with(eng, 1, ("write", "torn", "bucket-1-", 1), eng.grid.world_size - 1)[0]]
        later = (lambda: eng.train_batch(batch(eng, 2)), lambda: eng.save_checkpoint(str(folder / "saved")))
        for call in (later[0], *later):
            try:
                call()
                said.append("")
            except EngineError as error:
                said.append(str(error))
    return said


def check_lost(answers: list[list[str]]) -> None:
    last = len(answers) - 1
    for step, lost, *others in answers:
        assert step == "" and lost.startswith(
            f"rank {last} has lost optimizer state, so no rank makes this step; load "
        )
        assert "differ from the bytes last written there" in lost and f"{PREFIX}rank{last}-" in lost
        assert all(
            said.startswith(
                "an update has failed midway, so load the last checkpoint into a new engine: optimizer state on disk:"
            )
            for said in others
        )


def test_a_torn_block_stops_the_run(tmp_path: Path) -> None:
    check_lost([lose(tmp_path)])


@pytest.mark.long
def test_a_torn_block_stops_all_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    check_lost(run_ranks(lose, 2, tmp_path))


class _OnceRefusing(DiskCalls):
    """A file system that takes the flag for direct transfers, and refuses the first of them."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def write(self, file: int, data: memoryview, start: int) -> int:
        if not self.left and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(file, data, start)

    def leave_direct(self, file: int) -> None:
        self.left.append(file)
        super().leave_direct(file)


def test_direct_transfers_that_are_refused_go_through_the_page_cache(tmp_path: Path) -> None:
    refusing = _OnceRefusing()
    file, page = BlockFile(tmp_path / "file", 3 * BLOCK, refusing), sector_memory(3 * BLOCK)
    refuses = file.direct  # else this file system has said so when the file was made
    write(file, page.random_().numpy().data)
    into = torch.zeros_like(page)
    read(file, into.numpy().data)
    assert torch.equal(into, page) and len(refusing.left) == refuses
    file.close()


def _buffered(self: DiskCalls, path: Path) -> tuple[int, bool]:
    """``DiskCalls.open`` of a file system without direct transfers."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), False


def test_a_file_system_without_direct_transfers_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskCalls, "open", _buffered)
    found: dict[str, Tensor] = trained(on_disk(tmp_path, BF16))[1]
    assert not unequal(found, trained(settings(BF16, "none"))[1])
    assert caplog.text.count("refuses direct transfers, so moments go through its page cache") == 1
