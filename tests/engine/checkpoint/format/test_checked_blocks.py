"""Hashes of blocks; long reads in two threads, past the page cache and through it, and the write beside its hashing."""

import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import xxhash

from engine.checkpoint.format import checked_blocks as blocks
from engine.checkpoint.format.checked_blocks import (
    ALGORITHMS,
    BLOCK,
    LONG,
    ChunkReader,
    block_count,
    hash_blocks,
    hash_function,
)
from engine.checkpoint.format.filesystem import PAGE, Files
from engine.checkpoint.format.host_image import ImageMemory, write_file
from engine.errors import CheckpointError

SIZE = 5 * LONG + 3 * PAGE + 17


class Watched(Files):
    """Says how files were read; ``cached`` is what it answers."""

    def __init__(self, cached: bool) -> None:
        self.cached = cached
        self.direct: list[int] = []
        self.through: list[int] = []

    def is_cached(self, file: int, offset: int) -> bool:
        return self.cached

    def read_direct(self, file: int, target: memoryview, offset: int) -> int:
        self.direct.append(offset)
        return super().read_direct(file, target, offset)

    def read_into(self, file: int, target: memoryview, offset: int) -> int:
        self.through.append(offset)
        return super().read_into(file, target, offset)


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Iterator[int]:
    (tmp_path / "file").write_bytes(content)
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    os.fsync(opened)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (LONG, 3 * LONG), (2 * PAGE, SIZE), (0, 100), (PAGE, PAGE)])
def test_what_is_read_is_what_is_there(file: int, content: bytes, cached: bool, start: int, stop: int) -> None:
    files, checked = Watched(cached), []
    target = np.zeros(stop - start + 1, dtype=np.uint8)[1:]  # at an odd address, as a place in a bucket may be
    reader = ChunkReader(files, LONG)
    count = reader.read(file, target, start, lambda data, begin: checked.append((begin, bytes(data))))
    assert target.tobytes() == content[start:stop] and count == stop - start
    assert b"".join(data for _, data in sorted(checked)) == content[start:stop]
    whole = [begin for begin in range(start, stop, LONG) if not cached and stop - begin >= LONG]
    assert sorted(files.direct) == whole


def test_two_chunks_are_under_way_at_once(file: int) -> None:
    both = threading.Barrier(2, timeout=20)

    def meet(_data: memoryview, _begin: int) -> None:
        both.wait()

    ChunkReader(Watched(False), LONG).read(file, np.zeros(4 * LONG, dtype=np.uint8), 0, meet)


def test_the_first_problem_in_the_file_is_raised_when_nothing_runs_any_more(file: int) -> None:
    late, ended = threading.Event(), []

    def check(_: memoryview, begin: int) -> None:
        if begin == 0:
            late.wait(20)
        late.set()
        ended.append(begin)
        if begin in (0, LONG):
            raise ValueError(begin)

    with pytest.raises(ValueError, match=r"^0$"):
        ChunkReader(Files(), LONG).read(file, np.zeros(5 * LONG, dtype=np.uint8), 0, check)
    before = list(ended)
    assert {0, LONG} <= set(before)
    threading.Event().wait(0.05)
    assert ended == before


def test_a_file_is_cached_when_it_was_just_written(file: int) -> None:
    assert Files().is_cached(file, 0) and Files().is_cached(file, SIZE - 1)


def test_direct_reads_end_where_the_file_ends(file: int, content: bytes) -> None:
    aligned = ImageMemory().take("pages", 4 * PAGE)
    start = SIZE // PAGE * PAGE - PAGE
    count = Files().read_direct(file, aligned, start)
    assert bytes(aligned[:count]) == content[start:]


class Failing(Files):
    """A disk that is full."""

    def write(self, file: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    memory = ImageMemory().take("all", SIZE)
    with pytest.raises(OSError, match="No space") as error:
        write_file(Failing(), tmp_path / "file", memory, SIZE)
    assert error.value.filename == str(tmp_path / "file")
    assert "hashes" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("size", [0, 1, PAGE, BLOCK + 5, SIZE])
def test_hashes_are_those_of_the_file(tmp_path: Path, content: bytes, size: int) -> None:
    memory = ImageMemory().take("all", SIZE)
    memory[:SIZE] = content
    hashes = write_file(Files(), tmp_path / "file", memory, size)
    written = (tmp_path / "file").read_bytes()
    assert written == content[:size]
    assert hashes.tolist() == hash_blocks(memoryview(written)).tolist()


@pytest.mark.long
def test_a_file_can_be_written_while_the_interpreter_ends(tmp_path: Path) -> None:
    code = f"""
import mmap, threading
from pathlib import Path
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.host_image import write_file
def late():
    threading.main_thread().join()
    write_file(Files(), Path({str(tmp_path / "file")!r}), memoryview(mmap.mmap(-1, 4096)), 4096)
threading.Thread(target=late).start()
"""
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
    assert (tmp_path / "file").read_bytes() == bytes(4096)


DATA = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 10_000])
def test_each_block_has_its_hash(algorithm: str, size: int) -> None:
    found = hash_blocks(memoryview(DATA)[:size], algorithm, 4096)
    one = {"xxh3-64": xxhash.xxh3_64_intdigest, "crc32": zlib.crc32}[algorithm]
    assert found.tolist() == [one(DATA[start : min(start + 4096, size)]) for start in range(0, size, 4096)]
    assert found.dtype == np.uint64 and len(found) == block_count(size, 4096)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_bit_counts(algorithm: str) -> None:
    data = bytearray(DATA[:64])
    expected = int(hash_blocks(memoryview(data), algorithm)[0])
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert int(hash_blocks(memoryview(data), algorithm)[0]) != expected
        data[bit // 8] ^= 1 << bit % 8


def test_a_block_of_zeros_is_not_the_shorter_one() -> None:
    for algorithm in ALGORITHMS:
        assert hash_blocks(memoryview(bytes(4096)), algorithm) != hash_blocks(memoryview(bytes(4095)), algorithm)


def test_an_algorithm_that_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    only: Mapping[str, object] = {"crc32": zlib.crc32}
    monkeypatch.setattr(blocks, "_ALGORITHMS", only)
    with pytest.raises(CheckpointError, match=r"hashed with xxh3-64, .* pip install xxhash"):
        hash_function("xxh3-64")
