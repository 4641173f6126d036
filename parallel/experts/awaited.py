"""Sums of experts' rows that are awaited at their first use, so that a block computes other work in the meantime.

    forward    combine starts ── work of the user's code: shared experts, gates ── first use: wait, sum by token
    backward   node of the first use: starts ── backward of the same work ── node of combine: wait

Autograd runs the ready node that was created last. The node of the first use is created after the other work, and the
node of combine before it, so the backward has the reverse order of the forward.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.kernels.dispatch import is_executed
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.experts.dispatch import AXIS, COMBINE, Round
from engine.parallel.tensor.collectives import refuse_second_derivatives

_DYNAMO = "torch._dynamo.eval_frame"
"""Module that runs compiled code."""
_VIEWS = frozenset(
    {
        Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, Tensor.unsqueeze,
        torch.unsqueeze, Tensor.squeeze, torch.squeeze,
    }
)  # fmt: skip
"""Functions of torch that only give the rows of a contiguous tensor another shape."""
_PROPERTIES = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")
)
_METADATA = _PROPERTIES | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_contiguous,
    Tensor.element_size, Tensor.is_floating_point, torch.is_floating_point, Tensor.__len__, Tensor.get_device,
}  # fmt: skip


class Arrival:
    """Expert results on their way back to this rank, and their sum for each token."""

    def __init__(self, sums: Tensor, token: Tensor, route: Round, comm: Comm) -> None:
        self.sums, self.token = sums, token
        """Sums [T, ..], NaN until :meth:`complete`; token of each row."""
        self.back: tuple[Tensor, Tensor, Pending] | None = None
        """The gradient that the node of the first use has sent, and the rows that come for the node of combine."""
        self._route, self._comm = route, comm
        self._coming: tuple[Tensor, Pending] | None = None

    def expect(self, rows: Tensor, pending: Pending) -> None:
        """Stores ``rows``, the receive buffer of a running exchange of expert results, and its handle ``pending``."""
        self._coming = rows, pending

    @torch.no_grad()
    def complete(self) -> None:
        """Waits for the expert results, and adds them to ``sums`` by token. A second call does nothing."""
        coming, self._coming = self._coming, None
        if coming is not None:
            rows, pending = coming
            pending.wait()
            # views of the sums keep their nodes of autograd only if the counter of versions stays
            self.sums.data.zero_().index_add_(0, self.token, rows)

    def send_back(self, grad: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Pending]:
        """Starts to send the gradient of each received expert result back to the rank of its expert.

        Returns (``grad`` itself, receive buffer for gradients of the results that this rank's experts computed, handle
        of the exchange). ``grad``: gradient of the sum of results for each token. ``token``: index of the token of each
        result.
        """
        rows = grad.new_empty(sum(self._route.gets), *grad.shape[1:])
        route, given = self._route, grad.index_select(0, token)
        pending = self._comm.exchange(rows, given, route.gets, route.gives, AXIS, COMBINE)
        return grad, rows, self._comm.filled(pending)


class Awaited(Tensor):
    """Output tensor of an expert layer that waits for its expert results at its first use, and then acts as a plain
    tensor.

    A torch function, except views and metadata, waits before autograd records the call. A C++ extension that
    accesses the data pointer raises.
    """

    _arrival: Arrival
    _own: Tensor
    """The same values as a plain tensor without a gradient."""
    _view: Callable[[], Tensor] | None
    """Returns the plain view; None: these are the sums."""
    _plain: Tensor | None
    _node: Any
    """Node of autograd that :attr:`_plain`, or the view, comes from."""

    @staticmethod
    def of(own: Tensor, arrival: Arrival) -> "Awaited":
        """Returns a tensor that waits for ``arrival`` at first use. ``own``: plain tensor that ``arrival`` fills."""
        made: Awaited = Tensor._make_wrapper_subclass(
            Awaited,
            own.size(),
            own.stride(),
            own.storage_offset(),
            dtype=own.dtype,
            device=own.device,
            layout=own.layout,
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # an extension in C++ fails, and reads nothing early
        made._arrival, made._own, made._view, made._plain, made._node = arrival, own, None, None, None
        return made

    def plain(self) -> Tensor:
        """Waits for the expert results; returns a plain tensor with the same values and autograd history."""
        with torch._C.DisableTorchFunctionSubclass():
            node = self.grad_fn
        if node is self._node and self._plain is not None:
            return self._plain
        if node is self._node and self._view is not None:
            with torch.enable_grad():
                made = self._view()
        else:
            self._arrival.complete()
            with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                made = self._own if node is None else _FirstUse.apply(self, self._arrival)  # type: ignore[no-untyped-call]
        self._plain, self._node = made, node
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs ``func`` on plain tensors; metadata and other shapes do not wait."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _VIEWS and isinstance(first, Awaited) and first._keeps_content(args):
            return first._viewed(partial(_view_of, func, args[1:], kwargs))
        plain, named = pytree.tree_map_only(Awaited, Awaited.plain, (tuple(args), dict(kwargs)))
        made = func(*plain, **named)
        return first if made is not first and plain and made is plain[0] else made  # a function in place

    def _keeps_content(self, args: Sequence[Any]) -> bool:
        """Returns True if a view with these arguments has the content of this tensor, and its gradient."""
        typed = any(isinstance(each, torch.dtype) for each in args)
        return not typed and self._own.is_contiguous() and (torch.is_grad_enabled() or not self.requires_grad)

    def _viewed(self, view: "partial[Tensor]") -> "Awaited":
        """Returns the tensor that stands for a view of this one."""
        with torch._C.DisableTorchFunctionSubclass():
            made: Awaited = _View.apply(self, view)  # type: ignore[no-untyped-call]
            made._view, made._node = (lambda: view(self.plain())), made.grad_fn
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an operator below autograd on the plain values."""
        awaited = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Awaited)]
        for each in awaited:
            each._arrival.complete()
        given, named = pytree.tree_map_only(Awaited, _own, (tuple(args), dict(kwargs or {})))
        made = func(*given, **named)
        outer = {id(each._own): each for each in awaited}  # an operator in place returns the tensor that it was given
        return pytree.tree_map_only(Tensor, lambda each: outer.get(id(each), each), made)


