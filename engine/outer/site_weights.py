"""Weights and gradients of one rank as the bodies that it pushes and pulls.

Differences are counted from an anchor:

    take-over   anchor = merged weights
    push        difference = anchor - weights; then anchor = weights
    take-over   weights = merged weights + (weights - anchor); then anchor = merged weights
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engine.config.outer_section import OuterConfig
from engine.outer.codecs import encode_with_feedback, make_delta_codec
from engine.outer.local_pieces import LocalPiece, LocalPieces, UntrainedState
from engine.outer.pulled_weights import PulledWeights
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.optim.master_weights import sync_masters
from engine.zero.optim.optimizer_tensors import OptimizerTensor
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

ANCHOR, FEEDBACK = "outer_anchor", "outer_feedback"
"""Prefixes in a checkpoint: "outer_anchor/" and the parameter's name."""


class Anchors:
    """Reference values (anchors) of the weights that this rank updates, fp32 in host memory.

    An anchor is the weight at the site's last push or, if a merged value was taken over later, this merged value. A
    site pushes anchor minus weight.

    Args:
        buckets: flat buckets of the weights; each is one tensor for many parameters.
        places: tensors that the optimizer updates; checkpoints store anchors under the names of these tensors'
            parameters.
        feedback: True to also store encoding errors, for error feedback.
    """

    def __init__(self, buckets: Sequence[FlatBucket], places: Sequence[OptimizerTensor], feedback: bool) -> None:
        self._places, kinds = places, (ANCHOR, FEEDBACK) if feedback else (ANCHOR,)
        self._owned = {kind: {flat.bucket.index: torch.zeros(len(flat.weights)) for flat in buckets} for kind in kinds}
        self.filled = False
        """True once the anchors have values, from the store or from a checkpoint."""

    def of(self, piece: LocalPiece, kind: str = ANCHOR) -> Tensor:
        """Returns a view of the anchors (reference weights) of ``piece``, fp32 [elements].

        If ``kind`` is ``FEEDBACK``, returns a view of its encoding errors instead.
        """
        return piece.within(self._owned[kind][piece.flat.bucket.index])

    def tensors(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Returns the anchors and encoding errors by parameter, and by kind: "outer_anchor" or "outer_feedback".

        The result is empty before the first join.
        """
        if not self.filled:
            return {}
        return {place.parameter: {kind: self._view(place, kind) for kind in self._owned} for place in self._places}

    def prepare(self, stored: Mapping[str, object]) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Returns views into which a checkpoint's anchors and encoding errors can be loaded, by parameter and kind.

        If the checkpoint lacks a kind (anchors or encoding errors) for any tensor, leaves the kind out for all tensors.
        Sets all encoding errors to zero first.

        Args:
            stored: mapping with the names in the checkpoint as keys, such as "outer_anchor/" and a parameter's name.
        """
        self.filled = all(f"{ANCHOR}/{name}" in stored for place in self._places for name in place.names())
        for owned in self._owned.get(FEEDBACK, {}).values():
            owned.zero_()
        kinds = [kind for kind in self._owned if all(f"{kind}/{n}" in stored for p in self._places for n in p.names())]
        return {place.parameter: {kind: self._view(place, kind) for kind in kinds} for place in self._places}

    def forget(self) -> None:
        """Does nothing when the user replaces weights: anchors stay, and the next push contains the change."""

    def _view(self, place: OptimizerTensor, kind: str) -> Tensor:
        start = place.flat.owned.start
        owned = self._owned[kind][place.flat.bucket.index]
        return owned[place.part.start - start : place.part.stop - start].view(place.parameter.shape)


class SiteWeights:
    """Conversion between this rank's weights or gradients and its messages to and from the stores.

    Args:
        local: tensor pieces that this rank updates.
        outer: configuration of the exchange between sites.
        optimizer: optimizer of this rank.
        gatherer: object that all-gathers sharded parameters; None below ZeRO 3.
        untrained: frozen parameters and buffers, for a check that all sites have equal ones.
    """

    def __init__(
        self, local: LocalPieces, outer: OuterConfig, optimizer: ShardedOptimizer,
        gatherer: ParameterGatherer | None, untrained: UntrainedState,
    ) -> None:  # fmt: skip
        self.untrained = untrained
        self.local, self._outer, self._optimizer, self._gatherer = local, outer, optimizer, gatherer
        self._codec = make_delta_codec(outer.wire, density=outer.density, bits=outer.bits)
        deltas = outer.content == "deltas"
        flats = {piece.flat.bucket.index: piece.flat for piece in local.pieces}
        self._lengths = {index: len(flat.weights) for index, flat in flats.items()}
        places = optimizer.places if deltas else ()
        self.anchors = Anchors([*flats.values()] if deltas else [], places, outer.feedback > 0)
        self._deltas = deltas

    @property
    def rates(self) -> tuple[float, ...]:
        """Current learning rate of each parameter group of the optimizer."""
        return tuple(float(group["lr"]) for group in self._optimizer.inner.param_groups)

    def seed(self, fragment: int) -> Tensor:
        """Returns the current weights that this rank pushes for ``fragment``: bytes of fp32 values, uint8 [bytes]."""
        parts = [piece.chosen(piece.weights.detach()).float().cpu() for piece in self._pushed(fragment)]
        return torch.cat(parts).view(torch.uint8) if parts else torch.empty(0, dtype=torch.uint8)

    def gradients(self, fragment: int, scale: float) -> Tensor:
        """Returns the gradients that this rank pushes for ``fragment``, divided by ``scale`` and then encoded, uint8
        [bytes].
        """
        own = self._pushed(fragment)
        for flat in {id(piece.flat): piece.flat for piece in own if piece.flat.host_sums is not None}.values():
            self._optimizer.copies.wait(flat)
        values = [piece.chosen(piece.gradient.detach()).float().cpu() for piece in own]
        return _joined([self._codec.encode(each if scale == 1.0 else each / scale) for each in values])

    @torch.no_grad()
    def differences(self, fragment: int) -> Tensor:
        """Returns anchor (see :class:`Anchors`) minus weight for the elements of ``fragment`` that this rank pushes,
        encoded, uint8 [bytes].

        Then sets this rank's anchors of the fragment to the current weights.
        """
        for flat in self.local.buckets(fragment):
            sync_masters(flat)
        body = list[Tensor]()
        for piece in self.local.of(fragment):
            weights = piece.weights.detach().cpu()
            if piece.pushed is not None:
                body.append(self._encode(piece, weights))
            self.anchors.of(piece).copy_(weights)
        return _joined(body)

    @torch.no_grad()
    def write(self, fragment: int, body: Tensor, alone: bool = False) -> None:
        """Updates this rank's weights of ``fragment`` with ``body``, their merged values from the store, fp32
        [elements].

        If sites push weight differences, also sets the anchor to ``body``. All-gathers parameters, label "parameters".

        Args:
            alone: True: the new weights are ``body``. False: they are body + (weight - anchor) if ``outer.mixing`` is
                None, else m * weight + (1 - m) * body, where m is ``outer.mixing``; for the anchor, see
                :class:`Anchors`.
        """
        mixing = self._outer.mixing
        for flat in self.local.buckets(fragment):
            sync_masters(flat)
        for piece, merged in self.local.pulled(fragment, body):
            weights = piece.weights
            if alone:
                weights.copy_(merged)
            elif mixing is None:
                progress = weights.detach().cpu().double() - self.anchors.of(piece).double()
                weights.copy_(merged.double() + progress)
            else:
                weights.copy_(mixing * weights.detach().cpu().double() + (1 - mixing) * merged.double())
            if self._deltas:
                self.anchors.of(piece).copy_(merged)
        self._optimizer.refresh(self.local.buckets(fragment))
        if self._gatherer is not None:
            self._gatherer.forget()

    def use_weights(self, bodies: Mapping[int, Tensor]) -> None:
        """Passes new weights from the store to the optimizer; its next ``step`` copies them over the parameters.

        Args:
            bodies: new weights of this rank's elements by fragment, fp32 [elements].
        """
        inner = self._optimizer.inner
        assert isinstance(inner, PulledWeights), "a site of a server has no optimizer of its own"
        owned = {index: torch.empty(length) for index, length in self._lengths.items()}
        for fragment, body in bodies.items():
            for piece, values in self.local.pulled(fragment, body):
                piece.within(owned[piece.flat.bucket.index]).copy_(values)
        inner.give(self._optimizer.places, owned)

    @torch.no_grad()
    def use_sums(self, bodies: Mapping[int, Tensor]) -> frozenset[str]:
        """Overwrites this rank's gradients with sums of gradients over all training sites.

        Returns the names of the tensors with a non-zero sum on this rank.

        Args:
            bodies: sums for this rank's elements by fragment, fp32 [elements].
        """
        used = set[str]()
        for fragment, body in bodies.items():
            for piece, values in self.local.pulled(fragment, body):
                piece.gradient.copy_(values)
                if values.any():
                    used.add(piece.name)
                if piece.flat.host_sums is not None:  # the norm reads the device's gradients
                    piece.flat.gradient(piece.part).copy_(values)
                    self._optimizer.copies.changed(piece.flat)
        return frozenset(used)

    def _pushed(self, fragment: int) -> list[LocalPiece]:
        return [piece for piece in self.local.of(fragment) if piece.pushed is not None]

    def _encode(self, piece: LocalPiece, weights: Tensor) -> Tensor:
        """Returns the encoded difference of the elements that this rank pushes; stores its encoding error."""
        delta = piece.chosen(self.anchors.of(piece)).double() - piece.chosen(weights).double()
        if not self._outer.feedback:
            return self._codec.encode(delta)
        error = self.anchors.of(piece, FEEDBACK)
        own = piece.chosen(error).clone()
        message = encode_with_feedback(self._codec, delta, own, self._outer.feedback)
        piece.put(error, own)
        return message


def _joined(messages: Sequence[Tensor]) -> Tensor:
    return torch.cat([*messages]) if messages else torch.empty(0, dtype=torch.uint8)
