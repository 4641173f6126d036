"""Hogwild: sites of one host update weights in shared memory, without locks and without a store.

    folder/weights      fp32 values of all tensors, one after the other
    folder/tensors      names and shapes, written once by the first site, which holds a lock on it while it lives
    folder/seeded-R     empty; rank R of the first site has written its initial weights
    folder/life-N       empty; one for each join
    folder/site-N       pushes of each rank of a site, int64, and a copy of the weights, fp32; removed once all map it

The ranks of a site pull from one copy, made after the pushes of all of them, so that replicated parameters are equal.
Concurrent additions to one element may lose one of them, so two runs differ (Recht et al. 2011).
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

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

_RANKS = 4096
"""Ranks of a site of one host, at most."""


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
        self._known: dict[str, Any] = {"ranks": 0}
        """Names and shapes of the tensors, and ranks of the first site."""
        self._first: int | None = None
        """Locked descriptor of the file of names and shapes, if this site has written it."""
        self._ranks, self._merged = 1, -1
        self._pushes: Tensor | None = None
        """Pushes of each rank of this site, int64 [ranks]; None: the site has one rank."""
        self._copy: Tensor | None = None
        """Weights that all ranks of this site pull; None: the site has one rank."""
        self._moved = [0, 0]

    def join(self, request: JoinRequest) -> JoinReply:
        """Creates a file in ``outer.folder`` to register a new run of a site; the reply's ``life`` is the run's number.

        The first call for a folder also writes the model's tensor names and shapes there, and its reply asks the site
        for initial weights (``seeds`` = True).

        Raises:
            StoreRefusedError: the folder cannot be written, or its first site has ended without initial weights.
        """
        self._ranks = request.ranks
        told = json.dumps({"tensors": request.tensors, "ranks": request.ranks})
        path, life = self._folder / "tensors", 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            first = _create(path, told)
            self._first = self._first if first is None else first
            if first is None and not _is_locked(path) and not self._is_seeded(json.loads(path.read_text())):
                raise StoreRefusedError(
                    f"{self._folder} has no weights, because the site that has created it ended before it wrote them; "
                    "remove this folder, and start the sites again."
                )
            while not _touch(self._folder / f"life-{life}"):
                life += 1
        except OSError as error:
            raise StoreRefusedError(
                f"{self._folder} cannot be written ({error.strerror}); give another outer.folder.", 507
            ) from error
        return JoinReply(life=life, rows=0, clock=0, seeds=first is not None)

    def register(self, life: int, rank: int, layout: RankLayout) -> None:
        """Maps the shared weights into memory, and registers the elements that this rank pushes and pulls.

        Raises:
            StoreRefusedError: ``layout`` does not fit the first site's model.
        """
        known = json.loads((self._folder / "tensors").read_text())
        sizes = {name: tuple(shape) for name, shape in known["tensors"]}
        for each in (*layout.pushed, *layout.pulled):
            if sizes.get(each.name) != each.piece.part.shape:
                raise StoreRefusedError(
                    f"{self._folder} has weights of another model: {each.name!r} has shape "
                    f"{list(each.piece.part.shape)} here; give another outer.folder, or remove this one."
                )
        self._tensors = FlatTensors.of(((name, shape, 0) for name, shape in sizes.items()), 1)
        self._layout, self._known = layout, known
        path, (size,) = str(self._folder / "weights"), self._tensors.sizes
        self._values = torch.from_file(path, shared=True, size=size, dtype=torch.float32)
        self._merged = -1
        if rank or self._ranks > 1:
            site = torch.from_file(str(self._site(life)), shared=True, size=2 * _RANKS + size, dtype=torch.float32)
            self._pushes, self._copy = site[: 2 * _RANKS].view(torch.int64), site[2 * _RANKS :]

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
        if self._pushes is not None:
            self._pushes[rank] = meta.key.seq + 1
        return PushState.MERGED

    def offer(self, life: int, fragment: int) -> Offer | None:
        """Returns an offer of the current weights; None before the first site has written its initial weights, or
        before all ranks of this site have made the last push of this rank.

        Only rank 0 of a site calls it. Ignores ``fragment``.
        """
        if not self._is_seeded(self._known):
            return None
        if self._pushes is not None and self._copy is not None and self._values is not None:
            if bool((self._pushes[: self._ranks] <= self._merged).any()):
                return None
            self._copy.copy_(self._values)
            self._site(life).unlink(missing_ok=True)
        return Offer(version=self._merged + 1, merged=self._merged, members=1)

    def pull(self, life: int, rank: int, fragment: int, version: int) -> Tensor:
        """Returns a copy of the offered values of the elements that this rank pulls, fp32 [elements]; ignores the
        arguments.
        """
        offered = self._values if self._copy is None else self._copy
        assert offered is not None, "this rank has registered its pieces"
        found = self._tensors.cut((offered,), self._layout)
        self._moved[1] += found.nbytes
        return found

    def renew(self, life: int) -> None:
        """Does nothing, since there are no leases."""

    def leave(self, life: int) -> None:
        """Unmaps the shared weights from this process's memory; the files remain for other sites."""
        self._values = self._pushes = self._copy = None
        if self._first is not None:
            os.close(self._first)
            self._first = None

    def status(self) -> StoreStatus:
        """Returns a status with this rank's pushed and pulled bytes; the version is the count of this site's pushes."""
        return StoreStatus((self._merged + 1,), received_bytes=self._moved[0], sent_bytes=self._moved[1])

    def _site(self, life: int) -> Path:
        return self._folder / f"site-{life}"

    def _is_seeded(self, known: Mapping[str, Any]) -> bool:
        """Returns True once all ranks of the first site have written their initial weights."""
        return all((self._folder / f"seeded-{rank}").exists() for rank in range(known["ranks"]))

    def _pushed(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields shared and own values of each range that is contiguous in both, for all pushed pieces."""
        assert self._values is not None, "this rank has registered its pieces"
        sizes = [each.piece.elements for each in self._layout.pushed]
        for each, own in zip(self._layout.pushed, torch.split(values, sizes) if sizes else (), strict=True):
            start = self._tensors.places[each.name].start
            for full, local, count in zip(*(column.tolist() for column in each.piece.spans()), strict=True):
                yield self._values[start + full : start + full + count], own[local : local + count]


def _create(path: Path, text: str) -> int | None:
    """Writes a new file, which is complete and locked as soon as it exists; returns its descriptor.

    Returns None if the file exists. The kernel releases the lock when the process ends.
    """
    new = path.with_name(f"{path.name}-{token_hex(8)}")
    handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w", closefd=False) as file:
            file.write(text)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.link(new, path)
    except OSError as error:
        os.close(handle)
        if isinstance(error, FileExistsError):
            return None
        raise
    finally:
        new.unlink()
    return handle


def _is_locked(path: Path) -> bool:
    """Returns True if a process holds the lock of :func:`_create`."""
    with path.open() as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def _touch(path: Path) -> bool:
    """Creates an empty file; returns False if it exists."""
    try:
        path.touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True
