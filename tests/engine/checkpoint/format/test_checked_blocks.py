"""Hashes of blocks."""

import zlib
from collections.abc import Mapping

import numpy as np
import pytest
import xxhash

from engine.checkpoint.format import checked_blocks as blocks
from engine.checkpoint.format.checked_blocks import ALGORITHMS, block_count, hash_blocks, hash_function
from engine.errors import CheckpointError

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
