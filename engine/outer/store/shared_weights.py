"""Hogwild: sites of one host update weights in shared memory, without locks and without a store.

    folder/weights      fp32 values of all tensors, one after the other
    folder/tensors      names and shapes, written once by the first site
    folder/seeded-R     empty; rank R of the first site has written its initial weights
    folder/life-N       empty; one for each join

Concurrent additions to one element may lose one of them, so two runs differ (Recht et al. 2011).
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine.config.outer_section import OuterConfig
from engine.errors import ConfigError
from engine.outer.codecs import make_delta_codec
from engine.outer.messages import (
    JoinReply,
    JoinRequest,
    Offer,
    PushMeta,
    PushShare,
    PushState,
    RankLayout,
    StoreRefusedError,
    StoreStatus,
)
from engine.outer.store.placement import FlatTensors


class SharedWeights:
    """Weights that all sites of one host update in a memory-mapped file without locks (Hogwild).

    Implements :class:`StoreLink` for one rank.

    Raises:
        ConfigError: ``outer.folder``, for the memory-mapped file, is not set.
    """

    outage = ""
    """Empty: memory answers."""

    def __init__(self, outer: OuterConfig) -> None:
        if outer.folder is None:
            raise ConfigError("outer.folder: missing; give a folder that all sites share, such as /dev/shm/my-run.")
        self._folder = Path(outer.folder)
        self._codec = make_delta_codec("fp32")
        self._tensors = FlatTensors.of((), 1)
        self._layout = RankLayout((), ())
        self._values: Tensor | None = None
        self._seeders = 0
        self._merged = -1
        self._moved = [0, 0]

    def join(self, request: JoinRequest) -> JoinReply:
        """Creates a file in ``outer.folder`` to register a new run of a site; the reply's ``life`` is the run's number.

        The first call for a folder also writes the model's tensor names and shapes there, and its reply asks the site
        for initial weights (``seeds`` = True).
        """
        told = json.dumps({"tensors": request.tensors, "ranks": request.ranks})
        path, life = self._folder / "tensors", 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            mine = _create(path, told)
            while not _create(self._folder / f"life-{life}", ""):
                life += 1
        except OSError as error:
            raise StoreRefusedError(
                f"{self._folder} cannot be written ({error.strerror}); give another outer.folder.", 507
            ) from error
        return JoinReply(life=life, rows=0, clock=0, seeds=mine)

    def register(self, life: int, rank: int, layout: RankLayout) -> None:
        """Maps the shared weights into memory, and registers the elements that this rank pushes and pulls.

        Waits until the first site has written the model's tensor names and shapes to ``outer.folder``. Ignores
        ``life``.

        Raises:
            StoreRefusedError: ``layout`` does not fit the first site's model.
        """
        while not (text := (self._folder / "tensors").read_text()):  # the first site is writing it
            time.sleep(0.001)
        known = json.loads(text)
        sizes = {name: tuple(shape) for name, shape in known["tensors"]}
        for each in (*layout.pushed, *layout.pulled):
            if sizes.get(each.name) != each.piece.part.shape:
                raise StoreRefusedError(
                    f"{self._folder} has weights of another model: {each.name!r} has shape "
                    f"{list(each.piece.part.shape)} here; give another outer.folder, or remove this one."
                )
        self._tensors = FlatTensors.of(((name, shape, 0) for name, shape in sizes.items()), 1)
        self._layout, self._seeders = layout, known["ranks"]
        path, (size,) = str(self._folder / "weights"), self._tensors.sizes
        self._values = torch.from_file(path, shared=True, size=size, dtype=torch.float32)

    def seed(self, life: int, rank: int, fragment: int, body: Tensor) -> None:
        """Writes this rank's initial weights to the shared weights; ignores ``life`` and ``fragment``.

        ``body``: bytes of fp32 values, uint8 [bytes].
        """
        for shared, own in self._pushed(body.view(torch.float32)):
            shared.copy_(own)
        (self._folder / f"seeded-{rank}").touch()

    def push(self, meta: PushMeta, rank: int, share: PushShare, body: Tensor) -> PushState:
        """Subtracts the weight differences in ``body`` from the shared weights in place.

        ``body``: bytes of fp32 values, uint8 [bytes]. Returns ``PushState.MERGED``.
        """
        values = self._codec.decode(body, body.numel() // 4).float()
        for shared, own in self._pushed(values):
            shared.sub_(own)
        self._merged, self._moved[0] = meta.key.seq, self._moved[0] + body.nbytes
        return PushState.MERGED

    def offer(self, life: int, fragment: int) -> Offer | None:
        """Returns an offer of the current weights; None before the first site has written its initial weights.

        Ignores ``life`` and ``fragment``.
        """
        if not all((self._folder / f"seeded-{rank}").exists() for rank in range(self._seeders)):
            return None
        return Offer(version=self._merged + 1, merged=self._merged, members=1)

    def pull(self, life: int, rank: int, fragment: int, version: int) -> Tensor:
        """Returns a copy of the current values of the elements that this rank pulls, fp32 [elements]; ignores the
        arguments.
        """
        assert self._values is not None, "this rank has registered its pieces"
        found = self._tensors.cut((self._values,), self._layout)
        self._moved[1] += found.nbytes
        return found

    def renew(self, life: int) -> None:
        """Does nothing, since there are no leases."""

    def leave(self, life: int) -> None:
        """Unmaps the shared weights from this process's memory; the files remain for other sites."""
        self._values = None

    def status(self) -> StoreStatus:
        """Returns a status with this rank's pushed and pulled bytes; the version is the count of this site's pushes."""
        return StoreStatus((self._merged + 1,), received_bytes=self._moved[0], sent_bytes=self._moved[1])

    def _pushed(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields shared and own values of each range that is contiguous in both, for all pushed pieces."""
        assert self._values is not None, "this rank has registered its pieces"
        sizes = [each.piece.elements for each in self._layout.pushed]
        for each, own in zip(self._layout.pushed, torch.split(values, sizes) if sizes else (), strict=True):
            start = self._tensors.places[each.name].start
            for full, local, count in zip(*(column.tolist() for column in each.piece.spans()), strict=True):
                yield self._values[start + full : start + full + count], own[local : local + count]


def _create(path: Path, text: str) -> bool:
    """Writes a new file; returns False if it exists."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(handle, "w") as file:
        file.write(text)
    return True
