"""Trainers of this process without a training: images of random tensors on several owners, and networks that break."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import httpx
import torch
from torch import Tensor

from engine.checkpoint.format.host_image import kind_of
from engine.checkpoint.format.pieces import Part, Piece
from engine.outer.messages import StoreRefusedError
from engine.web.json_text import dump_json
from engine.weights_out.image import WeightImage
from engine.weights_out.plan import share_of
from engine.weights_out.reader import SenderConnection, WeightReader
from engine.weights_out.receiver import Target, WeightReceiver
from engine.weights_out.sender import NoticeBoard, WeightServer
from engine.weights_out.version import Geometry, OwnerRank, PublishedTensor, WeightVersion

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (301, 96), "layers.0.up.weight": (200, 600), "layers.0.down.weight": (600, 200),
    "layers.1.up.weight": (200, 600), "layers.1.scale": (600,), "head.count": (),
}  # fmt: skip
"""Tensors with several blocks of 256 KiB, with one, and with one element."""
DIMS = {"layers.0.down.weight": 1}


class KilledError(BaseException):
    """End of a process that is killed."""


def random_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Values of all tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in SHAPES.items()}


@dataclass(slots=True)
class Network:
    """Transport to the servers of this process, which breaks once ``life`` bytes of replies have passed."""

    servers: Mapping[str, WeightServer]
    life: float = float("inf")
    victim: str = ""
    """Address of the server whose replies count, and break; empty: all."""
    kills: BaseException | None = None
    """Exception for the receiver at the break; None: the sender has died, and does not answer any more."""
    passed: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of blocks by address of their server."""
    damages: int = 0
    """Replies with blocks whose last byte is changed."""
    lock: Any = field(default_factory=Lock)

    def __call__(self, url: str, token: str) -> SenderConnection:
        return SenderConnection(url, token, httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answers a request."""
        url = f"http://{request.url.host}"
        counts = self.victim in ("", url)
        if counts and self.passed >= self.life:
            self._break()
        try:
            content, status = b"".join(self.servers[url].answer(request.url.path, request.read()).parts), 200
        except StoreRefusedError as error:
            content, status = dump_json({"error": str(error)}), error.status
        with self.lock:
            if status == 200 and request.url.path.endswith("blocks"):
                self.sent[url] += len(content)
                if self.damages and counts:
                    self.damages -= 1
                    content = content[:-1] + bytes([content[-1] ^ 1])
            left = self.life - self.passed if counts else float("inf")
            self.passed += len(content) if counts else 0
        return httpx.Response(status, stream=_Stream(content, left, self._break))

    def _break(self) -> None:
        if self.kills is not None:
            raise self.kills
        raise httpx.ConnectError("the sender is dead")


@dataclass(slots=True)
class _Stream(httpx.SyncByteStream):
    content: bytes
    left: float
    cut: Callable[[], None]

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self.content), 1 << 16):
            part = self.content[start : start + (1 << 16)]
            if start + len(part) > self.left:
                yield part[: max(0, int(self.left) - start)]
                self.cut()
            yield part


class Trainer:
    """Owners of random tensors.

    Args:
        cut: rows of the owners of each tensor, by (shape, owner, owners).
        copies: each rank serves the elements of the one before it, too.
    """

    def __init__(
        self,
        owners: int = 3,
        dtype: torch.dtype = torch.float32,
        held: tuple[str, ...] = (),
        cut: Callable[[tuple[int, ...], int, int], Piece] = share_of,
        run: str = "run",
        copies: bool = False,
    ) -> None:
        self.weights = random_weights(0, dtype)
        tensors = {
            key: PublishedTensor(kind_of(value).dtype, tuple(value.shape), key not in held, ())
            for key, value in self.weights.items()
        }
        pieces = [
            {
                key: cut(tuple(value.shape), owner, owners)
                for key, value in self.weights.items()
                if key not in held and (value.dim() or not owner)
            }
            for owner in range(owners)
        ]
        urls = [f"http://owner{i}" for i in range(owners)]
        found = tuple(
            OwnerRank(urls[i], own, (urls[(i + 1) % owners],) if copies else ()) for i, own in enumerate(pieces)
        )
        self.geometry = Geometry(run, "Model", {}, tensors, found, 30.0)
        self.board = NoticeBoard(self.geometry)
        self.images = [WeightImage(own, tensors) for own in pieces]
        self.servers = {url: self.server(i, copies) for i, url in enumerate(urls)}
        self.number = 0

    def server(self, rank: int, copies: bool) -> WeightServer:
        """The server of a rank, with its elements and those of the rank before it."""
        ranks = [rank, (rank - 1) % len(self.images)] if copies else [rank]
        images = {number: self.images[number] for number in ranks}
        return WeightServer(images, self.geometry.run, board=None if rank else self.board)

    def publish(self, weights: Mapping[str, Tensor]) -> WeightVersion:
        """Publishes values as the next version."""
        self.weights, self.number = dict(weights), self.number + 1
        for image, owner in zip(self.images, self.geometry.owners, strict=True):
            with image.filling(self.number):
                for key in owner.pieces:
                    image.put(key, weights[key].reshape(-1), Part(tuple(weights[key].shape)).whole())
        version = WeightVersion(self.geometry.run, self.number, self.number - 1 or None, self.number)
        self.board.announce(version)
        return version

    def reader(self, deadline: float = 30.0, **network: Any) -> WeightReader:
        """Returns a reader over a network of its own."""
        return WeightReader("http://owner0", "", deadline, Network(self.servers, **network))


def targets(part: int, parts: int, weights: Mapping[str, Tensor] | None = None) -> dict[str, Target]:
    """Live tensors of part ``part`` of ``parts``, with their elements of ``weights``, or zeros."""
    found = {}
    for key, shape in SHAPES.items():
        piece, values = share_of(shape, part, parts, DIMS.get(key, 0)), None
        if weights is not None:
            values = part_of(weights[key], part, parts, DIMS.get(key, 0)).contiguous().clone()
        like = next(iter(weights.values())).dtype if weights is not None else torch.float32
        found[key] = Target(piece, torch.zeros(piece.elements, dtype=like) if values is None else values)
    return found


def part_of(value: Tensor, part: int, parts: int, dim: int) -> Tensor:
    """The elements of a tensor in a part."""
    if parts == 1 or not value.dim():
        return value
    size = value.shape[dim]
    return value.narrow(dim, size * part // parts, size * (part + 1) // parts - size * part // parts)


def has(live: Mapping[str, Target], weights: Mapping[str, Tensor], part: int = 0, parts: int = 1) -> bool:
    """Whether live tensors are those of ``weights``, to the bit."""
    return all(
        torch.equal(target.values.reshape(-1), part_of(weights[key], part, parts, DIMS.get(key, 0)).reshape(-1))
        for key, target in live.items()
    )


def receiver_of(reader: WeightReader, live: Mapping[str, Target], **options: Any) -> WeightReceiver:
    """A receiver of all tensors."""
    return WeightReceiver(reader, live, **options)


def breaks(count: int, least: int, most: int, seed: int) -> list[int]:
    """Bytes at which kills happen."""
    dice = random.Random(seed)
    return [dice.randint(least, most) for _ in range(count)]
