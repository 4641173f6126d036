"""Tensors that lie in files without block hashes: where the bytes of each piece begin, and reading them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

from engine.checkpoint.format.filesystem import Files, opened, resolved
from engine.checkpoint.format.pieces import Part, Piece, runs
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.checkpoint.format.step_reader import ReadRequest, copies
from engine.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A piece of a tensor whose elements lie in a row in a file."""

    path: Path
    start: int
    """Byte of the first element."""
    piece: Piece

    def slice_of(self, index: int, kind: TensorKind) -> "FileSpan | None":
        """What it holds of element ``index`` along the first dim, a tensor of ``kind``; None if nothing."""
        part = self.piece.part
        if part.dim == 0:  # rows of the first dim, which are neighbours: elements of the full tensor in a row
            inner, offset = Part(kind.shape), part.rows[0][0] * kind.elements
        else:
            inner, offset = Part(kind.shape, None if part.dim is None else part.dim - 1, part.rows), 0
        first = index * inner.elements
        begin = max(first, self.piece.start + offset)
        stop = min(first + inner.elements, self.piece.stop + offset)
        if begin >= stop:
            return None
        start = self.start + (begin - offset - self.piece.start) * kind.width
        return FileSpan(self.path, start, Piece(inner, begin - first, stop - first))


@dataclass(frozen=True, slots=True)
class SpannedTensor:
    """A full tensor, as pieces that lie in files."""

    kind: TensorKind
    spans: tuple[FileSpan, ...]


def read_spans(files: Files, tensors: Mapping[str, SpannedTensor], wanted: Iterable[ReadRequest]) -> None:
    """Fill the targets of all requests, reading only the bytes that they need.

    Raises:
        CheckpointError: a file ends too early, or the pieces of a tensor lack some of its elements.
    """
    for want in wanted:
        tensor, got = tensors[want.tensor], 0
        for span in tensor.spans:
            shared = runs(span.piece, want.piece)
            got += int(shared.length.sum())
            if not len(shared.length):
                continue
            path = resolved(span.path)  # in the cache of the Hugging Face hub it is a link
            with opened(files, path.parent, path.name) as file:
                for copy in copies(shared, span.start, tensor.kind.width, want):
                    if files.read_into(file, copy.target, copy.start) < copy.length:
                        raise CheckpointError(
                            f"{span.path} is damaged: it ends within tensor {want.tensor!r}; copy the file again."
                        )
        if got != want.piece.elements:
            raise CheckpointError(
                f"{want.tensor!r}: the files hold {got} of {want.piece.elements} elements; copy the folder again."
            )


def pieces_of_box(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> Iterator[tuple[Piece, int]]:
    """The box ``start : start + size`` of a tensor as pieces, each with the index of its first element in the box.

    Row 1 of a 3 x 4 tensor's columns 2:4 is elements 2:4 of the part that those columns are. A cut of one dim, or of
    two of which one is the first, is one piece.
    """
    cut = [dim for dim in range(len(shape)) if size[dim] != shape[dim]]
    if not cut:
        yield Part(shape).whole(), 0
        return
    last = cut[-1]
    part = Part(shape, last, ((start[last], start[last] + size[last]),))
    block = size[last] * prod(shape[last + 1 :])
    # dims before the last cut one: rows of them that are neighbours in the tensor make one piece
    inner = cut[-2] if len(cut) > 1 else 0
    whole = prod(shape[inner + 1 : last]) if last else 1
    length = (size[inner] if last else 1) * whole * block
    strides = [prod(shape[dim + 1 : last]) for dim in range(last)]
    for count, index in enumerate(product(*(range(size[dim]) for dim in range(min(inner, last))))):
        row = sum((at + start[dim]) * strides[dim] for dim, at in enumerate(index))
        row += start[inner] * strides[inner] if last else 0
        yield Piece(part, row * block, row * block + length), count * length
