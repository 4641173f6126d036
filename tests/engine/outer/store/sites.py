"""Sites without an engine, for tests of a store: layouts of grids, and pushes of given values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.format.pieces import Part, Piece
from engine.config.optim_sections import OptimizerConfig
from engine.config.outer_section import OuterConfig, shared_settings
from engine.outer.codecs import make_delta_codec
from engine.outer.messages import (
    JoinReply,
    JoinRequest,
    NamedPiece,
    Offer,
    PushKey,
    PushMeta,
    PushShare,
    PushState,
    RankLayout,
    StoreLink,
)

TENSORS: tuple[tuple[str, tuple[int, ...]], ...] = (("wide", (4, 6)), ("bias", (6,)), ("scale", ()))
Values = Mapping[str, Tensor]


def settings_of(clipping: float = 0.0, training: OptimizerConfig | None = None, **outer: Any) -> dict[str, Any]:
    """Returns the shared settings of a configuration."""
    return shared_settings(OuterConfig(url="http://store:8140", **outer), training, clipping)


def values_of(seed: int, tensors: Sequence[tuple[str, tuple[int, ...]]] = TENSORS) -> dict[str, Tensor]:
    """Returns random fp32 values of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensors}


def whole_layout(tensors: Sequence[tuple[str, tuple[int, ...]]] = TENSORS) -> tuple[RankLayout, ...]:
    """Returns the layout of a site of one rank."""
    pieces = tuple(NamedPiece(name, Part(shape).whole()) for name, shape in tensors)
    return (RankLayout(pieces, pieces),)


def tensor_parallel_layout(dim: int) -> tuple[RankLayout, ...]:
    """Returns the layouts of two tensor ranks that divide "wide" along ``dim``."""
    found = []
    for rank in range(2):
        half = (4, 6)[dim] // 2
        wide = Part((4, 6), dim, ((rank * half, (rank + 1) * half),)).whole()
        others = [NamedPiece(name, Part(shape).whole()) for name, shape in TENSORS[1:]]
        wide_piece = NamedPiece("wide", wide)
        found.append(RankLayout((wide_piece, *(others if not rank else [])), (wide_piece, *others)))
    return tuple(found)


def fused_layout() -> tuple[RankLayout, ...]:
    """Returns the layouts of two tensor ranks with two ranges of rows each, and of two data ranks for each."""
    found = []
    for tensor, data in ((0, 0), (1, 0), (0, 1), (1, 1)):
        part = Part((4, 6), 1, ((tensor, tensor + 1), (2 + 2 * tensor, 4 + 2 * tensor)))
        piece = NamedPiece("wide", Piece(part, data * 5, 5 + data * 7))
        others = [NamedPiece(name, Part(shape).whole()) for name, shape in TENSORS[1:]]
        found.append(RankLayout((piece, *(others if (tensor, data) == (1, 1) else [])), (piece, *others)))
    return tuple(found)


def expert_layout() -> tuple[RankLayout, ...]:
    """Returns the layouts of two expert ranks, each with the columns of two tensor ranks."""
    found = []
    for expert, tensor in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = Part((4, 6), 1, ((3 * tensor, 3 * tensor + 3),), (2 * expert, 2 * expert + 2))
        others = [NamedPiece(name, Part(shape).whole()) for name, shape in TENSORS[1:]]
        piece = NamedPiece("wide", part.whole())
        found.append(RankLayout((piece, *(others if (expert, tensor) == (0, 1) else [])), (piece, *others)))
    return tuple(found)


def pipeline_layout() -> tuple[RankLayout, ...]:
    """Returns the layouts of two pipeline ranks."""
    pieces = [NamedPiece(name, Part(shape).whole()) for name, shape in TENSORS]
    return RankLayout((pieces[1],), (pieces[1],)), RankLayout((pieces[2], pieces[0]), (pieces[2], pieces[0]))


