"""The sum of an input gradient over the tensor ranks, behind weight gradients (Megatron-LM: asynchronous all-reduce).

The gradient of x is whole when the last layer that shares x has added to it, and must be summed before it leaves the
region; the weight gradients of those layers need no sum. So they are computed while it travels:

    forward    x ── arrive ── f ──┬── query            token of query ──┐
                                  ├── key              token of key   ──┤ one node for each layer, made before f
                                  └── value            token of value ──┘
    backward   dx of value, key, query    f starts the sum    dW of value, key, query    arrive waits for it

Autograd runs, of the nodes that are ready, the one that was made last: the forward makes them in the order arrive,
tokens, f, products, and backward comes out as above. A node's gradients go on at once, so that no two dW wait.

This is for devices on which collectives run beside compute (``TensorAxis.overlap``), and for tensors whose sum
takes longer than launching a few more nodes. x and every dy live until their dW is done; nothing else is kept.

With ``Entrance.regather`` the forward keeps the part of x that it was given, and the gathered x goes with the forward.
It is gathered once more, for all layers that share it: behind the input gradients, which do not need it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import Kernels
from engine.parallel.comm.comm import Pending
from engine.parallel.tensor.collectives import (
    COLUMN_INPUTS,
    copy_to,
    gather_to,
    join_parts,
    refuse_second_derivatives,
    start_copy_to,
    start_gather_to,
)
from engine.parallel.tensor.deferred_linear import (
    Beside,
    GradsWanted,
    LinearSpec,
    can_multiply,
    deferrable_linear,
    followed,
    is_conv1d,
    is_executed,
)
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class Entrance:
    """How a tensor comes to the column layers that share it; ``owned`` and ``passed`` as in :func:`copy_to`."""

    axis: TensorAxis
    owned: bool
    passed: Callable[[], None] | None = None
    dim: int | None = None
    """Along which it is cut and must be gathered; None: every rank has all of it."""
    regather: bool = False
    """Whether what was gathered is not kept, but gathered once more for the weight gradients."""


class Shared:
    """The copy of a tensor that column layers multiply: ``deferrable_linear`` does it for one of them."""

    def __init__(self, copy: Tensor, products: "tuple[_LateProduct, ...]" = ()) -> None:
        self.copy = copy
        self._products = products

    def multiply(self, layer: nn.Module) -> Tensor:
        """The layer's own product, with its weight gradient put off where that is possible."""
        for product in self._products:
            if product.layer is layer and product.fits(self.copy):
                return product.multiply(self.copy)
        own: Any = layer
        y: Tensor = own.multiply(self.copy)
        return y


def share_input(x: Tensor, entrance: Entrance, layers: Iterable[nn.Module]) -> Shared:
    """f, for the plain products ``layers``, which may all be given the copy, or some of them."""
    axis = entrance.axis
    again = _Again(entrance) if entrance.regather and entrance.dim is not None else None
    if (again is None and not _is_worth_it(x, axis)) or not _can_travel(x, axis):
        return Shared(enter_region(x, entrance))
    late = [layer for layer in layers if has_own_weights(layer)]
    if again is not None and late:
        again.expect(x)
    if not late or axis.dry:
        return Shared(enter_region(x, entrance))
    sum_ = _Sum(entrance.passed)
    arriving: Tensor = _Arrive.apply(x, sum_)  # type: ignore[no-untyped-call]
    products = tuple(_LateProduct(layer, _Work(again), x, axis.kernels) for layer in late)
    if entrance.dim is None:
        return Shared(start_copy_to(arriving, axis, entrance.owned, sum_.start), products)
    whole = start_gather_to(arriving, axis, entrance.dim, COLUMN_INPUTS, entrance.owned, sum_.start)
    return Shared(whole, products)


def enter_region(x: Tensor, entrance: Entrance) -> Tensor:
    """f without products that are put off."""
    if entrance.dim is None:
        return copy_to(x, entrance.axis, entrance.owned, entrance.passed)
    return gather_to(x, entrance.axis, entrance.dim, COLUMN_INPUTS, entrance.owned, entrance.passed)


def _can_travel(x: Tensor, axis: TensorAxis) -> bool:
    return axis.size > 1 and torch.is_grad_enabled() and x.requires_grad


def _is_worth_it(x: Tensor, axis: TensorAxis) -> bool:
    devices, least = axis.overlap
    return x.device.type in devices and not axis.dry and x.numel() * x.element_size() >= least


