"""Receiver of published weights in a process of its own, on any cut: whole tensors of a model, or parts of tensors.

    targets    live tensors of this process, each a piece of a published one
    shadow     host memory for the tensors of which blocks are lacking; the live tensors stay as they are
    update     newest version -> shadow, all hashes hold -> decision of the group -> live tensors

A version that does not arrive in time, a damaged block or an error leave the live tensors unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor, nn

from engine.checkpoint.format.host_image import kind_of, torch_dtype
from engine.checkpoint.format.pieces import Part, Piece
from engine.errors import EngineError
from engine.outer.messages import NamedPiece
from engine.weights_out.commit import CommitGroup
from engine.weights_out.plan import share_of
from engine.weights_out.reader import Known, Shadows, WeightReader
from engine.weights_out.version import Geometry, WeightVersion


@dataclass(frozen=True, slots=True)
class Target:
    """Live tensor of a receiver."""

    piece: Piece
    """Elements of the full tensor that it contains."""
    values: Tensor
    """Tensor with these elements, in their order, on any device."""


def targets_of(model: nn.Module) -> dict[str, Target]:
    """Returns the parameters and persistent buffers of a model as whole tensors, by their keys in its state dict.

    Tied tensors occur once, under the first key.
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
    """Returns new tensors for part ``part`` of ``parts`` of all published tensors, cut into even rows.

    ``dims``: dim along which a tensor is cut, by key; 0 for the others.
    """
    found = {}
    for key, tensor in geometry.served.items():
        dim = (dims or {}).get(key, 0)
        piece, shape = share_of(tensor.shape, part, parts, dim), list(tensor.shape)
        if shape and parts > 1:
            shape[dim] = sum(stop - start for start, stop in piece.part.rows)
        found[key] = Target(piece, torch.zeros(shape, dtype=torch_dtype(tensor.kind)))
    return found


class WeightReceiver:
    """Receiver of all published tensors in the live tensors ``targets``.

    Args:
        reader: connections to the training.
        targets: live tensors, by key; every published tensor has one.
        architecture: class of the model; empty: any.
        group: receivers that take versions over together; None: this one alone.

    Raises:
        EngineError: another architecture, an unknown or a missing key, another dtype or shape; names the first one.
    """

    def __init__(
        self,
        reader: WeightReader,
        targets: Mapping[str, Target],
        architecture: str = "",
        group: CommitGroup | None = None,
    ) -> None:
        self._reader, self._group = reader, group
        geometry = reader.geometry()
        check_targets(geometry, targets, architecture)
        self._targets, self._architecture = dict(targets), architecture
        self._known: tuple[str, Known] | None = None
        """Run, and hashes of the live tensors."""
        self.version: WeightVersion | None = None
        """Version in the live tensors; None before the first one."""

    def update(self) -> WeightVersion | None:
        """Takes over the newest version; returns it, or None if there is no newer one.

        Call it between two uses of the live tensors, in every receiver of the group. It returns or raises within the
        deadline of the reader.

        Raises:
            EngineError: the version has not arrived in time, was damaged, or a receiver of the group has not got it.
                The live tensors have the old version.
        """
        until = monotonic() + self._reader.deadline
        with self._reader.leased(self.version, until) as version:
            return version if version is None else self._take(version, until)

    def _take(self, version: WeightVersion, until: float) -> WeightVersion:
        geometry = self._reader.geometry(version.run, until)
        if self._known is None or self._known[0] != version.run:
            check_targets(geometry, self._targets, self._architecture)
            self._known = None
        served = [key for key in self._targets if geometry.tensors[key].served]
        wanted = tuple(NamedPiece(key, self._targets[key].piece) for key in served)
        live = [self._targets[key].values for key in served]
        shadows = Shadows(
            wanted,
            values=lambda index: live[index].contiguous().cpu(),
            make=lambda index: torch.empty(live[index].shape, dtype=live[index].dtype).copy_(live[index]),
        )
        hashes = self._reader.fetch(version, shadows, self._known[1] if self._known is not None else None, until)
        if self._group is not None and not self._group.settle(version.name, until):
            raise EngineError(
                f"version {version.number} is dropped, because a receiver of the group has not got it within "
                f"{self._reader.deadline:g} s; give a longer deadline, or start the receiver again."
            )
        with torch.no_grad():
            for index, values in shadows.made.items():
                live[index].copy_(values)
        self.version, self._known = version, (version.run, hashes)
        return version


def follow(model: nn.Module, url: str, token: str = "", deadline: float = 30.0) -> WeightReceiver:
    """Returns a receiver that keeps a whole model of this process at the versions of a training.

    Args:
        model: the model that is trained, such as a transformers model, in the dtypes of the training's forward.
        url: address of rank 0, as ``eng.publish_weights().url`` gives it.
        token: secret of trainer and receivers; empty: none.
        deadline: seconds for one version.

    Raises:
        EngineError: the model is another one, or the trainer does not answer.
    """
    return WeightReceiver(WeightReader(url, token, deadline), targets_of(model), type(model).__name__)


def check_targets(geometry: Geometry, targets: Mapping[str, Target], architecture: str) -> None:
    """Compares a receiver with the published model.

    Raises:
        EngineError: names the first difference.
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
                f"{key!r} has {target.values.numel():,} elements in the receiver, and its part of the tensor has "
                f"{target.piece.elements:,}; allocate the tensor for its part."
            )
    for key in geometry.served:
        if key not in targets:
            raise EngineError(f"the trainer publishes {key!r}, which the receiver lacks; {again}")
