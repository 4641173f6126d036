"""Plays a row of actions: receive, compute, send, let go. It knows neither the schedule's name nor the optimizer.

What is received before an action and sent after it follows from the cut alone:

    forward of stage s     values from earlier stages  ->  compute  ->  values that later stages want
    backward of stage s    their gradients, summed     ->  compute  ->  gradients of what was received

Receives are offered one action ahead, so that a message travels while the action before it computes. Of a
microbatch only the edges of the autograd graph are held between its two actions: what was sent is let go
as soon as it has left, what was received as soon as its gradient is known.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.parallel.pipeline.schedule import Action, Op
from engine.parallel.pipeline.stageplan import StagePlan
from engine.parallel.pipeline.timeline import Value
from engine.parallel.pipeline.transport import Arrival, Message, Transport

_SETTLED_AFTER = 2
"""What was sent after an action is waited for when the next one is done: ``check`` proves that a neighbour has
offered to take it before that one began."""


class Part(NamedTuple):
    """One stage of one microbatch: what it computes and what it exchanges."""

    plan: StagePlan
    values: Sequence[Value]
    """Of the timeline; the plan speaks of them by number."""


class Forward(NamedTuple):
    """What a forward gives."""

    sent: Mapping[int, Tensor]
    """Values that other stages want, attached to the graph."""
    root: Tensor | None
    """What backward starts from: the loss of the last stage, None elsewhere."""


class Job(Protocol):
    """One step of this rank's stages."""

    def part(self, stage: int, microbatch: int) -> Part:
        """What ``stage`` does for ``microbatch``."""

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> Forward:
        """Compute; ``received`` are leaves of the graph."""

    def backward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Around the backward of a stage: collects the gradients of its parameters."""


@dataclass(slots=True)
class _Live:
    """What a microbatch leaves between its forward and its backward."""

    leaves: dict[int, Tensor] = field(default_factory=dict)
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    root: Tensor | None = None


class Executor:
    """Plays actions of one rank, in the order in which they are given to it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._live: dict[tuple[int, int], _Live] = {}
        self._posted: dict[Action, tuple[Part, dict[Message, Arrival]]] = {}

    @property
    def live(self) -> int:
        """Microbatches of stages whose forward is done and whose backward is not."""
        return len(self._live)

    def run(self, row: Sequence[Action], job: Job) -> None:
        """Play a whole row. Whatever is raised leaves nothing behind on this rank."""
        try:
            for index, action in enumerate(row):
                for soon in row[index : index + 2]:
                    self.post(soon, job)
                self.do(action, job)
                self._transport.settle(_SETTLED_AFTER)
            self._transport.finish()
        finally:
            self._live.clear()
            self._posted.clear()

    def post(self, action: Action, job: Job) -> None:
        """Offer to receive what ``action`` needs from other stages; once."""
        if action in self._posted:
            return
        part = job.part(action.stage, action.microbatch)
        arrivals = {
            message: self._transport.receive(message, value.shape, value.dtype)
            for message in _arrivals(action, part)
            for value in [part.values[message.value]]
        }
        self._posted[action] = part, arrivals

    def do(self, action: Action, job: Job) -> None:
        """Play one action."""
        self.post(action, job)
        play = self._forward if action.op is Op.FORWARD else self._backward
        play(action, *self._posted.pop(action), job)

    def _forward(self, action: Action, part: Part, arrivals: Mapping[Message, Arrival], job: Job) -> None:
        leaves = {
            message.value: _laid_out(arrive(), part.values[message.value]) for message, arrive in arrivals.items()
        }
        training = torch.is_grad_enabled()
        for number, leaf in leaves.items():
            leaf.requires_grad_(training and part.values[number].grad)
        done = job.forward(action.stage, action.microbatch, leaves)
        live = _Live(root=done.root)
        for number, stages in part.plan.sends.items():
            tensor = done.sent[number]
            for stage in stages:
                self._transport.send(Message("forward", number, action.microbatch, action.stage, stage), tensor)
            if tensor.requires_grad:
                live.edges[number] = get_gradient_edge(tensor)
        if training:
            live.leaves = {number: leaf for number, leaf in leaves.items() if leaf.requires_grad}
            self._live[action.stage, action.microbatch] = live

    def _backward(self, action: Action, part: Part, arrivals: Mapping[Message, Arrival], job: Job) -> None:
        live = self._live.pop((action.stage, action.microbatch))
        grads: dict[int, Tensor] = {}
        for message, arrive in arrivals.items():
            grad = arrive()
            self._transport.delivered(
                Message("forward", message.value, message.microbatch, action.stage, message.source)
            )
            grads[message.value] = grads[message.value].add_(grad) if message.value in grads else grad
        with job.backward(action.stage, action.microbatch):
            _backward(live, grads)
        for number, stage in part.plan.receives.items():
            if part.values[number].grad:
                leaf = live.leaves.pop(number)
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._transport.send(Message("backward", number, action.microbatch, action.stage, stage), grad)


def _laid_out(tensor: Tensor, value: Value) -> Tensor:
    """In the strides of the sender's tensor, which code (a view of a permuted tensor) and kernels may rely on."""
    if tensor.stride() == value.stride:
        return tensor
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=tensor.device).copy_(tensor)


def _backward(live: _Live, grads: Mapping[int, Tensor]) -> None:
    roots: list[Any] = [live.edges[number] for number in grads if number in live.edges]
    seeds: list[Tensor | None] = [grad for number, grad in grads.items() if number in live.edges]
    if live.root is not None:
        roots.append(live.root)
        seeds.append(None)
    if roots:
        torch.autograd.backward(roots, seeds)


def _arrivals(action: Action, part: Part) -> list[Message]:
    """The messages that ``action`` waits for, in the order in which both ends go through them."""
    if action.op is Op.FORWARD:
        return [
            Message("forward", number, action.microbatch, source, action.stage)
            for number, source in part.plan.receives.items()
        ]
    return [
        Message("backward", number, action.microbatch, stage, action.stage)
        for number, stages in part.plan.sends.items()
        for stage in stages
        if part.values[number].grad
    ]