def has_own_weights(layer: nn.Module) -> bool:
    """Whether the layer multiplies by its parameters as they are, and nobody else waits for their gradients."""
    parameters = layer._parameters
    if "multiply" in vars(layer) or not {"weight", "bias"} <= parameters.keys():
        return False  # a split backward has its own plans; computed from others (torch.nn.utils.parametrize)
    present = [parameter for parameter in parameters.values() if parameter is not None]
    return all(p.requires_grad and p.is_leaf and not p._backward_hooks for p in present)


class _Sum:
    """The sum of one input gradient, between its start and the wait for it."""

    def __init__(self, passed: Callable[[], None] | None) -> None:
        self._passed = passed
        self._pending: Pending | None = None

    def start(self, pending: Pending) -> None:
        self._pending = pending
        if self._passed is not None:
            self._passed()

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


class _LateProduct:
    """One layer's product, and the node that computes its weight gradient: made before the copy is."""

    def __init__(self, layer: nn.Module, work: "_Work", x: Tensor, kernels: Kernels) -> None:
        self.layer, self._kernels = layer, kernels
        self._weight, self._bias = layer._parameters["weight"], layer._parameters["bias"]
        self._work = work
        self._kept = None if work.again is None else x.detach()
        # of that device, or autograd would run the node beside those of the device, in another thread
        token = torch.empty(0, device=x.device)
        self._token: Tensor = _Weights.apply(token, self._work, self._weight, self._bias)  # type: ignore[no-untyped-call]

    def fits(self, x: Tensor) -> bool:
        """Whether the layer still has the parameters it had."""
        parameters, weight = self.layer._parameters, self._weight
        same = parameters.get("weight") is weight and parameters.get("bias") is self._bias
        return same and weight is not None and can_multiply(x, weight)

    def multiply(self, x: Tensor) -> Tensor:
        assert self._weight is not None
        linear = LinearSpec(is_conv1d(self.layer), self._work, self._kernels)
        y = deferrable_linear(x, self._weight, self._bias, linear, Beside(self._kept, self._token))
        return followed(self.layer, y, self._kernels)


class _Again:
    """A tensor that is gathered once more in a backward, for all layers that share it."""

    def __init__(self, entrance: Entrance) -> None:
        self._axis, self._dim = entrance.axis, entrance.dim or 0
        self._coming: tuple[Tensor, Pending] | None = None
        self._whole: Tensor | None = None
        self._users = 0

    def expect(self, x: Tensor) -> None:
        """Tell of it in a dry run."""
        self._axis.expect("all_gather", COLUMN_INPUTS, x.expand(self._axis.size, *x.shape))

    def start(self, part: Tensor) -> None:
        """Called once for each use."""
        self._users += 1
        if self._users == 1:
            self._dim %= part.ndim
            self._coming = self._axis.start_all_gather(part.contiguous(), COLUMN_INPUTS)

    def take(self) -> Tensor:
        """For one use; the last one lets it go."""
        if self._coming is not None:
            rows, pending = self._coming
            pending.wait()
            self._coming, self._whole = None, join_parts(rows, self._dim)
        assert self._whole is not None
        whole = self._whole
        self._users -= 1
        if not self._users:
            self._whole = None
        return whole


class _Work:
    """What a product's backward leaves to the node behind its token."""

    def __init__(self, again: _Again | None) -> None:
        self.again = again
        self._wanted: GradsWanted | None = None

    def put_off(self, wanted: GradsWanted, nodes: tuple[Any, ...]) -> bool:
        self._wanted = None
        if torch.is_grad_enabled():  # second derivatives go through the product itself
            if self.again is not None:
                refuse_second_derivatives()
            return False
        if is_executed(nodes[-1][0]):
            self._wanted = wanted
            if self.again is not None:
                self.again.start(wanted.weight.args[0])
        return True  # if not, nobody has asked for them

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return None, None
        weight = wanted.weight
        if self.again is not None:
            _, dy, *more = weight.args
            weight = partial(weight.func, self.again.take().to(dy.dtype), dy, *more)
        return weight(), None if wanted.bias is None else wanted.bias()


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sum_: _Sum) -> Tensor:
        ctx.sum = sum_
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.sum.wait()
        return grad, None


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, work: _Work, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.work = work
        return token.clone()

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        return None, None, *ctx.work.take()
