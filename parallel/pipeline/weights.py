"""Weight gradients that wait: a backward in two parts (Qi et al. 2023, Zero Bubble Pipeline Parallelism).

    y = x W'      I    dx = dy W     at once: the stage before waits for it
                  W    dW = dy' x    later, from x and dy alone: neither W nor the graph is needed any more

Nothing is computed twice. The linear layers of a model are the ones whose weight gradient costs as much as their
input gradient; those of all other parameters come with I, and so does a layer whose input needs no gradient, one
that is compiled, or one whose weight has hooks of the user's. A recomputed block (activation checkpointing) is
recomputed once, in I.

Shape suffixes: B rows (all leading dims together), I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from engine.errors import EngineError
from engine.parallel.tensor.layers import RowLayer, has_plain_forward, is_conv1d, is_cut, is_linear

Take = Callable[[str, Tensor], None]
"""Gets (parameter name, gradient)."""


class Leftover:
    """What the I of one stage and microbatch has left to its W."""

    def __init__(self) -> None:
        self._work: list[tuple[str, partial[Tensor]]] = []
        self._versions: list[int] = []
        """How often the tensors of each had been written then."""

    def leave(self, name: str, compute: partial[Tensor]) -> None:
        """Note a gradient that is to be computed."""
        self._work.append((name, compute))
        self._versions.append(_version(compute))

    @property
    def bytes(self) -> int:
        """What is kept for it, each storage once."""
        kept = [arg.untyped_storage() for _, compute in self._work for arg in compute.args if isinstance(arg, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    @torch.no_grad()
    def compute(self, take: Take) -> None:
        """Compute all of it, letting go of each input with its use.

        Raises:
            EngineError: the model has written into what waits.
        """
        work, self._work = self._work[::-1], []
        versions, self._versions = self._versions[::-1], []
        while work:
            name, compute = work.pop()
            if _version(compute) != versions.pop():
                raise EngineError(
                    f"what the gradient of {name!r} waits for was written in place after the backward that left it: "
                    "let the model write into no tensor of another microbatch, or choose a schedule that splits no "
                    "backward, such as 1f1b."
                )
            take(name, compute())


class WaitingWeights:
    """Gives the linear layers of ``model`` a backward whose weight part can wait. ``remove`` takes it off.

    Cut layers (``parallel.tensor``) are among them, so install it when the model has been cut.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._open: Leftover | None = None
        self._installed: list[tuple[nn.Module, str, Any]] = []
        for module in model.modules():
            slot = "multiply" if is_cut(module) else "forward"
            if is_linear(module) and has_plain_forward(module) and slot not in vars(module):
                product = _Layer(self, module, names, getattr(module, slot)).multiply
                object.__setattr__(module, slot, product)
                self._installed.append((module, slot, product))

    @contextmanager
    def leaving(self, leftover: Leftover) -> Iterator[None]:
        """Around an I: what can wait goes into ``leftover``."""
        before, self._open = self._open, leftover
        try:
            yield
        finally:
            self._open = before

    @property
    def open(self) -> Leftover | None:
        """Where the running backward leaves what can wait; None outside an I."""
        return self._open

    def remove(self) -> None:
        """Put the layers' own products back."""
        for module, slot, product in self._installed:
            if vars(module).get(slot) == product:
                object.__delattr__(module, slot)
        self._installed = []


class _Layer:
    """The product of one linear layer."""

    def __init__(
        self, waiting: WaitingWeights, module: nn.Module, names: Mapping[int, str], plain: Callable[[Tensor], Tensor]
    ) -> None:
        self.waiting, self._plain = waiting, plain
        self._parameters = module._parameters
        self._transposed = is_conv1d(module)
        self._with_bias = not isinstance(module, RowLayer)
        self._names = names

    def multiply(self, x: Tensor) -> Tensor:
        """x [.., I] -> [.., O]."""
        if not {"weight", "bias"} <= self._parameters.keys():  # computed from others (torch.nn.utils.parametrize)
            return self._plain(x)
        weight, bias = self._parameters["weight"], self._parameters["bias"] if self._with_bias else None
        if weight is None or not self._can_wait(x, weight, bias):
            return self._plain(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        names = self._names[id(weight)], "" if bias is None else self._names[id(bias)]
        product = _Product(self.waiting, self._transposed, names)
        out: Tensor = _Linear.apply(x, weight, bias, product)  # type: ignore[no-untyped-call]
        return out

    def _can_wait(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or type(x) not in (Tensor, nn.Parameter):
            return False
        # who looks at operations by name sees the same in the probe and in a run: a layer that code between units calls
        if _get_current_function_mode() is not None:  # type: ignore[no-untyped-call]
            return False
        # autocast casts no double
        casts = torch.is_autocast_enabled(x.device.type)
        fits = x.dtype != torch.float64 if casts else x.dtype == weight.dtype
        return fits and x.requires_grad and all(p is None or self._is_ours(p) for p in (weight, bias))

    def _is_ours(self, parameter: Tensor) -> bool:
        """Whether nobody but the engine waits for its gradient."""
        hooked = parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1
        return parameter.requires_grad and parameter.is_leaf and not hooked and id(parameter) in self._names


class _Product(NamedTuple):
    """What a product needs to know beside its tensors, which need not be the parameters themselves: a probe shows
    twins of them, a recomputed forward saves other objects."""

    waiting: WaitingWeights
    transposed: bool
    names: tuple[str, str]
    """Of weight and bias: their first names in the model."""


class _Linear(torch.autograd.Function):
    """x [.., I] -> x W' + b [.., O], for W [O, I], or [I, O] where the layer is transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: _Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.bias = product, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            w_OI = weight.to(x.dtype)
            b_O = None if bias is None else bias.to(x.dtype)
            y = nn.functional.linear(x, w_OI.t() if product.transposed else w_OI, b_O)
        # what it was made as lives no longer: with the mark of a view nobody could write into it (ReLU(inplace=True))
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (waiting, transposed, names), bias = ctx.product, ctx.bias
        w_OI = weight.to(dy.dtype)
        dx = dy @ (w_OI.t() if transposed else w_OI)
        leftover = waiting.open
        if leftover is None or torch.is_grad_enabled() or not _reaches(ctx.next_functions[1][0]):
            dw = _weight_gradient(x, dy, weight.dtype, transposed)
            return dx, dw, None if bias is None else _bias_gradient(dy, bias), None
        x, dy = x.detach(), dy.detach()  # the graph that made them goes now
        leftover.leave(names[0], partial(_weight_gradient, x, dy, weight.dtype, transposed))
        if bias is not None:
            leftover.leave(names[1], partial(_bias_gradient, dy, bias))
        return dx, None, None, None


def _reaches(accumulation: Any) -> bool:
    """Whether the running backward brings the gradient of a parameter to it: one of the user's own inside a recomputed
    block, which asks for other gradients (``torch.autograd.grad``), does not."""
    try:
        return bool(torch._C._will_engine_execute_node(accumulation))
    except RuntimeError:  # it asks for this one
        return False


def _version(compute: partial[Tensor]) -> int:
    """Grows with every write into one of the tensors."""
    return sum(arg._version for arg in compute.args if isinstance(arg, Tensor))


def _weight_gradient(x: Tensor, dy: Tensor, dtype: torch.dtype, transposed: bool) -> Tensor:
    x_BI, dy_BO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return (x_BI.t() @ dy_BO if transposed else dy_BO.t() @ x_BI).to(dtype)


def _bias_gradient(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return dy.reshape(-1, dy.shape[-1]).sum(0).to(dtype)