def data_parallel_layout() -> tuple[RankLayout, ...]:
    """Returns the layouts of two data ranks that share every tensor."""
    found = []
    for rank in range(2):
        pieces = []
        for name, shape in TENSORS:
            part = Part(shape)
            cut = part.elements // 2
            pieces.append(NamedPiece(name, Piece(part, rank * cut, part.elements if rank else cut)))
        found.append(RankLayout(tuple(pieces), tuple(pieces)))
    return tuple(found)


def taken_from(values: Values, pieces: Sequence[NamedPiece]) -> list[Tensor]:
    """Returns the elements of pieces, by the index arithmetic of checkpoints."""
    found = []
    for each in pieces:
        flat, spans = values[each.name].reshape(-1), each.piece.spans()
        own = torch.empty(each.piece.elements, dtype=flat.dtype)
        for full, local, length in zip(*(part.tolist() for part in spans), strict=True):
            own[local : local + length] = flat[full : full + length]
        found.append(own)
    return found


class SiteOfTests:
    """One life of a site, on any layout."""

    def __init__(
        self,
        store: StoreLink,
        settings: Mapping[str, Any],
        site: int = 0,
        layouts: Sequence[RankLayout] | None = None,
        **request: Any,
    ) -> None:
        self.store, self.settings, self.site = store, settings, site
        self.layouts = tuple(layouts) if layouts is not None else whole_layout()
        tensors = request.pop("tensors", TENSORS)
        self.tensors = dict(tensors)
        self.codec = make_delta_codec(settings["wire"], density=settings["density"], bits=settings["bits"])
        self.joined: JoinReply = store.join(JoinRequest(site, len(self.layouts), tensors, settings=settings, **request))
        self.life, self.seq, self.base, self.rows = self.joined.life, 0, 0, self.joined.rows
        for rank, layout in enumerate(self.layouts):
            store.register(self.life, rank, layout)

    def seed(self, values: Values, fragment: int = 0) -> None:
        """Sends initial weights from all ranks."""
        for rank, layout in enumerate(self.layouts):
            own = taken_from(values, layout.pushed)
            self.store.seed(self.life, rank, fragment, torch.cat(own).view(torch.uint8))

    def body(self, values: Values, rank: int = 0) -> Tensor:
        """Returns the body of a rank."""
        own = [self.codec.encode(piece) for piece in taken_from(values, self.layouts[rank].pushed)]
        return torch.cat(own) if own else torch.empty(0, dtype=torch.uint8)

    def meta(self, **given: Any) -> PushMeta:
        """Returns the description of the next push."""
        fields = {"base": self.base, "steps": 1, "tokens": 1.0, "rows": self.rows + 1, "step": self.seq} | given
        return PushMeta(PushKey(self.life, fields.pop("fragment", 0), fields.pop("seq", self.seq)), **fields)

    def push(self, values: Values, weight: float = 1.0, loss: float = 0.5, **given: Any) -> PushState:
        """Pushes from all ranks."""
        meta, state = self.meta(**given), PushState.PARTIAL
        for rank in range(len(self.layouts)):
            share = PushShare(weight, loss) if not rank else PushShare()
            state = self.store.push(meta, rank, share, self.body(values, rank))
        self.seq, self.rows = meta.key.seq + 1, meta.rows
        return state

    def take(self) -> tuple[Offer, dict[str, Tensor]] | None:
        """Pulls an offered version from all ranks; returns it with whole tensors."""
        offer = self.store.offer(self.life, 0)
        if offer is None:
            return None
        whole = {name: torch.full(shape, torch.nan) for name, shape in self.tensors.items()}
        for rank, layout in enumerate(self.layouts):
            values = self.store.pull(self.life, rank, 0, offer.version)
            pieces = torch.split(values, [each.piece.elements for each in layout.pulled])
            for each, own in zip(layout.pulled, pieces, strict=True):
                flat, spans = whole[each.name].view(-1), each.piece.spans()
                for full, local, length in zip(*(part.tolist() for part in spans), strict=True):
                    flat[full : full + length] = own[local : local + length]
        self.base = offer.version
        return offer, whole
