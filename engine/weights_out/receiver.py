"""Receiver of published weights in a process of its own, on any cut: whole tensors of a model, or parts of tensors.

    targets    live tensors of this process, each a piece of a published one
    shadow     host memory for the tensors of which blocks are lacking; the live tensors stay as they are
    update     newest version -> shadow, all hashes hold -> decision of the group -> live tensors

A version that does not arrive in time, a damaged block or an error leave the live tensors unchanged.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor, nn

from engine.checkpoint.format.host_image import kind_of, torch_dtype
from engine.checkpoint.format.pieces import Part, Piece
from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.parallel.model.side_effects import overwrite
from engine.web.hosted import HostedApplication, run_in_thread
from engine.web.sockets import address_of, is_loopback, listen
from engine.weights_out.commit import CommitGroup
from engine.weights_out.image import WeightImage
from engine.weights_out.plan import share_of
from engine.weights_out.reader import Known, WeightReader
from engine.weights_out.sender import WeightServer
from engine.weights_out.transfer import Shadows
from engine.weights_out.version import Geometry, OwnerRank, WantedPiece, WeightVersion


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of published values: a receiver's tensor, with its position in the full tensor."""

    piece: Piece
    """Elements of the full tensor that it contains."""
    values: Tensor
    """Tensor with these elements, in their order, on any device."""


def targets_of(model: nn.Module) -> dict[str, Target]:
    """Returns the parameters and persistent buffers of ``model`` as targets for published weights, by state dict key.

    Each target shares the memory of its tensor. Tied tensors occur once, under their first key.
    """
    found: dict[str, Target] = {}
    seen: set[int] = set()
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[key] = Target(Part(tuple(value.shape)).whole(), value.detach())
    return found


def empty_targets(
    geometry: Geometry, part: int, parts: int, dims: Mapping[str, int] | None = None
) -> dict[str, Target]:
    """Returns new host tensors, by key, for part ``part`` of ``parts`` of every published tensor.

    Each tensor is cut into ``parts`` nearly equal ranges along one dimension.

    Args:
        dims: dimension along which each tensor is cut, by key; 0 for other keys.
    """
    found = {}
    for key, tensor in geometry.served.items():
        dim = (dims or {}).get(key, 0)
        piece, shape = share_of(tensor.shape, part, parts, dim), list(tensor.shape)
        if shape and parts > 1:
            shape[dim] = sum(stop - start for start, stop in piece.part.rows)
        found[key] = Target(piece, torch.zeros(shape, dtype=torch_dtype(tensor.kind)))
    return found


class PeerServer:
    """HTTP server of a receiver, from which other receivers read the parts of a version that it has.

    Args:
        url: address of this server for other receivers.
        geometry: descriptions of the published tensors.
        targets: tensors of this receiver, by key.
        token: secret that the training and its receivers share; empty: none.
    """

    def __init__(self, url: str, geometry: Geometry, targets: Mapping[str, Target], token: str = "") -> None:
        pieces = {key: targets[key].piece for key in geometry.served}
        self.rank, self.image = OwnerRank(url, pieces), WeightImage(pieces, geometry.tensors, filled=False)
        self.server = WeightServer({0: self.image}, "", token)
        self._running = ExitStack()

    @classmethod
    def start(cls, host: str, geometry: Geometry, targets: Mapping[str, Target], token: str = "") -> "PeerServer":
        """Starts a server in a thread at a free port of ``host``, and returns it.

        Raises:
            EngineError: other hosts can reach ``host``, but there is no token.
            LaunchError: ``host`` is no address of this host.
        """
        if not token and not is_loopback(host):
            raise EngineError(
                f"a receiver that serves at {host} without a token would give the weights to anyone; give it the token "
                "of the trainer, or an address of this host only."
            )
        listening = listen(host, 0, "the receiver")
        made = cls(address_of(listening), geometry, targets, token)
        made._running.enter_context(listening)
        made._running.enter_context(
            run_in_thread(HostedApplication(made.server, listening, lambda: None), "weights-out")
        )
        return made

    def begin(self, version: WeightVersion) -> None:
        """Ends serving of the current version, and begins ``version``; each tensor is served once it is received."""
        self.server.run = version.run
        self.image.begin(version.number)

    def close(self) -> None:
        """Stops the server."""
        self._running.close()


