"""Publisher: versions of an engine's weights, from the images of all ranks.

publish    rank 0 decides on the number      two small all-reduces over the world, label "start"
           each rank copies its elements into its images; after a step, a thread does so until the next update
           rank 0 announces the version; receivers read it while training goes on

An image has the elements that a rank saves in checkpoints. Below ZeRO 3 another data rank has the same values, and
makes an image of them too, so that a version outlives a sender (``weights_out.copies``).
"""

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from threading import Thread
from time import monotonic, sleep

import torch
from torch import Tensor

from engine.checkpoint.contents.local_tensors import Held, ModelTensor, local_region, stored_part
from engine.checkpoint.format.host_image import torch_dtype
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.huggingface import with_dtype
from engine.checkpoint.run_state import RunState
from engine.config.outer_section import WeightsOutConfig
from engine.errors import ConfigError, EngineError, LaunchError, first_line
from engine.kernels.codecs.weight_format import dequantize
from engine.kernels.device import is_host
from engine.outer.http.open_link import read_secret
from engine.parallel.comm.agreement import all_or_none, first_rank, from_first
from engine.step.rank_parts import BackgroundReads
from engine.web.hosted import HostedApplication, run_in_thread
from engine.web.sockets import address_of, is_loopback, listen
from engine.weights_out.blocks import WeightBlocks, WeightConsumer, deliver
from engine.weights_out.image import WeightImage
from engine.weights_out.reader import WeightReader
from engine.weights_out.sender import NoticeBoard, WeightServer
from engine.weights_out.version import TOKEN_VARIABLE, Geometry, OwnerRank, PublishedTensor, WeightVersion
from engine.zero.optim.master_weights import full_weights

logger = logging.getLogger("trine")
_URL_BYTES = 256
_POLL_SECONDS = 0.01
Together = Callable[[str], AbstractContextManager[None]]
"""Function that returns a context whose error all ranks raise: ``all_or_none`` with the sentence of the others."""


class PendingVersion:
    """Handle of a published version. On rank 0, a thread passes the version to consumers, such as a folder."""

    def __init__(self, number: int, url: str, together: Together, consume: Callable[[], None] | None) -> None:
        self.number, self.url = number, url
        """Number of the version, and address of rank 0 for receivers."""
        self._together = together
        self._problem: Exception | None = None
        self._thread = Thread(target=self._run, args=(consume,), name="weights-out") if consume is not None else None
        if self._thread is not None:
            self._thread.start()

    @property
    def done(self) -> bool:
        """True once the consumers on rank 0 have taken the version over or failed; always True on other ranks."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the consumers on rank 0, such as a folder, have taken the version over.

        Does not wait for receivers, the models that read versions by themselves. All ranks call it, and all-reduce 8
        bytes, label "start".

        Raises:
            EngineError: a consumer has failed to take the version over; on all ranks.
        """
        with self._together(f"could not pass version {self.number} on"):
            if self._thread is not None:
                self._thread.join()
            if self._problem is not None:
                raise self._problem

    def _run(self, consume: Callable[[], None]) -> None:
        try:
            consume()
        except Exception as error:
            self._problem = error
            logger.warning("weights_out: version %d: %s", self.number, error)


