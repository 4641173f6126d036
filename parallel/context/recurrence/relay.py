"""State of a recurrence on its way from rank to rank: messages with gradients, in one order on all ranks.

A message is an exchange in which one rank sends to others. All ranks call it, in forward and in backward. Its node of
autograd also passes a token, a scalar that all later messages and all results read, so that the backward of a rank
without a use of the message joins too, in the reversed order.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from engine.parallel.tensor.collectives import refuse_second_derivatives
from engine.parallel.tensor.tp_axis import TensorAxis

RECURRENT_STATE = "state"
"""Label of messages with the state of a recurrence."""


class Relay:
    """Sender of tensors, such as the state of a recurrence, between the ranks of ``axis`` in one forward.

    Backward sends their gradients back, in reversed order.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self.token: Tensor | None = None
        """Token of the last message with a gradient; None: no message."""
        self.writes = 0
        """Number of writes in place into tensors on one rank; a copy of such a tensor is valid until the next one."""
        self._joined: Any = WeakIdKeyDictionary()

    def clear(self) -> None:
        """Forgets all messages; call it at the end of each forward."""
        self.token = None
        self._joined.clear()

    def join(self, local: Tensor) -> None:
        """Connects ``local``, the shard of a tensor of which a rank gets a slice, to all later messages in autograd.

        The backward of the other ranks so reaches the collectives that made the tensor.
        """
        if torch.is_grad_enabled() and local.requires_grad and not self._axis.dry and local not in self._joined:
            self._joined[local] = True
            self.token = _Join.apply(self._entered(local.device), local)  # type: ignore[no-untyped-call]

    def send(self, local: Tensor, source: int, targets: tuple[int, ...], label: str, device: torch.device) -> Tensor:
        """Sends ``local`` from rank ``source`` to the ranks ``targets``; all ranks call it.

        Returns the sent values on these ranks and ``source``, elsewhere a tensor without elements; all on ``device``.
        ``local`` has equal shape, dtype and ``requires_grad`` on all ranks.
        """
        axis = self._axis
        size = local.numel() * local.element_size()
        there = tuple(rank for rank in targets if rank != source)
        ranks = range(axis.size)
        axis.expect_rows(label, tuple(size * len(there) * (rank == source) for rank in ranks), local)
        sent = _Sent(axis, source, there, label, torch.Size(local.shape), local.dtype)
        given = local if axis.index == source else None
        if not (local.requires_grad and torch.is_grad_enabled()):
            return sent.forward(given, device)
        made: Tensor
        made, token = _Send.apply(given, self._entered(device), sent)  # type: ignore[no-untyped-call]
        if axis.dry:  # backward always reaches the message; a token that another unit reads would end the trace
            axis.expect_rows(label, tuple(size * (rank in there) for rank in ranks), local, torch.empty(0))
        else:
            self.token = token
        return made

    def tie(self, local: Tensor, graded: bool, in_place: bool = False) -> Tensor:
        """Returns ``local``, connected in autograd to all messages sent so far, so that every rank's backward joins
        them.

        ``graded``: True to attach a graph even if no message has been sent. ``in_place``: True to attach the graph to
        ``local`` itself.
        """
        if not torch.is_grad_enabled() or not (graded or self.token is not None):
            return local
        if in_place and self._axis.dry:  # a run on shapes does not follow custom functions that write in place
            return local + self._entered(local.device).to(local.dtype)
        tie = _TieInPlace if in_place else _Tie
        made: Tensor = tie.apply(local, self._entered(local.device))  # type: ignore[no-untyped-call]
        return made

    def _entered(self, device: torch.device) -> Tensor:
        return torch.zeros((), device=device, requires_grad=True) if self.token is None else self.token


class _Sent:
    """Message of a tensor from ``source`` to ``targets``."""

    def __init__(
        self,
        axis: TensorAxis,
        source: int,
        targets: tuple[int, ...],
        label: str,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        self.axis, self.source, self.targets, self.label = axis, source, targets, label
        self.shape, self.dtype = shape, dtype

    def _elements(self) -> tuple[list[int], list[int]]:
        """Returns the elements that this rank gives to each rank, and those that it gets; backward swaps both."""
        own, count = self.axis.index, self.shape.numel()
        gives = [count * (own == self.source and rank in self.targets) for rank in range(self.axis.size)]
        return gives, [count * (own in self.targets and rank == self.source) for rank in range(self.axis.size)]

    def forward(self, given: Tensor | None, device: torch.device) -> Tensor:
        own, (gives, gets) = self.axis.index, self._elements()
        flat = torch.empty(0, dtype=self.dtype, device=device) if given is None else given.detach().reshape(-1)
        received = self.axis.exchange(
            flat.repeat(len(self.targets)) if given is not None else flat, gives, gets, self.label
        )
        if own in self.targets:
            return received.view(self.shape)
        return given.detach().clone() if given is not None else received

    def backward(self, grad: Tensor | None, device: torch.device) -> Tensor | None:
        own, (gets, gives) = self.axis.index, self._elements()
        flat = torch.zeros(sum(gives), dtype=self.dtype, device=device)
        if grad is not None and own in self.targets:
            flat = grad.to(self.dtype).reshape(-1).contiguous()
        received = self.axis.exchange(flat, gives, gets, self.label)
        if own != self.source:
            return None
        total = received.view(len(self.targets), *self.shape).sum(0)
        return total if grad is None or grad.shape != self.shape else total + grad


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor | None, token: Tensor, sent: _Sent) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.sent, ctx.device = sent, token.device
        ctx.save_for_backward(token.new_empty(0))  # read in backward, so that all ranks recompute before they exchange
        return sent.forward(local, token.device), token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, Tensor, None]:
        refuse_second_derivatives("cp")
        _ = ctx.saved_tensors
        return ctx.sent.backward(grad, ctx.device), torch.zeros((), device=ctx.device), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, local: Tensor) -> Tensor:
        ctx.like = local.shape, local.dtype, local.device
        ctx.save_for_backward(token.new_empty(0))
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _ = ctx.saved_tensors
        shape, dtype, device = ctx.like
        return torch.zeros_like(grad), torch.zeros(shape, dtype=dtype, device=device)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, token: Tensor) -> Tensor:
        ctx.device = token.device
        ctx.save_for_backward(token.new_empty(0))
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _ = ctx.saved_tensors
        return grad, torch.zeros((), device=ctx.device)


class _TieInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, token: Tensor) -> Tensor:
        ctx.device = token.device
        ctx.mark_dirty(local)
        return local

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros((), device=ctx.device)
