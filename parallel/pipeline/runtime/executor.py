"""Plays a row of actions: receive, compute, send, let go. It knows neither the schedule's name nor the optimizer.

What is received before an action and sent after it follows from the cut alone:

    F of stage s    values from earlier stages  ->  compute  ->  values that later stages want
    B of stage s    their gradients, summed     ->  compute  ->  gradients of what was received
    I of stage s    the same, but the gradients of weights that can wait are left for W
    W of stage s                                    compute what I has left

Receives are offered some actions ahead, so that a message travels while the actions before it compute. Of a
microbatch only the edges of the autograd graph are held between its actions: what was sent is let go as soon
as it has left, what was received as soon as its gradient is known.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.parallel.comm.backend import Flow
from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.runtime.transport import Arrival, Message, Transport
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.send_completion import RECEIVES_AHEAD, releases
from engine.parallel.pipeline.schedule.simulate import Span
from engine.parallel.trace.model_trace import Value


class RankSchedule(NamedTuple):
    """What one rank does in a step."""

    actions: tuple[Action, ...]
    passes: tuple[Action, ...]
    """Those that go through the modules of a stage, and so need its parameters."""
    releases: tuple[tuple[int, ...], ...]
    """Before each action, which earlier ones have sent what is let go now."""


def rank_schedule(schedule: Schedule, rank: int) -> RankSchedule:
    """The row of one rank."""
    return RankSchedule(schedule.per_rank[rank], schedule.passes(rank), releases(schedule)[rank])


class StageMicrobatch(NamedTuple):
    """One stage of one microbatch: what it computes and what it exchanges."""

    plan: StagePlan
    values: Sequence[Value]
    """Of the timeline; the plan speaks of them by number."""


class StageOutput(NamedTuple):
    """What a forward gives."""

    sent: Mapping[int, Tensor]
    """Values that other stages want, attached to the graph."""
    root: Tensor | None
    """What backward starts from: the loss of the last stage, None elsewhere."""


class StageRunner(Protocol):
    """One step of this rank's stages."""

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        """What ``stage`` does for ``microbatch``."""

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        """Compute; ``received`` are leaves of the graph."""

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Around the backward of a stage: collects the gradients of its parameters; in an I leaves what can wait."""

    def weights(self, stage: int, microbatch: int) -> None:
        """Compute the gradients that the I of this stage and microbatch has left."""


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
        self._left: set[tuple[int, int]] = set()
        """Stages and microbatches between I and W."""
        self._posted: dict[Action, tuple[StageMicrobatch, dict[Message, Arrival]]] = {}
        self.spans: list[Span] = []
        """When each action of the last row began and ended, in seconds of ``time.perf_counter``, waits for messages
        left out. A GPU may still be at work when an action has ended here."""

    @property
    def live(self) -> int:
        """Microbatches of stages whose forward is done and whose backward is not."""
        return len(self._live) + len(self._left)

    def run(self, row: RankSchedule, job: StageRunner) -> None:
        """Play a whole row. Whatever is raised leaves nothing behind on this rank."""
        self.spans = []
        try:
            for index, action in enumerate(row.actions):
                for soon in row.actions[index : index + 1 + RECEIVES_AHEAD]:
                    self.post(soon, job)
                for earlier in row.releases[index]:
                    self._release(row.actions[earlier])
                self.do(action, job)
            self._transport.finish()
        finally:
            self._live.clear()
            self._left.clear()
            self._posted.clear()

    def post(self, action: Action, job: StageRunner) -> None:
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

    def do(self, action: Action, job: StageRunner) -> None:
        """Play one action."""
        self.post(action, job)
        part, arrivals = self._posted.pop(action)
        arrived = {message: arrive() for message, arrive in arrivals.items()}
        started = time.perf_counter()
        with _named(action):
            if action.op is Op.FORWARD:
                self._forward(action, part, arrived, job)
            elif action.op is Op.BACKWARD_WEIGHT:
                self._left.remove((action.stage, action.microbatch))
                job.weights(action.stage, action.microbatch)
            else:
                self._backward(action, part, arrived, job)
        self.spans.append(Span(action, started, time.perf_counter()))

    def _release(self, action: Action) -> None:
        flow: Flow = "forward" if action.op is Op.FORWARD else "backward"
        self._transport.release(flow, action.stage, action.microbatch)

    def _forward(
        self, action: Action, part: StageMicrobatch, arrived: Mapping[Message, Tensor], job: StageRunner
    ) -> None:
        leaves = {
            message.value: self._laid_out(tensor, part.values[message.value]) for message, tensor in arrived.items()
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
            live.leaves = leaves
            self._live[action.stage, action.microbatch] = live
            return
        for leaf in leaves.values():
            self._transport.recycle(leaf)

    def _backward(
        self, action: Action, part: StageMicrobatch, arrived: Mapping[Message, Tensor], job: StageRunner
    ) -> None:
        live = self._live.pop((action.stage, action.microbatch))
        if action.op is Op.BACKWARD_INPUT:
            self._left.add((action.stage, action.microbatch))
        grads: dict[int, Tensor] = {}
        for message, grad in arrived.items():
            self._transport.delivered(
                Message("forward", message.value, message.microbatch, action.stage, message.source)
            )
            # a gradient from a stage of this rank may share its memory with what that stage has sent, or left to its W
            grads[message.value] = grads[message.value] + grad if message.value in grads else grad
        with job.backward(action):
            _backward(live, grads)
        for number, stage in part.plan.receives.items():
            leaf = live.leaves.pop(number)
            if part.values[number].grad:
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._transport.send(Message("backward", number, action.microbatch, action.stage, stage), grad)
            leaf.grad = None
            self._transport.recycle(leaf)
        for grad in arrived.values():
            self._transport.recycle(grad)

    def _laid_out(self, tensor: Tensor, value: Value) -> Tensor:
        """In the strides of the sender's tensor, which code (a view of a permuted tensor) and kernels may rely on."""
        if tensor.stride() == value.stride:
            return tensor
        laid = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=tensor.device).copy_(tensor)
        self._transport.recycle(tensor)
        return laid


def _named(action: Action) -> AbstractContextManager[Any]:
    """In a profile the action has its token for a name, as in the drawings of the schedule."""
    watched = torch._C._autograd._profiler_enabled()
    return torch.profiler.record_function(str(action)) if watched else nullcontext()


def _backward(live: _Live, grads: Mapping[int, Tensor]) -> None:
    roots: list[Any] = [live.edges[number] for number in grads if number in live.edges]
    seeds: list[Tensor | None] = [grad for number, grad in grads.items() if number in live.edges]
    if live.root is not None:
        roots.append(live.root)
        seeds.append(None)
    live.edges.clear()
    live.root = None
    if roots:
        torch.autograd.backward(roots, seeds)


def _arrivals(action: Action, part: StageMicrobatch) -> list[Message]:
    """The messages that ``action`` waits for, in the order in which both ends go through them."""
    if action.op is Op.FORWARD:
        return [
            Message("forward", number, action.microbatch, source, action.stage)
            for number, source in part.plan.receives.items()
        ]
    if action.op is Op.BACKWARD_WEIGHT:
        return []
    return [
        Message("backward", number, action.microbatch, stage, action.stage)
        for number, stages in part.plan.sends.items()
        for stage in stages
        if part.values[number].grad
    ]
