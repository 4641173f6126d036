"""Moments on disk: the same bits, nothing of another write, and one sentence for a disk that fails."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.errors import EngineError
from engine.zero.offload.block_file import BLOCK, BlockFile, BlocksUnderWay, MomentBuffers
from engine.zero.offload.scratch_folder import PREFIX, ScratchFolder
from tests.zero.offload.test_offloaded_training import bits, settings, trained, unequal
from tests.zero.small import batch, start

RunRanks = Callable[..., list[Any]]
CASE = ("AdamW", "bf16", (1, "step"), 1.0)


def on_disk(folder: Path | str, case: Any = CASE, **changes: Any) -> dict[str, Any]:
    found = settings(case, "nvme", **changes)
    found["zero_optimization"]["offload_optimizer"] |= {"nvme_path": str(folder), "buffer_count": 2}
    return found


def compare(folder: str) -> list[str]:
    """Body of a rank: one line for each case with other bits than without an offload, or files that stay behind."""
    wrong = []
    for case in (CASE, ("Lion", "fp32", (3, "microbatch"), 0.5), ("SGD", "fp32", (0, "step"), 1.0)):
        plain, disk = trained(settings(case, "none")), trained(on_disk(folder, case))
        if plain[0] != disk[0] or unequal(plain[1], disk[1]):
            wrong.append(f"{case}: {plain[0]} {disk[0]} {unequal(plain[1], disk[1])[:3]}")
    return wrong


@pytest.mark.long
def test_bits_on_two_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(compare, 2, str(tmp_path)) == [[], []]
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_bits_are_those_of_training_without_an_offload(tmp_path: Path) -> None:
    assert compare(str(tmp_path)) == []
    assert not list(tmp_path.glob(f"{PREFIX}*")), "an engine that is closed leaves nothing"


def test_bytes_on_disk_are_those_of_the_plan(tmp_path: Path) -> None:
    with start(on_disk(tmp_path)) as eng:
        eng.train_batch(batch(eng, 0))
        files = {path.name: path.stat().st_size for path in tmp_path.glob(f"{PREFIX}*/*-*")}
        slots = {name.split("-")[1]: size for name, size in files.items() if name.endswith("-a")}
        plan = eng.plan.rank(0)
        assert len(files) == 3 * len(slots) and sum(files.values()) == plan.disk_bytes > 0
        pages = [size + files[f"before-{number}"] for number, size in slots.items()]
        assert plan.host_bytes["buffers"] == 2 * max(pages)


def test_what_the_program_writes_into_moments_is_used(tmp_path: Path) -> None:
    found = []
    for changes in (settings(CASE, "none"), on_disk(tmp_path)):
        with start(changes) as eng:
            eng.train_batch(batch(eng, 0))
            with eng.optimizer_state() as state:
                for moments in state.values():
                    moments["exp_avg"].mul_(0.5)
            eng.train_batch(batch(eng, 1))
            found.append(bits(eng))
    assert not unequal(*found)


def test_a_block_of_an_older_write_is_refused(tmp_path: Path) -> None:
    with start(on_disk(tmp_path)) as eng:
        eng.train_batch(batch(eng, 0))
        file = sorted(tmp_path.glob(f"{PREFIX}*/bucket-*"))[-1]
        older = file.read_bytes()
        eng.train_batch(batch(eng, 1))
        with file.open("r+b") as stream:
            stream.write(older)
        with pytest.raises(EngineError, match="differ from the bytes last written there, so no update uses them"):
            eng.train_batch(batch(eng, 2))
        for call in (lambda: eng.train_batch(batch(eng, 3)), lambda: eng.save_checkpoint(str(tmp_path / "saved"))):
            with pytest.raises(
                EngineError,
                match=(
                    "an update has failed midway, so load the last checkpoint into a new engine: optimizer "
                    "state on disk: bytes"
                ),
            ):
                call()
        assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").glob("step-*"))


def write(file: BlockFile, data: memoryview) -> None:
    with ThreadPoolExecutor(1) as pool:
        file.start_write(data, pool).result()


def read(file: BlockFile, into: memoryview, checked: bool = True) -> None:
    with ThreadPoolExecutor(1) as pool:
        file.start_read(into, pool, checked).result()


def test_each_block_is_checked(tmp_path: Path) -> None:
    data = torch.arange(2 * BLOCK + 100, dtype=torch.int64).to(torch.uint8).numpy()
    file = BlockFile(tmp_path / "file", len(data))
    write(file, data.data)
    into = bytearray(len(data))
    read(file, memoryview(into))
    assert into == data.tobytes()
    for place in (0, BLOCK, 2 * BLOCK + 99):
        with (tmp_path / "file").open("r+b") as stream:
            stream.seek(place)
            stream.write(bytes([data[place] ^ 1]))
        with pytest.raises(EngineError, match=f"bytes {place // BLOCK * BLOCK} to .* differ from the bytes last"):
            read(file, memoryview(into))
        read(file, memoryview(into), checked=False)
        write(file, data.data)
    os.truncate(tmp_path / "file", 10)
    with pytest.raises(EngineError, match=r"cannot be read \(it ends after 10 of "):
        read(file, memoryview(into))
    file.close()
    assert not (tmp_path / "file").exists()


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with start(on_disk(tmp_path)) as eng, pytest.raises(EngineError, match=r"cannot be made \(No space left on device"):
        eng.train_batch(batch(eng, 0))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="nvme_path: no folder can be made in"):
        start(on_disk(tmp_path / "file" / "below"))


def test_a_relative_folder_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = ScratchFolder("disk", 0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    BlockFile(folder.path / "block", 1).close()
    folder.close()
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.long
def test_an_optimizer_that_updates_all_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(engine.ConfigError, match='"nvme" was given optimizer AdamW'):
        start(on_disk(tmp_path) | {"optimizer": None}, torch.optim.AdamW)


def test_what_a_killed_run_left_is_deleted_and_a_live_one_is_spared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = tmp_path / f"{PREFIX}rank0-dead"
    dead.mkdir()
    (dead / "lock").write_text("")
    (dead / "bucket-0").write_text("old")
    alive = ScratchFolder(str(tmp_path), 0)
    assert not dead.exists() and "when it was killed, is deleted" in caplog.text
    other = ScratchFolder(str(tmp_path), 0)
    assert alive.path.exists() and other.path != alive.path
    alive.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_a_buffer_is_free_when_its_write_has_ended() -> None:
    buffers = MomentBuffers(1, 8)
    page, write = buffers.take(), Future[None]()
    buffers.give_back(page, BlocksUnderWay([write]))
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(buffers.take)
        assert not wait([taken], timeout=0.05).done
        write.set_result(None)
        assert taken.result() is page


def test_a_folder_without_permission_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.mkdtemp", refused)
    with pytest.raises(EngineError, match=r"nvme_path: no folder can be made in .* \(Permission denied\); give a "):
        ScratchFolder(str(tmp_path), 0)


@pytest.mark.long
@pytest.mark.parametrize("elements", [1, 10**9])
def test_sizes_that_no_sector_divides(tmp_path: Path, elements: int) -> None:
    plain, disk = settings(CASE, "none"), on_disk(tmp_path)
    for changes in (plain, disk):
        changes["zero_optimization"]["reduce_bucket_size"] = elements
    assert not unequal(trained(plain)[1], trained(disk)[1])
