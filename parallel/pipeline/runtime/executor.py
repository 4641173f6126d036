"""Executor of one rank's row of actions: receive, compute, send, release.

The partition alone, not the kind of schedule, defines the messages of an action:

    F of stage s    values from earlier stages  ->  compute  ->  values for later stages
    B of stage s    their gradients, summed     ->  compute  ->  gradients of the received values
    I of stage s    as B, but W computes the weight gradients that can be deferred
    W of stage s                                    compute the gradients that I has deferred

Receives are posted some actions ahead, so that a transfer overlaps with earlier actions. Between the actions of a
microbatch only edges of the autograd graph are stored: a sent tensor is released when the send completes, a received
one when its gradient is computed.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.parallel.comm.backend import Flow
from engine.parallel.comm.flight.recorder import FlightRecorder
from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.runtime.transport import Arrival, Message, Transport
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.simulate import RECEIVES_AHEAD, Span, releases
from engine.parallel.trace.model_trace import Value


class RankSchedule(NamedTuple):
    """Actions of one pipeline rank in order, with the earlier sends to wait for before each action."""

    actions: tuple[Action, ...]
    passes: tuple[Action, ...]
    """Actions that run modules of a stage and need its parameters."""
    releases: tuple[tuple[int, ...], ...]
    """For each action, positions of earlier actions with sent tensors that are released just before it."""
    beside: Mapping[Action, Action] = MappingProxyType({})
    """Deferred weight gradient (W) of another microbatch that may run during the collectives of an action."""


def rank_schedule(schedule: Schedule, rank: int) -> RankSchedule:
    """Returns the actions of pipeline rank ``rank`` in ``schedule``, in order."""
    waits = releases(schedule)[rank]
    return RankSchedule(schedule.per_rank[rank], schedule.passes(rank), waits, schedule.weights_beside(rank))


class StageMicrobatch(NamedTuple):
    """Plan of one stage for one microbatch, with the descriptions of all values (tensors of the recorded forward)."""

    plan: StagePlan
    values: Sequence[Value]
    """All values of the trace, indexed by the numbers in the plan."""


class StageOutput(NamedTuple):
    """Result of the forward of one stage for one microbatch: tensors to send, and on the last stage the loss."""

    sent: Mapping[int, Tensor]
    """Tensors for other stages by value number, attached to the autograd graph."""
    root: Tensor | None
    """Tensor from which backward starts: the loss on the last stage, None on other stages."""


class StageRunner(Protocol):
    """Interface by which the executor computes forward, backward and weight gradients of this rank's stages."""

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        """Returns the plan of ``stage`` for ``microbatch``."""

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        """Computes the forward of ``stage`` for ``microbatch``; returns the tensors to send and the loss.

        ``received``: leaf tensors from earlier stages, by number of the tensor in the recorded forward.
        """

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Returns a context for the backward of ``action``, in which parameter gradients accumulate.

        An input-gradient action (I) defers weight gradients to :meth:`weights`.
        """

    def weights(self, stage: int, microbatch: int) -> None:
        """Computes the deferred weight gradients of ``stage`` and ``microbatch``."""

    def beside(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Returns a context that fills waits for collectives with the weight gradients of ``stage`` and ``microbatch``.

        :meth:`weights` computes the weight gradients that are still deferred.
        """


@dataclass(slots=True)
class _Live:
    """State of a microbatch between its forward and its backward."""

    leaves: dict[int, Tensor] = field(default_factory=dict)
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    root: Tensor | None = None


