"""Dispatch of rows to the ranks of their experts, and their way back: an exchange that gradients pass through.

A row is sent once to each rank that has at least one of its experts, and one sum comes back from each. No row is
dropped. Rows are exchanged in rounds, in which a rank gets at most ``limit`` rows from each other one, so that the
memory of a layer is bounded for any routing. The host waits for the device once, for the table of counts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.parallel.comm.comm import Comm
from engine.parallel.tensor.collectives import refuse_second_derivatives

AXIS = "ep"
DISPATCH, COMBINE, ROUTING = "dispatch", "combine", "routing"


class Round(NamedTuple):
    """One all-to-all of token rows: the rows that this rank sends, and the number of rows to and from each rank."""

    gives: tuple[int, ...]
    """Number of rows to each rank."""
    gets: tuple[int, ...]
    """Number of rows from each rank."""
    rows: Tensor
    """Indices of the rows of :class:`Dispatch` that this rank sends, in the order of the receiving ranks."""


class Dispatch:
    """Plan that sends this rank's tokens to the ranks of their experts, each token once per rank.

    The constructor all-gathers row counts over axis "ep".

    Args:
        numbers: indices of the k experts of each of T tokens [T, k]; -1: no expert.
        bounds: index of the first expert of each rank, followed by the number of experts.
        limit: maximum number of rows from one rank to another in one all-to-all; more rows are sent in several
            all-to-alls. None: twice as many rows as even routing would send.
    """

    @torch.no_grad()
    def __init__(self, numbers: Tensor, bounds: Tensor, comm: Comm, limit: int | None = None) -> None:
        ranks = comm.grid.size(AXIS)
        owner = torch.bucketize(numbers, bounds[1:-1], right=True).masked_fill(numbers < 0, ranks)
        experts = (owner == torch.arange(ranks, device=owner.device).view(-1, 1, 1)).sum(2)  # of each rank, by token
        counts = torch.cat([(experts > 0).sum(1), experts.sum(1), owner.new_full((1,), numbers.numel())])
        table = torch.empty(ranks, 2 * ranks + 1, dtype=counts.dtype, device=counts.device)
        comm.all_gather(table.view(-1), counts, AXIS, ROUTING).wait()
        told: list[list[int]] = table.tolist()  # the only time that the host waits for the device
        self._counts = [row[:ranks] for row in told]
        self._index, self._limit = comm.grid.index(AXIS), limit or max(1, 2 * max(row[-1] for row in told) // ranks)
        self._gets_experts = sum(row[ranks + self._index] for row in told)
        to, self.token = (experts > 0).nonzero_static(size=sum(self._counts[self._index])).unbind(1)
        """Token of each pair, in the order of ranks."""
        own = numbers[self.token] - bounds[to][:, None]
        self.local = torch.where(owner[self.token] == to[:, None], own, -1)
        """Number of each expert among those of the pair's rank; -1: the expert is on another rank."""

    def asked(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the row indices and the column indices of all non-negative entries in ``numbers``.

        ``numbers`` [n, k]: for the n rows that this rank has received, indices among its own experts, or -1.
        """
        here = numbers >= 0
        row, slot = (here.nonzero_static(size=self._gets_experts) if self._is_one_round else here.nonzero()).unbind(1)
        return row, slot

    @property
    def _is_one_round(self) -> bool:
        return max(map(max, self._counts)) <= self._limit

    @property
    def rounds(self) -> list[Round]:
        """Rounds, at least one and equally many on all ranks, that together exchange all rows."""
        most = max(map(max, self._counts))
        step = max(1, min(self._limit, most))
        return [self._round(start, start + step) for start in range(0, max(most, 1), step)]

    def _round(self, start: int, stop: int) -> Round:
        """Returns the round with the rows ``start`` to ``stop`` of each pair of ranks."""

        def within(count: int) -> int:
            return max(0, min(count, stop) - start)

        own, first, rows = self._counts[self._index], 0, list[Tensor]()
        for count in own:
            rows.append(torch.arange(first + start, first + start + within(count), device=self.token.device))
            first += count
        return Round(tuple(map(within, own)), tuple(within(row[self._index]) for row in self._counts), torch.cat(rows))


def exchange(
    tensors: Sequence[Tensor], gives: Sequence[int], gets: Sequence[int], comm: Comm, label: str, ties: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Sends ``gives[r]`` rows of each of ``tensors`` to each rank r of the axis "ep", in rank order.

    Returns the received rows, ``gets[r]`` from rank r, as one tensor for each of ``tensors``. Backward exchanges the
    gradients of floating-point tensors. ``ties``: further inputs, with zero gradients; on a rank without rows, they
    make autograd run the backward exchange.
    """
    made: tuple[Tensor, ...] = _Exchange.apply(  # type: ignore[no-untyped-call]
        comm, gives, gets, label, len(tensors), *tensors, *ties
    )
    return made


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Comm, gives: Sequence[int], gets: Sequence[int], label: str, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        given, ties = tensors[:count], tensors[count:]
        ctx.set_materialize_grads(False)
        ctx.comm, ctx.gives, ctx.gets, ctx.label = comm, gives, gets, label
        ctx.like = [(each.shape[1:], each.dtype, each.device) for each in given]
        ctx.ties = [(each.shape, each.dtype, each.device) for each in ties]
        received = swap_rows(given, gives, gets, comm, label)
        ctx.mark_non_differentiable(*(each for each in received if not each.is_floating_point()))
        ctx.save_for_backward(given[0].new_empty(0))  # see backward
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # A checkpoint around this node sends rows again once a saved tensor is read. A rank without rows may have saved
        # no other one: reading it here lets every rank do so before the exchange of gradients.
        _ = ctx.saved_tensors
        refuse_second_derivatives(AXIS)
        rows = sum(ctx.gets)
        full = [
            torch.zeros(rows, *shape, dtype=dtype, device=device) if grad is None else grad.contiguous()
            for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
            if dtype.is_floating_point
        ]
        sent = iter(swap_rows(full, ctx.gets, ctx.gives, ctx.comm, ctx.label))
        back = (next(sent) if dtype.is_floating_point else None for _, dtype, _ in ctx.like)
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.ties)
        return (None, None, None, None, None, *back, *zeros)


def swap_rows(
    tensors: Sequence[Tensor], gives: Sequence[int], gets: Sequence[int], comm: Comm, label: str
) -> tuple[Tensor, ...]:
    """Exchanges rows over the axis "ep" as :func:`exchange` does, without autograd; complete on return.

    During the wait, a pipeline schedule may compute a part of another microbatch.
    """
    made, pending = [], []
    for tensor in tensors:
        got = tensor.new_empty(sum(gets), *tensor.shape[1:])
        pending.append(comm.exchange(got, tensor.contiguous(), gets, gives, AXIS, label))
        made.append(got)
    for each in pending[:1]:
        comm.filled(each)  # one piece, as all messages travel together
    for each in pending:
        each.wait()
    return tuple(made)
