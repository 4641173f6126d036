"""All-reduce of an input gradient, overlapped with weight gradients (Megatron-LM: async_grad_allreduce).

The gradient of x is complete when all layers that share x have added to it, and is then all-reduced over the tensor
ranks. The layers' weight gradients are computed during this all-reduce:

    forward    x ── arrive ── f ──┬── query            token of query ──┐
                                  ├── key              token of key   ──┤ one node for each layer, made before f
                                  └── value            token of value ──┘
    backward   dx of value, key, query    f starts the sum    dW of value, key, query    arrive waits for it

Among ready nodes, autograd runs the node that was created last. The forward creates them in the order arrive, tokens,
f, products, so backward runs in the order above. Each node passes its gradients on at once, so that only one dW exists
at a time.

The overlap is used on devices that overlap collectives with compute (``TensorAxis.overlap``), for tensors whose
all-reduce takes longer than the launch of a few nodes. x and every dy stay allocated until dW is computed.

With ``Entrance.regather`` the forward saves only this rank's shard of x; backward gathers x again for all layers that
share it, during the input gradients, which do not need x.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import Kernels, is_executed
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
    unless_added,
)
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class Entrance:
    """Settings of the tensor-parallel copy or gather of an input for column layers (Megatron-LM's operation f).

    ``owned``: True if backward may overwrite the gradient of the copied or gathered input when it sums it over "tp".
    ``passed``: callback without arguments that backward calls after it has started the sum, or None.
    """

    axis: TensorAxis
    owned: bool
    passed: Callable[[], None] | None = None
    dim: int | None = None
    """Sharded dim along which f gathers the tensor; None: the tensor is full on every rank."""
    regather: bool = False
    """True if the gathered tensor is freed after forward and gathered again for the weight gradients."""


class Shared:
    """Input that several column layers share. :meth:`multiply` multiplies it by the weight of one layer."""

    def __init__(self, copy: Tensor, products: "tuple[_LateProduct, ...]" = ()) -> None:
        self.copy = copy
        self._products = products

    def multiply(self, layer: nn.Module) -> Tensor:
        """Returns the product of ``layer`` with the shared input.

        For a plain linear layer, backward overlaps its weight gradient with the sum of the input gradient over "tp".
        """
        for product in self._products:
            if product.layer is layer and product.fits(self.copy):
                return product.multiply(self.copy)
        own: Any = layer
        y: Tensor = own.multiply(self.copy)
        return y


def share_input(x: Tensor, entrance: Entrance, layers: Iterable[nn.Module]) -> Shared:
    """Returns an object that multiplies ``x`` by the column layers ``layers``. ``x`` is first copied or gathered over
    "tp" according to ``entrance``.

    Backward sums the gradient of ``x`` over "tp". If ``x`` is large, the sum overlaps with weight gradients of plain
    linear layers.
    """
    axis = entrance.axis
    # regather needs the deferred products on every device: only they can restore x for the weight gradients
    again = _Again(entrance) if entrance.regather and entrance.dim is not None else None
    if (again is None and not _is_worth_it(x, axis)) or not _can_travel(x, axis):
        return Shared(enter_region(x, entrance))
    late = [layer for layer in layers if has_own_weights(layer)]
    if not late or axis.dry:
        copied = enter_region(x, entrance)
        if again is not None and late:
            again.expect(x, copied)
        return Shared(copied)
    # the order of these three creations is the reverse of the order in backward: see the drawing above
    sum_ = _Sum(entrance.passed)
    arriving: Tensor = _Arrive.apply(x, sum_)  # type: ignore[no-untyped-call]
    products = tuple(_LateProduct(layer, _Work(again), x, axis.kernels) for layer in late)
    if entrance.dim is None:
        return Shared(start_copy_to(arriving, axis, entrance.owned, sum_.start), products)
    whole = start_gather_to(arriving, axis, entrance.dim, COLUMN_INPUTS, entrance.owned, sum_.start)
    return Shared(whole, products)


def enter_region(x: Tensor, entrance: Entrance) -> Tensor:
    """Returns ``x`` for column layers: gathered over "tp" along ``entrance.dim``, or unchanged if this is None.

    Backward reduce-scatters or all-reduces the gradient, without overlap.
    """
    if entrance.dim is None:
        return copy_to(x, entrance.axis, entrance.owned, entrance.passed)
    return gather_to(x, entrance.axis, entrance.dim, COLUMN_INPUTS, entrance.owned, entrance.passed)


def _can_travel(x: Tensor, axis: TensorAxis) -> bool:
    return axis.size > 1 and torch.is_grad_enabled() and x.requires_grad


def _is_worth_it(x: Tensor, axis: TensorAxis) -> bool:
    devices, least = axis.overlap
    return x.device.type in devices and not axis.dry and x.numel() * x.element_size() >= least


def has_own_weights(layer: nn.Module) -> bool:
    """Returns True if the weight and bias gradients of ``layer`` may be computed later than its input gradient.

    False if weight or bias is frozen, parametrized or hooked, or if a pipeline that splits backward into input and
    weight gradients has replaced the layer's matrix product.
    """
    parameters = layer._parameters
    if "multiply" in vars(layer) or not {"weight", "bias"} <= parameters.keys():
        return False  # a split backward has replaced the product, or torch.nn.utils.parametrize computes the weight
    present = [parameter for parameter in parameters.values() if parameter is not None]
    return all(p.requires_grad and p.is_leaf and not p._backward_hooks for p in present)


class _Sum:
    """Pending sum of one input gradient."""

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
    """Product of one layer, with the node that computes the weight gradient; the node is created before the copy."""

    def __init__(self, layer: nn.Module, work: "_Work", x: Tensor, kernels: Kernels) -> None:
        self.layer, self._kernels = layer, kernels
        self._weight, self._bias = layer._parameters["weight"], layer._parameters["bias"]
        self._work = work
        self._kept = None if work.again is None else x.detach()
        # on the device of x: autograd runs nodes of other devices in threads of their own, in no fixed order
        token = torch.empty(0, device=x.device)
        self._token: Tensor = _Weights.apply(token, self._work, self._weight, self._bias)  # type: ignore[no-untyped-call]

    def fits(self, x: Tensor) -> bool:
        """Returns True if the layer still has the same parameters."""
        parameters, weight = self.layer._parameters, self._weight
        same = parameters.get("weight") is weight and parameters.get("bias") is self._bias
        return same and weight is not None and can_multiply(x, weight)

    def multiply(self, x: Tensor) -> Tensor:
        assert self._weight is not None
        linear = LinearSpec(is_conv1d(self.layer), self._work, self._kernels)
        y = deferrable_linear(x, self._weight, self._bias, linear, Beside(self._kept, self._token))
        return followed(self.layer, y, self._kernels)


class _Again:
    """Tensor that backward gathers once more, for all layers that share it."""

    def __init__(self, entrance: Entrance) -> None:
        self._axis, self._dim = entrance.axis, entrance.dim or 0
        self._coming: tuple[Tensor, Pending] | None = None
        self._whole: Tensor | None = None
        self._users = 0

    def expect(self, x: Tensor, whole: Tensor) -> None:
        """Reports the gather in a dry run, in the backward of ``whole``."""
        self._axis.expect("all_gather", COLUMN_INPUTS, x.expand(self._axis.size, *x.shape), whole)

    def start(self, part: Tensor) -> None:
        """Counts a use; the first use starts the gather."""
        self._users += 1
        if self._users == 1:
            self._dim %= part.ndim
            self._coming = self._axis.start_all_gather(part.contiguous(), COLUMN_INPUTS)

    def take(self) -> Tensor:
        """Returns the gathered tensor, for one use; the last use frees it."""
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
    """Weight gradient that a product's backward leaves to the node of its token."""

    def __init__(self, again: _Again | None) -> None:
        self.again = again
        self._wanted: GradsWanted | None = None

    def put_off(self, wanted: GradsWanted, nodes: tuple[Any, ...]) -> bool:
        self._wanted = None
        if torch.is_grad_enabled():  # second derivatives go through the product itself
            if self.again is not None:
                refuse_second_derivatives()
            return False
        if is_executed(nodes[-1][0]):  # the token's node runs after this node and takes the gradients
            self._wanted = wanted
            if self.again is not None:
                self.again.start(wanted.weight.args[0])
        return True  # without that node, no gradient of the parameters is required

    def take(self, node: Any) -> tuple[Tensor | None, Tensor | None]:
        """Computes the gradients of weight and bias; None for a weight if its main gradient already contains it."""
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return None, None
        weight = wanted.weight
        if self.again is not None:
            _, dy, *more = weight.args  # the first argument is the shard of x that the forward saved
            weight = partial(weight.func, self.again.take().to(dy.dtype), dy, *more)
        db = None if wanted.bias is None else wanted.bias()
        return unless_added(weight, wanted.main, node), db


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
        return None, None, *ctx.work.take(ctx.next_functions[1][0])