class Executor:
    """Runner of the pipeline actions of one rank in schedule order, with their sends and receives.

    F is a forward, B a whole backward, I the input gradient and W the weight gradients of a split backward. The
    executor stores a microbatch of a stage in these states:

    state     begins with         ends with    content
    posted    post of receives    F, B or I    buffers of the receives
    live      F                   B or I       leaves, autograd edges of sent values, loss
    split     I                   W            deferred weight gradients
    """

    def __init__(self, transport: Transport, recorder: FlightRecorder | None = None) -> None:
        self._transport, self._recorder = transport, recorder
        self._live: dict[tuple[int, int], _Live] = {}
        self._split: set[tuple[int, int]] = set()
        """(stage, microbatch) pairs between I and W."""
        self._posted: dict[Action, tuple[StageMicrobatch, dict[Message, Arrival]]] = {}
        """Actions with posted receives, with the functions that wait for them."""
        self._crosses = False
        """True if the row has sent or received values."""
        self.spans: list[Span] = []
        """Start and end of each action in the last row, in seconds of ``time.perf_counter``, without waits for
        messages.

        The end is that of the host: a GPU may still compute the action.
        """

    @property
    def live(self) -> int:
        """Number of (stage, microbatch) pairs on this rank between their forward and the end of their backward."""
        return len(self._live) + len(self._split)

    def apart(self) -> "Executor":
        """Returns a second executor over the same transport, with its own live microbatches."""
        return Executor(self._transport, self._recorder)

    def run(self, row: RankSchedule, runner: StageRunner) -> None:
        """Runs all actions of ``row``, this rank's schedule; ``runner`` computes them."""
        try:
            self._play(row, runner, range(len(row.actions)))
        finally:
            self._forget()

    def run_part(self, row: RankSchedule, runner: StageRunner, part: range) -> None:
        """Runs the actions of ``row`` at the positions ``part``; ``runner`` computes them.

        Live microbatches remain stored for a later call. Each message must be sent and received in the same part, on
        all ranks.
        """
        try:
            self._play(row, runner, part)
        except BaseException:
            self._forget()
            raise

    def _play(self, row: RankSchedule, runner: StageRunner, part: range) -> None:
        self.spans = []
        for index in part:
            action = row.actions[index]
            # a peer's send may complete only after this rank has posted the receive. Both ranks could wait forever if
            # this rank waited first: so it posts for this action and RECEIVES_AHEAD more before it waits for sends
            for soon in row.actions[index : min(index + 1 + RECEIVES_AHEAD, part.stop)]:
                self.post(soon, runner)
            for earlier in row.releases[index]:
                self._release(row.actions[earlier])
            self.do(action, runner, row.beside.get(action))
        if self._crosses:
            self._transport.finish()

    def _forget(self) -> None:
        self._live.clear()
        self._split.clear()
        self._posted.clear()

    def post(self, action: Action, runner: StageRunner) -> None:
        """Posts the receives that ``action`` needs from other stages, unless they are already posted."""
        if action in self._posted:
            return
        part = runner.part(action.stage, action.microbatch)
        self._crosses = self._crosses or bool(part.plan.sends or part.plan.receives)
        arrivals = {
            message: self._transport.receive(message, value.shape, value.dtype, exact=not value.grad)
            for message in _arrivals(action, part)
            for value in [part.values[message.value]]
        }
        self._posted[action] = part, arrivals

    def do(self, action: Action, runner: StageRunner, beside: Action | None = None) -> None:
        """Runs ``action``: waits for its receives, computes by ``runner``, and sends the results.

        ``beside``: weight-gradient action to compute during the collectives of ``action``.
        """
        self.post(action, runner)
        part, arrivals = self._posted.pop(action)
        arrived = {message: arrive() for message, arrive in arrivals.items()}
        started = time.perf_counter()
        seen = self._recorder.act(_WORDS[action.op], action.stage, action.microbatch) if self._recorder else 0
        with _named(action), runner.beside(beside.stage, beside.microbatch) if beside else nullcontext():
            if action.op is Op.FORWARD:
                self._forward(action, part, arrived, runner)
            elif action.op is Op.BACKWARD_WEIGHT:
                self._split.remove((action.stage, action.microbatch))
                runner.weights(action.stage, action.microbatch)
            else:
                self._backward(action, part, arrived, runner)
        if self._recorder is not None:
            self._recorder.acted(seen)
        self.spans.append(Span(action, started, time.perf_counter()))

    def _release(self, action: Action) -> None:
        flow: Flow = "forward" if action.op is Op.FORWARD else "backward"
        self._transport.release(flow, action.stage, action.microbatch)

    def _forward(
        self, action: Action, part: StageMicrobatch, arrived: Mapping[Message, Tensor], runner: StageRunner
    ) -> None:
        leaves = {
            message.value: self._laid_out(tensor, part.values[message.value]) for message, tensor in arrived.items()
        }
        training = torch.is_grad_enabled()
        for number, leaf in leaves.items():
            leaf.requires_grad_(training and part.values[number].grad)
        done = runner.forward(action.stage, action.microbatch, leaves)
        live = _Live(root=done.root)
        for number, stages in part.plan.sends.items():
            tensor = done.sent[number]
            for stage in stages:
                message = Message("forward", number, action.microbatch, action.stage, stage)
                self._transport.send(message, tensor, exact=not part.values[number].grad)
            if tensor.requires_grad:
                # the edge, not the tensor, so that the memory of the tensor is free after the send
                live.edges[number] = get_gradient_edge(tensor)
        if training:
            live.leaves = leaves
            self._live[action.stage, action.microbatch] = live
            return
        # no backward will read the received tensors
        for leaf in leaves.values():
            self._transport.recycle(leaf)

    def _backward(
        self, action: Action, part: StageMicrobatch, arrived: Mapping[Message, Tensor], runner: StageRunner
    ) -> None:
        live = self._live.pop((action.stage, action.microbatch))
        if action.op is Op.BACKWARD_INPUT:
            self._split.add((action.stage, action.microbatch))
        grads: dict[int, Tensor] = {}
        for message, grad in arrived.items():
            # the gradient of a value proves that the receiver has the value: the sent tensor can be released
            self._transport.delivered(
                Message("forward", message.value, message.microbatch, action.stage, message.source)
            )
            # out of place: a gradient from a stage of this rank may share memory with a send or a deferred tensor
            grads[message.value] = grads[message.value] + grad if message.value in grads else grad
        with runner.backward(action):
            _backward(live, grads)
        for number, stage in part.plan.receives.items():
            leaf = live.leaves.pop(number)
            if part.values[number].grad:
                # the sender waits for a gradient of every value: zeros if the loss does not depend on it
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                message = Message("backward", number, action.microbatch, action.stage, stage)
                self._transport.send(message, grad, exact=False)
            leaf.grad = None
            self._transport.recycle(leaf)
        for grad in arrived.values():
            self._transport.recycle(grad)

    def _laid_out(self, tensor: Tensor, value: Value) -> Tensor:
        """Returns the tensor with the strides of the sender, as views of permuted tensors and kernels may require."""
        if tensor.stride() == value.stride:
            return tensor
        laid = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=tensor.device).copy_(tensor)
        self._transport.recycle(tensor)
        return laid


_WORDS: Mapping[Op, str] = MappingProxyType(
    {
        Op.FORWARD: "forward",
        Op.BACKWARD: "backward",
        Op.BACKWARD_INPUT: "backward of the input",
        Op.BACKWARD_WEIGHT: "weight gradients",
    }
)


def _named(action: Action) -> AbstractContextManager[Any]:
    """Labels the action with its token, as in drawings of the schedule, while a profiler runs."""
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
    """Returns the messages that ``action`` waits for, in the common order of sender and receiver."""
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