def _own(tensor: Awaited) -> Tensor:
    return tensor._own


def _view_of(func: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor) -> Tensor:
    return func(tensor, *args, **kwargs)


class _View(torch.autograd.Function):
    """Node of a view that nobody has read yet. It is no view for autograd, which would look at content."""

    @staticmethod
    def forward(ctx: Any, awaited: Awaited, view: "partial[Tensor]") -> Tensor:
        ctx.shape = awaited._own.shape
        return Awaited.of(view(awaited._own), awaited._arrival)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.reshape(ctx.shape), None


class _FirstUse(torch.autograd.Function):
    """Node of the first use of sums; its backward starts the exchange of gradients."""

    @staticmethod
    def forward(ctx: Any, awaited: Awaited, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        ctx.save_for_backward(arrival.token)
        return awaited._own.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (token,) = ctx.saved_tensors  # a checkpoint sends rows again first: see dispatch.exchange
        refuse_second_derivatives(AXIS)
        arrival: Arrival = ctx.arrival
        node = ctx.next_functions[0][0]
        if getattr(node, "arrival", None) is arrival and is_executed(node):
            arrival.back = arrival.send_back(grad, token)
        return grad, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Tensor, route: Round, token: Tensor, count: int, comm: Comm, *ties: Tensor) -> Tensor:
        rows = made.new_empty(sum(route.gives), *made.shape[1:])
        pending = comm.exchange(rows, made.contiguous(), route.gives, route.gets, AXIS, COMBINE)
        sums = made.new_full((count, *made.shape[1:]), torch.nan)
        ctx.arrival = arrival = Arrival(sums, token, route, comm)
        arrival.expect(rows, comm.filled(pending))
        ctx.save_for_backward(token)
        ctx.ties = [(each.shape, each.dtype, each.device) for each in ties]
        return Awaited.of(sums, arrival)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        refuse_second_derivatives(AXIS)
        arrival: Arrival = ctx.arrival
        started, arrival.back = arrival.back, None
        sent, rows, pending = started or arrival.send_back(grad, token)
        pending.wait()
        if sent is not grad:  # code that passes by the functions of torch has used the sums too, on every rank
            _, rows, pending = arrival.send_back(grad, token)
            pending.wait()
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.ties)
        return (rows, None, None, None, None, *zeros)


class WaitingBlock:
    """Forward of a block with an expert layer; other layers compute while expert results are received.

    All exchanges are complete at its end, and its outputs are plain tensors.
    """

    def __init__(self, own: Callable[..., Any], comm: Comm) -> None:
        self._own, self._comm = own, comm
        self._started: list[Arrival] | None = None
        """Arrivals of this call; None: the block does not run."""

    @property
    def is_running(self) -> bool:
        """True while the block's forward runs uncompiled, so that it may use :class:`Awaited` tensors."""
        return self._started is not None and not _is_compiled()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's forward and completes all exchanges; returns the output as plain tensors."""
        outer, self._started = self._started, []
        try:
            out = pytree.tree_map_only(Awaited, Awaited.plain, self._own(*args, **kwargs))
            for each in self._started:
                each.complete()
        finally:
            self._started = outer
        return out

    def combine(self, made: Tensor, route: Round, token: Tensor, count: int, ties: Sequence[Tensor]) -> Tensor:
        """Starts to send ``made``, the results of this rank's experts, back to the ranks of their tokens.

        Returns an :class:`Awaited` tensor [``count``, ..] with the sum of results for each of this rank's ``count``
        tokens. ``route``: exchange by which the tokens arrived. ``token``: index of the token of each received result.
        ``ties``: further inputs, with zero gradients; on a rank without rows, they make autograd run the backward
        exchange.
        """
        assert self._started is not None
        sums: Awaited = _Combine.apply(made, route, token, count, self._comm, *ties)  # type: ignore[no-untyped-call]
        self._started.append(sums._arrival)
        return sums


def _is_compiled() -> bool:
    """Returns True within a call of compiled code."""
    frame: FrameType | None = sys._getframe() if _DYNAMO in sys.modules else None
    while frame is not None and (
        frame.f_globals.get("__name__") != _DYNAMO or frame.f_code.co_qualname.startswith("DisableContext.")
    ):
        frame = frame.f_back
    return frame is not None