class WeightPublisher:
    """Publisher of one engine's weights as numbered versions; each rank serves its part by HTTP.

    All ranks call the same methods in the same order.

    Args:
        run: state of this rank's engine.
        settings: section "weights_out" of the configuration.
        consumers: consumers of whole tensors, such as folders and inference servers; on rank 0 only.

    Raises:
        ConfigError: the address is open to other hosts without a token, or cannot be used.
        EngineError: another rank cannot serve.
    """

    def __init__(self, run: RunState, settings: WeightsOutConfig, consumers: Sequence[WeightConsumer] = ()) -> None:
        self._run, self._settings, self._rank = run, settings, run.comm.grid.rank
        self._served = ExitStack()
        with all_or_none(run.comm, run.device):
            self._token = read_secret(settings.token_file, TOKEN_VARIABLE, "weights_out.token_file")
            if not self._token and not is_loopback(settings.host):
                raise ConfigError(
                    f"weights_out.host: {settings.host} lets other hosts connect, and they may read weights only with "
                    f"a token; set the environment variable {TOKEN_VARIABLE} or the key weights_out.token_file, or "
                    "leave weights_out.host out."
                )
            port = settings.port + self._rank if settings.port else 0
            try:
                listening = self._served.enter_context(listen(settings.host, port, "weights_out"))
            except LaunchError as error:
                cause = first_line(error.__cause__ or error)
                raise ConfigError(
                    f"weights_out: port {port} of {settings.host} cannot be served ({cause}); give an address of this "
                    "host and a free port, or leave weights_out.port out."
                ) from error
        ranks, self._geometry = make_geometry(run, settings, address_of(listening))
        self._reader = WeightReader(self.url, self._token, settings.deadline)
        owners = enumerate(zip(ranks, self._geometry.owners, strict=True))
        images = {
            number: WeightImage(owner.pieces, self._geometry.tensors)
            for number, (held, owner) in owners
            if self._rank in held
        }
        self._images = list(images.values())
        self._own = [tensor for tensor in run.tensors if any(tensor.key in image.owned for image in self._images)]
        self._board = NoticeBoard(self._geometry) if self._rank == 0 else None
        server = WeightServer(images, self._geometry.run, self._token, self._board)
        self._served.enter_context(run_in_thread(HostedApplication(server, listening, lambda: None), "weights-out"))
        self._consumers = consumers
        reads = run.runtime.parts.find(BackgroundReads)
        assert reads is not None, "an engine with weights_out has the part"
        self._reads = reads
        self._memory: list[tuple[int, int]] | None = None
        self._held: Mapping[str, Held] = {}
        self.copied = 0
        """Bytes that the threads of calls and steps have copied."""
        self._number = max((each.last for each in consumers), default=0)
        self._base: int | None = None
        self._pending: PendingVersion | None = None

    @property
    def url(self) -> str:
        """Address of rank 0's server, from which receivers learn about versions and the other ranks."""
        return self._geometry.owners[0].url

    @property
    def image_bytes(self) -> int:
        """Bytes of host memory that this rank uses for copies of the published weights."""
        return sum(image.size for image in self._images)

    def close(self) -> None:
        """Stops this rank's server. Receivers continue with the last version that they have taken over."""
        self._reads.wait()
        self._served.close()
        self._reader.close()

    def after_step(self, made: bool) -> None:
        """Publishes a version after every ``settings.every`` updates, unless the last version is still being read.

        All ranks call it after each step.

        Args:
            made: True if the step has made an update.
        """
        every, done = self._settings.every, self._run.trainer_state.update.made
        if made and every and done % every == 0:
            self.publish(waits=False)

    @torch.no_grad()
    def publish(self, waits: bool = True) -> PendingVersion | None:
        """Copies this rank's part of the weights to host memory, and offers it as the next version. All ranks call it.

        Returns a handle, or None if ``waits`` is False and a receiver still reads the last version.

        Args:
            waits: True to wait until receivers have read the last version, at most ``settings.deadline`` seconds.
                False: no wait; a thread may copy weights in host memory after the return, and the next update waits for
                this thread.
        """
        self._check_buffers()
        told = from_first(lambda: self._begin(waits), self._run.comm, self._run.device)
        if not told:
            return None
        number, base = json.loads(told)
        version = WeightVersion(self._geometry.run, number, base, self._run.trainer_state.update.made)
        if waits:  # a step has waited before its update
            with all_or_none(self._run.comm, self._run.device):
                self._reads.join()
        with self._run.runtime.saving(), ExitStack() as filling:
            for image in self._images:
                filling.enter_context(image.filling(number))
            later = [each for each in self._values(self._takes_frozen()) if not self._put(each, waits)]
            rest = filling.pop_all()
        self._number, self._base, self._reads.changed = number, number, False
        offer = partial(self._offer, version, later, rest)
        if later:
            self._reads.start(offer)
        else:
            offer()
        consume = partial(self._consume, version) if self._consumers else None
        self._pending = PendingVersion(
            number, self.url, partial(all_or_none, self._run.comm, self._run.device), consume
        )
        return self._pending

    def _put(self, held: tuple[str, Tensor, Piece, bool], waits: bool) -> bool:
        """Copies a tensor into all images that have it, or returns False if a thread can do it later."""
        key, values, piece, stays = held
        if stays and not waits and self._run.config.outer is None and is_host(values.device):
            return False  # a merge of the outer loop would change weights before the next update
        for image in self._images:
            if key in image.owned:
                image.put(key, values, piece)
                self.copied += image.owned[key].elements * values.element_size()
        return True

    @torch.no_grad()
    def _offer(self, version: WeightVersion, later: Sequence[tuple[str, Tensor, Piece, bool]], rest: ExitStack) -> None:
        """Copies the tensors that are left, completes the images, and announces the version."""
        with rest:
            for key, values, piece, _ in later:
                for image in self._images:
                    if key in image.owned:
                        image.put(key, values, piece)
        if self._board is not None:
            self._board.announce(version)

    def _begin(self, waits: bool) -> bytes:
        """Returns the numbers of the next and of the last version as JSON, on rank 0; nothing while one is read."""
        assert self._board is not None, "rank 0 has the board"
        until = monotonic() + self._settings.deadline
        while (self._pending is not None and not self._pending.done) or not self._board.begin():
            if not waits:
                return b""
            if monotonic() >= until:
                self._board.withdraw()
                break
            sleep(_POLL_SECONDS)
        return json.dumps([self._number + 1, self._base]).encode()

    def _consume(self, version: WeightVersion) -> None:
        """Passes a version to all consumers, or to none."""
        until = monotonic() + self._settings.deadline
        self._reads.wait()  # the version is announced by then
        with self._reader.leased(None, until):
            deliver(WeightBlocks(self._reader, version, until), self._consumers)

    def _check_buffers(self) -> None:
        """Raises on all ranks if a buffer has another shape than receivers know.

        One all-reduce of 8 bytes over the world if the model has persistent buffers, label "start".
        """
        if all(tensor.row is not None for tensor in self._run.tensors):
            return
        with all_or_none(self._run.comm, self._run.device, "refused to publish its buffers, so no rank publishes"):
            live = dict(self._run.model.named_buffers())
            for tensor in self._own:
                buffer, known = live.get(tensor.name.partition("/")[2]), tensor.kind.shape
                if tensor.row is None and (buffer is None or tuple(buffer.shape) != known):
                    given = "is no buffer any more" if buffer is None else f"has shape {list(buffer.shape)}"
                    raise EngineError(
                        f"buffer {tensor.key!r} {given}, but receivers have memory for its shape at the start, "
                        f"{list(known)}; keep the shapes of persistent buffers, or make a new engine."
                    )

    def _takes_frozen(self) -> bool:
        """Returns True if this version needs frozen weights anew: the first one, and one after a load or a change by
        hand. With ``settings.frozen``, all-reduces 8 bytes over the world, label "start".
        """
        changed = self._reads.changed or self._base is None
        return self._settings.frozen and first_rank(changed, self._run.comm, self._run.device, "start") is not None

    def _values(self, frozen: bool) -> Iterator[tuple[str, Tensor, Piece, bool]]:
        """Yields the tensors that this rank copies into its images: key, values, the elements among them, and True if
        nothing but an update changes them.

        ``frozen``: True for frozen weights too. All-gathers buckets of quantized ones over dp, label "full state".
        """
        weights, run = self._weights(), self._run
        for tensor in self._own:
            if tensor.row is None:
                yield tensor.key, run.buffers[tensor.name].reshape(-1), Part(tensor.kind.shape).whole(), False
            elif tensor.row.trainable or (tensor.row.quantized is None and frozen):
                held = weights[tensor.name]
                yield tensor.key, held.values, held.own, True
        if frozen:
            yield from self._decoded({tensor.name: tensor for tensor in self._own})

    def _weights(self) -> Mapping[str, Held]:
        """Returns the parameters in this rank's memory by name; on the host, until their memory is another."""
        memory = [(state.tensor.data_ptr(), state.tensor.numel()) for state in self._run.runtime.inventory.weights()]
        if memory != self._memory or not is_host(self._run.device):  # a view would keep offloaded memory of a device
            found = self._run.local_tensors.weights(copies=True)
            self._memory, self._held = memory, {held.tensor: held for held in found}
        return self._held

    def _decoded(self, own: Mapping[str, ModelTensor]) -> Iterator[tuple[str, Tensor, Piece, bool]]:
        """Yields quantized weights, decoded one tensor at a time."""
        run, holder = self._run, self._run.comm.grid.holder()
        rows = {row.name: row for row in run.runtime.plan.table if row.quantized is not None}
        live = dict(run.model.named_parameters())
        coded = [flat for flat in run.runtime.frozen if any(slot.name in rows for slot in flat.bucket.slots)]
        placed = {slot.name for flat in coded for slot in flat.bucket.slots}
        outside = ((name, live[name].detach()) for name in rows if name not in placed)
        for name, codes in chain(full_weights(coded, run.comm), outside):
            tensor, form = own.get(f"param/{name}"), rows[name].quantized_shape(holder) if name in rows else None
            if tensor is not None and form is not None:
                values = dequantize(codes, form, torch_dtype(tensor.kind))
                yield tensor.key, values.reshape(-1), local_region(rows[name], holder).whole(), False


