"""Placement of tensors in flat groups, of pushed bodies in whole tensors, and of merged versions in pulled bodies.

    tensors of a fragment    | group 0: weight, head | group 1: bias |         one flat tensor for each group
    bodies of all ranks      pieces -> parts (rows along one dim) -> tensors

Views along one dim place the parts; no array of indices is made.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from engine.checkpoint.format.pieces import Part, Piece, covers_once
from engine.outer.codecs import DeltaCodec
from engine.outer.messages import NamedPiece, RankLayout, StoreRefusedError

Flats = tuple[Tensor, ...]
"""All values of a fragment: one flat tensor for each parameter group."""


@dataclass(frozen=True, slots=True)
class FlatPlace:
    """Position of one tensor in the flat tensor of its parameter group: elements ``start`` to ``stop`` - 1."""

    shape: tuple[int, ...]
    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlatTensors:
    """Positions of tensors in flat tensors, which concatenate the tensors of each parameter group in model order."""

    places: Mapping[str, FlatPlace]
    sizes: tuple[int, ...]
    """Elements of each group."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, tuple[int, ...], int]], groups: int) -> "FlatTensors":
        """Returns the positions of ``tensors`` in flat tensors, one per parameter group. Each flat tensor concatenates
        its group's tensors in the order of ``tensors``.

        Args:
            tensors: (name, shape, number of the parameter group) of each tensor.
            groups: number of parameter groups.
        """
        sizes, places = [0] * groups, {}
        for name, shape, group in tensors:
            start = sizes[group]
            sizes[group] += prod(shape)
            places[name] = FlatPlace(shape, group, start, sizes[group])
        return cls(MappingProxyType(places), tuple(sizes))

    def empty(self, dtype: torch.dtype) -> Flats:
        """Returns uninitialized flat tensors of ``dtype``, one for each parameter group."""
        return tuple(torch.empty(size, dtype=dtype) for size in self.sizes)

    def view(self, flats: Flats, name: str) -> Tensor:
        """Returns a view of the tensor called ``name`` in the flat tensors ``flats``, in the original shape of the
        tensor.
        """
        place = self.places[name]
        return flats[place.group][place.start : place.stop].view(place.shape)

    def own(self, pieces: Iterable[NamedPiece]) -> Iterator[NamedPiece]:
        """Yields the entries of ``pieces`` (ranges of elements) that belong to tensors of this object."""
        return (each for each in pieces if each.name in self.places)

    def message_bytes(self, layout: RankLayout, codec: DeltaCodec) -> int:
        """Returns the size in bytes of one rank's push of this fragment.

        Args:
            layout: elements that the rank pushes and pulls.
            codec: codec of pushes.
        """
        return sum(codec.message_bytes(each.piece.elements) for each in self.own(layout.pushed))

    def seed_bytes(self, layout: RankLayout) -> int:
        """Returns the size in bytes of one rank's initial weights for this fragment, fp32.

        Args:
            layout: elements that the rank pushes and pulls.
        """
        return 4 * sum(each.piece.elements for each in self.own(layout.pushed))

    def is_finite(self, layout: RankLayout, body: Tensor, codec: DeltaCodec) -> bool:
        """Returns True if all values of ``body``, one rank's push, are finite in fp32.

        Args:
            layout: elements that the rank pushes and pulls.
            codec: codec that decodes ``body``.

        Raises:
            ValueError: the codec cannot decode the body.
        """
        decoded = [values for _, values in self._decoded(layout, body, codec)]
        return all(bool(values.float().isfinite().all()) for values in decoded)

    def assemble(
        self, layouts: Mapping[int, RankLayout], bodies: Mapping[int, Tensor], codec: DeltaCodec, dtype: torch.dtype
    ) -> Flats:
        """Decodes the pushes of all ranks of a training site into whole tensors.

        Returns flat tensors of ``dtype``, one for each parameter group.

        Args:
            layouts: elements that each rank pushes and pulls, by rank.
            bodies: encoded values of each rank, uint8 [bytes], by rank.
        """
        decoded = (entry for rank in sorted(bodies) for entry in self._decoded(layouts[rank], bodies[rank], codec))
        return self._placed(decoded, dtype)

    def assemble_seeds(self, layouts: Mapping[int, RankLayout], bodies: Mapping[int, Tensor]) -> Flats:
        """Joins the initial weights of all ranks of a training site to whole tensors.

        Returns flat tensors, fp32, one for each parameter group.

        Args:
            layouts: elements that each rank pushes and pulls, by rank.
            bodies: bytes of each rank's initial weights (fp32), uint8 [bytes], by rank.
        """
        found: list[tuple[NamedPiece, Tensor]] = []
        for rank in sorted(bodies):
            pieces = list(self.own(layouts[rank].pushed))
            values = bodies[rank].clone().view(torch.float32)
            found.extend(zip(pieces, torch.split(values, [each.piece.elements for each in pieces]), strict=True))
        return self._placed(found, torch.float32)

    def cut(self, flats: Flats, layout: RankLayout) -> Tensor:
        """Returns the elements of this fragment that one rank pulls, concatenated.

        Args:
            flats: values of the fragment, one flat tensor for each parameter group.
            layout: elements that the rank pushes and pulls.
        """
        parts: dict[tuple[str, Part], Tensor] = {}
        found = []
        for name, piece in ((each.name, each.piece) for each in self.own(layout.pulled)):
            key = name, piece.part
            if key not in parts:
                parts[key] = _part_of(self.view(flats, name), piece.part)
            found.append(parts[key][piece.start : piece.stop])
        return torch.cat(found) if found else torch.empty(0)

    def _decoded(self, layout: RankLayout, body: Tensor, codec: DeltaCodec) -> Iterator[tuple[NamedPiece, Tensor]]:
        start = 0
        for each in self.own(layout.pushed):
            stop = start + codec.message_bytes(each.piece.elements)
            yield each, codec.decode(body[start:stop], each.piece.elements)
            start = stop

    def _placed(self, pieces: Iterable[tuple[NamedPiece, Tensor]], dtype: torch.dtype) -> Flats:
        flats = self.empty(dtype)
        parts: dict[tuple[str, Part], Tensor] = {}
        for each, values in pieces:
            part = each.piece.part
            if (each.name, part) not in parts:
                whole = self.view(flats, each.name).view(-1)
                parts[each.name, part] = whole if part.dim is None else torch.empty(part.elements, dtype=dtype)
            parts[each.name, part][each.piece.start : each.piece.stop] = values
        for (name, part), values in parts.items():
            if part.dim is not None:
                _place(self.view(flats, name), part, values)
        return flats


