"""A digest finds any changed bit, and any two or three; and tells which one of a single flip."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.integrity.finding import RUN, SHORT, digest_length, flipped_places, short_digest, write_digest
from tests.selection import wide

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn)


def digest(tensor: Tensor) -> Tensor:
    out = torch.empty(digest_length(tensor), dtype=torch.int64)
    write_digest(tensor, out)
    return out


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def flip(tensor: Tensor, bit: int) -> None:
    bytes_of(tensor)[bit // 8] ^= 1 << bit % 8


def filled(elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(elements)
    size = elements * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 7, wide(64)])
def test_every_bit_of_a_small_tensor(dtype: torch.dtype, elements: int) -> None:
    tensor, width = filled(elements, dtype), 8 * dtype.itemsize
    before = digest(tensor)
    for bit in range(8 * tensor.numel() * dtype.itemsize):
        flip(tensor, bit)
        difference = (digest(tensor) - before).tolist()
        ((place),) = flipped_places(difference, tensor)
        assert (place.element, place.stop, place.bit) == (bit // width, bit // width + 1, bit % width)
        assert not torch.equal(short_digest(digest(tensor)), short_digest(before))
        flip(tensor, bit)
    assert torch.equal(digest(tensor), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [SHORT, SHORT + 1, 3 * SHORT, RUN * SHORT, 130 * SHORT + 77, 257 * SHORT])
def test_any_bit_of_a_large_tensor(dtype: torch.dtype, words: int) -> None:
    tensor, width, chance = filled(words * 8 // dtype.itemsize, dtype), 8 * dtype.itemsize, random.Random(words)
    before = digest(tensor)
    edges = [0, 63, 64 * SHORT - 1, 64 * words - 1, 64 * (words - 1), 64 * (words // SHORT * SHORT - 1)]
    for bit in [*edges, *(chance.randrange(64 * words) for _ in range(40))]:
        flip(tensor, bit)
        ((place),) = flipped_places((digest(tensor) - before).tolist(), tensor)
        assert (place.element, place.bit) == (bit // width, bit % width)
        assert not torch.equal(short_digest(digest(tensor)), short_digest(before))
        flip(tensor, bit)


@pytest.mark.parametrize("count", [2, 3])
def test_few_bits_never_cancel_out(count: int) -> None:
    """Also equal bits of words in one column, in one run, and the sign bit, where sums modulo 2^64 are weakest."""
    tensor = torch.zeros(20 * SHORT, dtype=torch.int64)
    tensor[1::2] = -1
    before = digest(tensor)
    places = [0, 1, RUN - 1, RUN, RUN + 1, RUN * RUN, RUN * RUN + 1, RUN**3, RUN**3 + RUN, RUN**3 + RUN * RUN + 1]
    for words in itertools.combinations(places, count):
        for bit in (0, 31, 63):
            for word in words:
                flip(tensor, 64 * word + bit)
            assert not torch.equal(digest(tensor), before), (words, bit)
            for word in words:
                flip(tensor, 64 * word + bit)


def test_swapped_elements() -> None:
    tensor = torch.arange(4 * SHORT, dtype=torch.float32)
    before = digest(tensor)
    for a, b in [(0, 1), (0, 2), (1, 2 * SHORT + 1), (5, 4 * SHORT - 1)]:
        swapped = tensor.clone()
        swapped[a], swapped[b] = tensor[b], tensor[a]
        assert not torch.equal(digest(swapped), before), (a, b)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, 5).t(), torch.ones(4097)[1:], torch.ones(()), torch.zeros(0), torch.ones(9, dtype=torch.bfloat16)],
    ids=["transposed", "offset", "scalar", "empty", "odd"],
)
def test_any_memory_layout(tensor: Tensor) -> None:
    before = digest(tensor)
    assert torch.equal(digest(tensor.clone()), before) or tensor.numel() > SHORT  # words may be cut otherwise
    if tensor.numel():
        index: Any = tuple(size - 1 for size in tensor.shape)
        changed = tensor.clone(memory_format=torch.preserve_format)
        changed[index] = 2.0
        assert changed.stride() == tensor.stride()
        assert not torch.equal(digest(changed), digest(tensor.clone(memory_format=torch.preserve_format)))


def test_several_changes_are_told_apart_where_rows_and_columns_allow_it() -> None:
    tensor = filled(8 * SHORT, torch.float32)
    before = digest(tensor)
    for bit in (32 * 5 + 3, 32 * (4 * SHORT + 10) + 30):
        flip(tensor, bit)
    found = flipped_places((digest(tensor) - before).tolist(), tensor)
    assert [(place.element, place.bit) for place in found] == [(5, 3), (4 * SHORT + 10, 30)]
    assert flipped_places([0] * digest_length(tensor), tensor) == []