class WeightReceiver:
    """Receiver that updates this process's tensors, ``targets``, to the newest weights of a training run.

    Args:
        reader: connections to the training.
        targets: tensors to update, by key of the trained model's state dict; every published tensor must have one.
        architecture: class name that the trained model must have; empty: not checked.
        group: receivers that take over each version together or not at all; None: this receiver alone.

    Raises:
        EngineError: architecture, keys, dtypes or shapes differ from the published model; names the first difference.
    """

    def __init__(
        self,
        reader: WeightReader,
        targets: Mapping[str, Target],
        architecture: str = "",
        group: CommitGroup | None = None,
    ) -> None:
        self._reader, self._group = reader, group
        self._peer: PeerServer | None = None
        geometry = reader.geometry()
        check_targets(geometry, targets, architecture)
        self._targets, self._architecture = dict(targets), architecture
        self._known: tuple[str, tuple[OwnerRank, ...], Known] | None = None
        """Run, earlier receivers, and the hashes of the live tensors that belong to both."""
        self.version: WeightVersion | None = None
        """Version in the live tensors; None before the first one."""

    def serve(self, peer: PeerServer) -> None:
        """Makes ``peer`` serve this receiver's tensors to later receivers, until ``close``."""
        self._peer = peer

    def close(self) -> None:
        """Closes the connections and the server of ``serve``; the targets do not change."""
        self._reader.close()
        if self._peer is not None:
            self._peer.close()

    def update(self) -> WeightVersion | None:
        """Copies the newest version into the targets and returns it.

        Returns None if the targets have it already, or if no version is published.

        Call it while nothing uses the targets. Receivers that update as a group must all call it.

        Raises:
            EngineError: the version was late or damaged, or another receiver of the group lacks it. The targets then
                have the old version.
        """
        until = monotonic() + self._reader.deadline
        peer = self._peer.rank if self._peer is not None else None
        with self._reader.leased(self.version, until, peer) as version:
            return version if version is None else self._take(version, until)

    def _take(self, version: WeightVersion, until: float) -> WeightVersion:
        geometry = self._reader.geometry(version.run, until)
        if self._known is None or self._known[0] != version.run:
            check_targets(geometry, self._targets, self._architecture)
            self._known = None
        live = {key: self._targets[key].values for key in self._targets if geometry.tensors[key].served}

        def own(key: str) -> Tensor:
            return live[key].contiguous().cpu()

        shadows = Shadows(
            tuple(WantedPiece(key, self._targets[key].piece) for key in live),
            values=own,
            make=lambda key: torch.empty(live[key].shape, dtype=live[key].dtype).copy_(live[key]),
        )
        if (peer := self._peer) is not None:
            peer.begin(version)
            shadows.ready = lambda key: peer.image.share(key, shadows.made[key] if key in shadows.made else own(key))
        peers, known = self._reader.peers, self._known
        same = known is not None and known[:2] == (version.run, peers)
        hashes = self._reader.fetch(version, shadows, known[2] if known is not None and same else None, until)
        if self._group is not None and not self._group.settle(version.name, until):
            raise EngineError(
                f"version {version.number} of the weights is dropped, because not all {self._group.members} receivers "
                f"of the CommitGroup got it within {self._reader.deadline:g} s; restart receivers that have ended and "
                "call update() again in all, or pass a longer deadline to WeightReader."
            )
        with torch.no_grad():
            for key, values in shadows.made.items():
                overwrite(live[key], values)
                if peer is not None and live[key].is_contiguous() and is_host(live[key].device):
                    peer.image.share(key, live[key])  # so the shadow ends
        self.version, self._known = version, (version.run, peers, hashes)
        return version


def follow(model: nn.Module, url: str, token: str = "", deadline: float = 30.0, serve: str = "") -> WeightReceiver:
    """Returns a receiver that copies published weights of a training run into ``model`` when its ``update`` is called.

    Args:
        model: whole model of the trained class, such as a transformers model. Its parameters have the dtypes of the
            training's parameters in a forward, such as bf16.
        url: address of rank 0, as ``eng.publish_weights().url`` gives it.
        token: secret that the training and its receivers share; empty: none.
        deadline: seconds for reading one version.
        serve: address of this host at which later receivers can read the received parts; empty: they cannot.

    Raises:
        EngineError: the model differs from the published one, or the training does not answer.
    """
    reader, targets = WeightReader(url, token, deadline), targets_of(model)
    made = WeightReceiver(reader, targets, type(model).__name__)
    if serve:
        made.serve(PeerServer.start(serve, reader.geometry(), targets, token))
    return made


def check_targets(geometry: Geometry, targets: Mapping[str, Target], architecture: str) -> None:
    """Checks that a receiver's ``targets`` fit the published model: architecture, keys, dtypes and shapes.

    Raises:
        EngineError: something differs; the message names the first difference.
    """
    theirs, again = geometry.tensors, "build the receiver for the model that is trained."
    if architecture and geometry.architecture != architecture:
        raise EngineError(f"the trainer has {geometry.architecture}, and the receiver {architecture}; {again}")
    for key, target in targets.items():
        if key not in theirs:
            raise EngineError(f"the receiver has {key!r}, which the trainer does not publish; {again}")
        own = kind_of(target.values, target.piece.part.shape)
        if own != theirs[key].kind:
            raise EngineError(
                f"{key!r} is {theirs[key].dtype} {list(theirs[key].shape)} in the trainer and {own.dtype} "
                f"{list(own.shape)} in the receiver; {again}"
            )
        if target.values.numel() != target.piece.elements:
            raise EngineError(
                f"the receiver's target {key!r} has {target.values.numel():,} elements in Target.values, but "
                f"Target.piece describes {target.piece.elements:,}; allocate Target.values with "
                f"{target.piece.elements:,} elements."
            )
    for key in geometry.served:
        if key not in targets:
            raise EngineError(f"the trainer publishes {key!r}, which the receiver lacks; {again}")