def check_layout(layout: RankLayout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a layout with an unknown tensor, or with a piece that ends outside its tensor.

    Raises:
        StoreRefusedError: the message names the tensor.
    """
    for each in (*layout.pushed, *layout.pulled):
        if each.name not in shapes:
            raise StoreRefusedError(
                f"{each.name!r} is registered, but no tensor of the training has this name; register trained tensors."
            )
        if each.piece.part.shape != shapes[each.name] or not each.piece.is_inside:
            raise StoreRefusedError(
                f"a piece of {each.name!r} is registered as {each.piece.start:,} to {each.piece.stop:,} of a part of "
                f"shape {list(each.piece.part.shape)}, but the tensor has shape {list(shapes[each.name])} and the "
                "piece has to be inside it; register the pieces of this model."
            )


def check_body(body: Tensor, expected: int, subject: str) -> None:
    """Raises unless ``body`` is a 1-D uint8 tensor with ``expected`` bytes.

    Raises:
        StoreRefusedError: size or dtype differ; the message begins with ``subject``, a name for the body.
    """
    if body.dtype != torch.uint8 or body.dim() != 1 or len(body) != expected:
        raise StoreRefusedError(
            f"{subject}: the body has {body.numel():,} elements of {str(body.dtype).removeprefix('torch.')}, but its "
            f"registered pieces take {expected:,} bytes; send exactly these as uint8."
        )


def check_coverage(layouts: Mapping[int, RankLayout], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises unless a site's ranks together push each element of every tensor exactly once.

    Args:
        layouts: elements that each rank pushes and pulls, by rank.
        shapes: shape of each trainable tensor by name.

    Raises:
        StoreRefusedError: an element is pushed twice or never; the message names its tensor.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for layout in layouts.values():
        for each in (each for each in layout.pushed if each.name in pieces):
            pieces[each.name].append(each.piece)
    for name, shape in shapes.items():
        if not covers_once(shape, pieces[name]):
            raise StoreRefusedError(
                f"the {len(layouts):,} ranks of the site register {len(pieces[name]):,} pushed pieces of {name!r}, "
                "which do not cover each of its elements exactly once; register every element on one rank."
            )


def _runs_of(tensor: Tensor, part: Part, dim: int) -> list[Tensor]:
    """Returns views of the rows of a part, in order."""
    box = tensor if part.outer is None else tensor.narrow(0, part.outer[0], part.outer[1] - part.outer[0])
    return [box.narrow(dim, start, stop - start) for start, stop in part.rows]


def _part_of(tensor: Tensor, part: Part) -> Tensor:
    """Returns the elements of a part, flat; a view for the whole tensor."""
    if part.dim is None:
        return tensor.view(-1)
    views = _runs_of(tensor, part, part.dim)
    return torch.cat(views, dim=part.dim).view(-1) if views else tensor.new_empty(0)


def _place(tensor: Tensor, part: Part, values: Tensor) -> None:
    """Copies the elements of a part, flat, to their rows of the tensor."""
    assert part.dim is not None
    if not part.rows:
        return
    lengths = [stop - start for start, stop in part.rows]
    shape = (*part.box[: part.dim], sum(lengths), *part.shape[part.dim + 1 :])
    for rows, source in zip(
        _runs_of(tensor, part, part.dim), torch.split(values.view(shape), lengths, part.dim), strict=True
    ):
        rows.copy_(source)
