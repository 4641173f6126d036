"""Anchors: weights from which a site counts its progress, and the errors of its encodings.

take-over   anchor = merged weights
push        difference = anchor - weights; then anchor = weights
take-over   weights = merged weights + (weights - anchor); then anchor = merged weights
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.outer.local_pieces import LocalPiece
from engine.zero.flat_buckets import FlatBucket
from engine.zero.optim.optimizer_tensors import OptimizerTensor

ANCHOR, FEEDBACK = "outer_anchor", "outer_feedback"
"""Prefixes in a checkpoint: "outer_anchor/" and the parameter's name."""


class Anchors:
    """Anchors of the weights that this rank updates, fp32, in host memory.

    Args:
        places: tensors that the optimizer updates; checkpoints store anchors by them, so that any grid loads them.
        feedback: True if encoding errors are stored too.
    """

    def __init__(self, buckets: Sequence[FlatBucket], places: Sequence[OptimizerTensor], feedback: bool) -> None:
        self._places, kinds = places, (ANCHOR, FEEDBACK) if feedback else (ANCHOR,)
        self._owned = {kind: {flat.bucket.index: torch.zeros(len(flat.weights)) for flat in buckets} for kind in kinds}
        self.filled = False
        """True once the anchors have values, from the store or from a checkpoint."""

    def of(self, piece: LocalPiece, kind: str = ANCHOR) -> Tensor:
        """Returns the view of a piece's anchor or encoding error [elements]."""
        return piece.within(self._owned[kind][piece.flat.bucket.index])

    def tensors(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Returns all anchors by updated tensor and kind; empty before the first merge."""
        if not self.filled:
            return {}
        return {place.parameter: {kind: self._view(place, kind) for kind in self._owned} for place in self._places}

    def prepare(self, stored: Mapping[str, object]) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Returns the tensors that a load fills, for the parameters that the checkpoint has."""
        self.filled = all(f"{ANCHOR}/{name}" in stored for place in self._places for name in place.names())
        for owned in self._owned.get(FEEDBACK, {}).values():
            owned.zero_()
        kinds = [kind for kind in self._owned if all(f"{kind}/{n}" in stored for p in self._places for n in p.names())]
        return {place.parameter: {kind: self._view(place, kind) for kind in kinds} for place in self._places}

    def forget(self) -> None:
        """Keeps the anchors: weights that the user has replaced count as progress of this site."""

    def _view(self, place: OptimizerTensor, kind: str) -> Tensor:
        start = place.flat.owned.start
        owned = self._owned[kind][place.flat.bucket.index]
        return owned[place.part.start - start : place.part.stop - start].view(place.parameter.shape)
