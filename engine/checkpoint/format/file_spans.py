"""Tensors in files without block hashes: byte offsets of their pieces, and reads of pieces."""

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
    """Contiguous range of a file that contains a piece of a tensor: path, offset in bytes, and piece."""

    path: Path
    start: int
    """Offset of the first element in the file, in bytes."""
    piece: Piece

    def slice_of(self, index: int, kind: TensorKind) -> "FileSpan | None":
        """Returns the span of the elements that are in slice ``index`` of the full tensor along dim 0; None if this
        span has none of them. Its piece counts elements from the start of the slice.

        ``kind``: dtype and shape of one slice.
        """
        part = self.piece.part
        if part.dim == 0:  # adjacent rows of the first dim: contiguous elements of the full tensor
            inner, offset = Part(kind.shape), part.rows[0][0] * kind.elements
        else:
            inner = Part(kind.shape, None if part.dim is None else part.dim - 1, part.rows)
            offset = part.outer[0] * inner.elements if part.outer is not None else 0
        first = index * inner.elements
        begin = max(first, self.piece.start + offset)
        stop = min(first + inner.elements, self.piece.stop + offset)
        if begin >= stop:
            return None
        start = self.start + (begin - offset - self.piece.start) * kind.width
        return FileSpan(self.path, start, Piece(inner, begin - first, stop - first))


@dataclass(frozen=True, slots=True)
class SpannedTensor:
    """Full tensor that is stored as pieces in one or more files. Its values stay in the files."""

    kind: TensorKind
    spans: tuple[FileSpan, ...]


def read_spans(files: Files, tensors: Mapping[str, SpannedTensor], wanted: Iterable[ReadRequest]) -> None:
    """Reads each requested piece from the files of ``tensors`` into the request's memory. Reads only the needed bytes.

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
            path = resolved(span.path)  # a link in the cache of the Hugging Face hub
            with opened(files, path.parent, path.name) as file:
                for copy in copies(shared, span.start, tensor.kind.width, want):
                    if files.read_into(file, copy.target, copy.start) < copy.length:
                        raise CheckpointError(
                            f"{span.path} is damaged: it ends within tensor {want.tensor!r}; copy the file again."
                        )
        if got != want.piece.elements:
            raise CheckpointError(
                f"{want.tensor!r} has {got} of its {want.piece.elements} elements in the files; copy the folder again."
            )


def pieces_of_box(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> Iterator[tuple[Piece, int]]:
    """Divides the box ``start[d] : start[d] + size[d]`` of a tensor into :class:`Piece` objects (ranges of elements). A
    box that is smaller than the tensor in several dims may need several.

    Yields each piece with its offset in the flattened box.
    """
    cut = [dim for dim in range(len(shape)) if size[dim] != shape[dim]]
    if not cut:
        yield Part(shape).whole(), 0
        return
    last = cut[-1]
    part = Part(shape, last, ((start[last], start[last] + size[last]),))
    block = size[last] * prod(shape[last + 1 :])
    # dims before the last cut one: their rows that are adjacent in the tensor make one piece
    inner = cut[-2] if len(cut) > 1 else 0
    whole = prod(shape[inner + 1 : last]) if last else 1
    length = (size[inner] if last else 1) * whole * block
    strides = [prod(shape[dim + 1 : last]) for dim in range(last)]
    for count, index in enumerate(product(*(range(size[dim]) for dim in range(min(inner, last))))):
        row = sum((at + start[dim]) * strides[dim] for dim, at in enumerate(index))
        row += start[inner] * strides[inner] if last else 0
        yield Piece(part, row * block, row * block + length), count * length
