"""Sites of an outer loop in one process, one after the other, with the codecs, fragments and merges of the product.

    for each step:      every site trains; every site pushes the fragments that are due; the store merges them;
                        every site takes the merge over

All messages are encoded and decoded, so bytes are counted and losses include rounding. There is no transport. The last
step pushes every fragment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, pi

import torch
from torch import Tensor, nn

from benchmarks.outer.text import loss_of, make_model, training_rows, validation_loss
from engine.config.outer_section import OuterConfig, shared_settings
from engine.outer.codecs import DeltaCodec, encode_with_feedback, make_delta_codec
from engine.outer.fragments import divide, due
from engine.outer.messages import Content
from engine.outer.store.arithmetic import Contribution, MergeArithmetic
from engine.outer.store.placement import Flats, FlatTensors

PEAK, WARM_UP, LOWEST = 3e-3, 20, 0.1
"""Learning rate of AdamW: its largest value, the steps before it, and the fraction at the end of the cosine."""
CLIPPING = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a training by all sites."""

    loss: float
    """Validation loss of the merged weights."""
    pushed: int
    """Bytes that one site has pushed."""
    weights: Mapping[str, Tensor]


class _Site:
    """Training of one site: a model, its optimizer, and the weights from which its next differences count."""

    def __init__(self, number: int, outer: OuterConfig, steps: int) -> None:
        self.model, self._number, self._steps = make_model(), number, steps
        self.parameters = dict(self.model.named_parameters())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), PEAK, weight_decay=0.1, fused=True)
        self._anchor = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._codec, self._decay, self._residuals = _codec_of(outer), outer.feedback, dict[str, Tensor]()

    def compute_gradients(self, step: int) -> None:
        """Computes the gradients of this site's rows."""
        self._optimizer.zero_grad()
        torch.autograd.backward(loss_of(self.model, training_rows(self._number, step)))

    def update(self, step: int) -> None:
        """Clips and updates."""
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPING)
        for group in self._optimizer.param_groups:
            group["lr"] = PEAK * _rate(step, self._steps)
        self._optimizer.step()

    def push(self, content: Content, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the message of each tensor: its gradient, or anchor minus weights."""
        return {name: self._encode(name, self._values(content, name).flatten()) for name in names}

    def _encode(self, name: str, values: Tensor) -> Tensor:
        residual = self._residuals.setdefault(name, torch.zeros(values.numel()))
        return encode_with_feedback(self._codec, values, residual, self._decay)

    @torch.no_grad()
    def take_over(self, content: Content, values: Mapping[str, Tensor], sites: int) -> None:
        """Takes the merged gradients or weights over."""
        for name, merged in values.items():
            parameter = self.parameters[name]
            if content is Content.SUMS:
                parameter.grad = merged / sites
            else:
                parameter.copy_(merged)
                self._anchor[name].copy_(merged)

    @torch.no_grad()
    def _values(self, content: Content, name: str) -> Tensor:
        parameter = self.parameters[name]
        if content is Content.SUMS:
            assert parameter.grad is not None
            return parameter.grad
        return self._anchor[name].double() - parameter.double()


class _StoredFragment:
    """Weights of one fragment on the store, and their merges."""

    def __init__(self, names: Sequence[str], outer: OuterConfig, weights: Mapping[str, Tensor]) -> None:
        self.names = names
        self._tensors = FlatTensors.of(((name, tuple(weights[name].shape), 0) for name in names), 1)
        self._flats = self._tensors.empty(torch.float32)
        for name in names:
            self._tensors.view(self._flats, name).copy_(weights[name].detach())
        settings = shared_settings(outer, None, CLIPPING)
        self._arithmetic = MergeArithmetic(Content(outer.content), settings, self._tensors, ())

    def merge(self, pushes: Sequence[Mapping[str, Tensor]], codec: DeltaCodec) -> dict[str, Tensor]:
        """Merges one push of each site; returns the new version."""
        contributions = [
            Contribution(True, 1.0, 1.0, (), partial(self._decoded, messages, codec)) for messages in pushes
        ]
        self._flats = self._arithmetic.merge(self._flats, contributions)
        return {name: self._tensors.view(self._flats, name) for name in self.names}

    def _decoded(self, messages: Mapping[str, Tensor], codec: DeltaCodec, dtype: torch.dtype) -> Flats:
        flats = self._tensors.empty(dtype)
        for name, message in messages.items():
            view = self._tensors.view(flats, name)
            view.copy_(codec.decode(message, view.numel()).view_as(view))
        return flats


def train_apart(outer: OuterConfig, steps: int) -> Outcome:
    """Trains ``outer.sites`` sites for ``steps`` steps each; returns the loss of the weights after the last merge."""
    content, codec = Content(outer.content), _codec_of(outer)
    sites = [_Site(number, outer, steps) for number in range(outer.sites)]
    fragments = list(_stored(outer, sites[0].parameters))
    pushed = 0
    for step in range(1, steps + 1):
        for site in sites:
            site.compute_gradients(step)
            if content is Content.DELTAS:
                site.update(step)
        for index, fragment in enumerate(fragments):
            if step < steps and not due(step, outer.steps, len(fragments), index):
                continue
            pushes = [site.push(content, fragment.names) for site in sites]
            pushed += sum(map(len, pushes[0].values()))
            merged = fragment.merge(pushes, codec)
            for site in sites:
                site.take_over(content, merged, len(sites))
        if content is Content.SUMS:
            for site in sites:
                site.update(step)
    weights = {name: parameter.detach() for name, parameter in sites[0].parameters.items()}
    return Outcome(validation_loss(sites[0].model), pushed, weights)


def _stored(outer: OuterConfig, parameters: Mapping[str, Tensor]) -> Iterator[_StoredFragment]:
    rows = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
    for fragment in divide(rows, outer.fragments):
        yield _StoredFragment(fragment.names, outer, parameters)


def _codec_of(outer: OuterConfig) -> DeltaCodec:
    return make_delta_codec(outer.wire, density=outer.density, bits=outer.bits)


def _rate(step: int, steps: int) -> float:
    """Returns the fraction of the largest learning rate: a warm-up, then a cosine."""
    return min(1.0, step / WARM_UP) * (LOWEST + (1 - LOWEST) * (1 + cos(pi * step / steps)) / 2)
