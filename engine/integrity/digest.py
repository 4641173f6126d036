"""Digests of the bits of tensors, in wrapping integer sums: no host synchronization, equal in any order of addition.

The bytes of a tensor are 64-bit words in rows of ``COLUMNS``; its digest is the sum of each column and of each row,
modulo 2^64, about a thousandth of its size:

    w00 w01 w02 ..  | r0        One changed word changes its column sum by what it changed by, which is not 0.
    w10 w11 w12 ..  | r1        Two changed words lie in two columns, of which each changes, or in two rows.
    ------------------          So any flipped bit is found and any two are; so are any three words. What is not found
    c0  c1  c2  ..              needs four words at the corners of a rectangle, whose changes cancel out in each line.

Row and column tell the word, and the difference of one flipped bit is a power of two that tells the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLUMNS = 1024
_ROWS = 128  # at a time on a CPU: a MiB, which stays in the cache for the second sum
_WORDS = ((4, torch.int32), (2, torch.int16), (1, torch.uint8))


@dataclass(frozen=True, slots=True)
class FlippedPlace:
    """Where a tensor's memory has changed."""

    element: int
    """Index in the flat tensor; the first of a word's where more than one bit has changed."""
    stop: int
    """End of the elements that may have changed, exclusive."""
    bit: int | None
    """The one bit of the element that has changed, 0 is the lowest; None: several."""


def digest_length(tensor: Tensor) -> int:
    """Number of int64 values in the digest of ``tensor``; a short one is its own digest."""
    words = tensor.numel() // _elements_in_word(tensor)
    return words if words <= COLUMNS else COLUMNS + -(-words // COLUMNS)


@torch.no_grad()
def write_digest(tensor: Tensor, out: Tensor) -> None:
    """Write the digest of ``tensor`` into ``out``, int64 [digest_length(tensor)]."""
    words = _words(tensor)
    if len(words) <= COLUMNS:
        out.copy_(words)
        return
    rows, rest = divmod(len(words), COLUMNS)
    table, columns = words[: rows * COLUMNS].view(rows, COLUMNS), out[:COLUMNS]
    step = _ROWS if tensor.device.type == "cpu" else rows
    torch.sum(table[:step], dim=0, out=columns)
    for start in range(0, rows, step):
        part = table[start : start + step]
        if start:
            columns.add_(part.sum(dim=0))
        torch.sum(part, dim=1, out=out[COLUMNS + start : COLUMNS + start + len(part)])
    if rest:
        columns[:rest].add_(words[rows * COLUMNS :])
        torch.sum(words[rows * COLUMNS :], dim=0, out=out[COLUMNS + rows])


@torch.no_grad()
def short_digest(digest: Tensor, tensor: Tensor) -> Tensor:
    """Two sums of a digest, int64 [2], to compare between ranks: one is of the columns, the other of the rows.

    Each column has an odd factor of its own, so that a difference of one column never vanishes modulo 2^64.
    """
    length = digest_length(tensor)
    columns = min(length, COLUMNS)
    factors = odd_factors(0, max(columns, length - columns), digest.device)
    first = (digest[:columns] * factors[:columns]).sum()
    return torch.stack([first, (digest[columns:] * factors[: length - columns]).sum()])


def odd_factors(start: int, stop: int, device: torch.device) -> Tensor:
    """Different odd numbers, int64, one for each place from ``start`` to ``stop``."""
    return torch.arange(start, stop, device=device).mul_(2).add_(1)


def flipped_places(difference: Sequence[int], tensor: Tensor) -> list[FlippedPlace]:
    """Where memory has changed, by the difference of two digests of ``tensor``; none if it is all 0."""
    columns = {place: value for place, value in enumerate(difference[:COLUMNS]) if value}
    if len(difference) <= COLUMNS:
        return [_place(word, value, tensor) for word, value in columns.items()]
    rows = {place: value for place, value in enumerate(difference[COLUMNS:]) if value}
    pairs = [(row, column) for row in rows for column in columns if rows[row] == columns[column]]
    if len(pairs) == len(rows) == len(columns):
        return [_place(row * COLUMNS + column, rows[row], tensor) for row, column in pairs]
    if len(rows) == 1:
        return [_place(next(iter(rows)) * COLUMNS + column, value, tensor) for column, value in columns.items()]
    if len(columns) == 1:
        return [_place(row * COLUMNS + next(iter(columns)), value, tensor) for row, value in rows.items()]
    size = _elements_in_word(tensor) * COLUMNS
    found = rows or dict.fromkeys(range(len(difference) - COLUMNS))
    return [FlippedPlace(row * size, min((row + 1) * size, tensor.numel()), None) for row in found]


def _place(word: int, value: int, tensor: Tensor) -> FlippedPlace:
    """The place of a changed word; one flipped bit changes it by plus or minus a power of two, modulo 2^64."""
    size = _elements_in_word(tensor)
    amount = min(value % 2**64, -value % 2**64)
    if amount & (amount - 1):
        return FlippedPlace(word * size, word * size + size, None)
    within, bit = divmod(amount.bit_length() - 1, 64 // size if size > 1 else 64)
    element = word * size + within
    return FlippedPlace(element, element + 1, bit)


def _elements_in_word(tensor: Tensor) -> int:
    """Elements of one word: as many as fill 8 bytes, where memory allows it, or one."""
    size = tensor.element_size()
    if size > 8:
        raise ValueError(f"elements of {size} bytes have no digest")
    many = 8 // size
    aligned = tensor.is_contiguous() and tensor.numel() % many == 0 and tensor.storage_offset() % many == 0
    return many if aligned and tensor.dim() else 1


def _words(tensor: Tensor) -> Tensor:
    """The memory of ``tensor`` as int64 [words]; a view, except for tensors that do not consist of whole words."""
    flat = tensor.detach().reshape(-1)
    if _elements_in_word(tensor) * tensor.element_size() == 8:
        return flat.view(torch.int64)
    word = next(word for size, word in _WORDS if tensor.element_size() == size)
    return flat.contiguous().view(word).to(torch.int64)