def owned_pieces(run: RunState, settings: WeightsOutConfig, rank: int) -> dict[str, Piece]:
    """Returns the elements that ``rank`` serves to receivers, by tensor key.

    They are the elements that ``rank`` saves in checkpoints, without frozen tensors unless ``settings.frozen``.
    Quantized tensors are instead divided into nearly equal parts among the ranks that shard them.
    """
    ownership, found = run.ownership, dict[str, Piece]()
    grid, coord = ownership.grid, ownership.grid.coord(rank)
    for tensor in run.tensors:
        piece, row = None, tensor.row
        if row is None:
            piece = Part(tensor.kind.shape).whole() if tensor.owner == rank else None
        elif row.quantized is None:
            piece = ownership.stored(row, coord) if row.trainable or settings.frozen else None
        elif settings.frozen and coord.pp == row.owners[0] and ownership.stores(row, coord):
            # codes are sharded by their bytes, so values are divided anew
            line = (grid.expert_spread if row.experts else grid.spread).sharding
            part, index, count = stored_part(row, grid.holder(coord)), grid.index(line, rank), grid.size(line)
            if part is not None:
                piece = Piece(part, part.elements * index // count, part.elements * (index + 1) // count)
        if piece is not None:
            found[tensor.key] = piece
    return found


def copy_rank(run: RunState, tensor: ModelTensor, rank: int) -> int | None:
    """Returns another rank that can serve the same values of ``tensor`` as ``rank``; None if there is none."""
    row, grid = tensor.row, run.ownership.grid
    if row is None or row.quantized is not None or run.runtime.gatherer is not None:
        return None
    peers = grid.peers(grid.expert_spread.copies if row.experts else grid.copies, rank)
    other = peers[(peers.index(rank) + 1) % len(peers)]
    return other if other != rank else None


def make_owners(
    run: RunState, settings: WeightsOutConfig, urls: Sequence[str]
) -> Iterator[tuple[list[int], OwnerRank]]:
    """Yields (ranks, owner) for each set of elements that receivers download. ``owner``: elements, and address of the
    rank that serves them.

    ``ranks``: the serving rank, and if ``settings.copies`` > 1 maybe a second one with the same elements. Owners are in
    the order of their first ranks.

    Args:
        urls: address of each rank.
    """
    tensors = {tensor.key: tensor for tensor in run.tensors}
    for rank, url in enumerate(urls):
        divided: dict[int | None, dict[str, Piece]] = {None: {}}
        for key, piece in owned_pieces(run, settings, rank).items():
            other = copy_rank(run, tensors[key], rank) if settings.copies > 1 else None
            divided.setdefault(other, {})[key] = piece
        for other, pieces in divided.items():
            if other is not None:
                yield [rank, other], OwnerRank(url, pieces, (urls[other],))
            elif pieces or len(divided) == 1:
                yield [rank], OwnerRank(url, pieces)


def make_geometry(run: RunState, settings: WeightsOutConfig, url: str) -> tuple[list[list[int]], Geometry]:
    """Returns (ranks, geometry). The geometry lists all tensors, and owners: sets of elements with the address that
    serves them. ``ranks``: for each owner, the ranks that have its elements.

    All-gathers the addresses (traffic label "start"); the result is equal on all ranks.

    Args:
        url: address of this rank.
    """
    comm = run.comm
    urls = torch.zeros(comm.grid.world_size, _URL_BYTES, dtype=torch.uint8)
    urls[comm.grid.rank, : len(url)] = torch.tensor(list(url.encode()), dtype=torch.uint8)
    urls = urls.to(run.device)
    comm.all_gather(urls.view(-1), urls[comm.grid.rank].clone(), "world", "start").wait()
    name = from_first(lambda: secrets.token_hex(8).encode(), comm, run.device).decode()
    addresses = [bytes(line.tolist()).rstrip(b"\0").decode() for line in urls.cpu()]
    served = list(make_owners(run, settings, addresses))
    return [ranks for ranks, _ in served], Geometry(
        run=name,
        architecture=type(run.model).__name__,
        files={file: data.decode() for file, data in with_dtype(run.model_files, run.dtype()).items()},
        tensors={
            tensor.key: PublishedTensor(
                dtype=tensor.kind.dtype,
                shape=tensor.kind.shape,
                served=tensor.row is None or tensor.row.trainable or settings.frozen,
                aliases=tuple(run.keys[tensor.name][1:]),
                parts=tensor.parts,
            )
            for tensor in run.tensors
        },
        owners=tuple(owner for _, owner in served),
        deadline=settings.deadline,
    )
