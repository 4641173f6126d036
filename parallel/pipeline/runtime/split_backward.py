"""Split backward: deferred weight gradients (Qi et al. 2023, Zero Bubble Pipeline Parallelism).

    y = x W'      I    dx = dy W     at once: the previous stage waits for dx
                  W    dW = dy' x    later, from x and dy alone: W and the graph are not needed

During a collective of another microbatch between tensor ranks, a rank computes such weight gradients ahead
(``Schedule.weights_beside``), and W computes only the rest:

    I of microbatch 3    all-reduce of dx ------------> wait | ...        W of microbatch 2    the rest
                             dW of microbatch 2, one layer

Nothing is computed twice. Only linear layers are deferred: their weight gradient costs as much as their input gradient.
I computes the gradients of all other parameters, and of linear layers with an input without gradient, compiled layers,
and layers with a user's hook on the weight. A recomputed block (activation checkpointing) is recomputed once, in I.

Shape suffixes: I inputs, O outputs.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from engine.errors import EngineError
from engine.kernels.dispatch import REFERENCE, Kernels, MainGradient, is_executed
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.deferred_linear import (
    FusedForward,
    GradsWanted,
    LinearSpec,
    can_multiply,
    deferrable_linear,
    followed,
    is_conv1d,
    is_linear,
    only_argument,
    unless_added,
)
from engine.parallel.tensor.layers.linear import RowLayer, has_plain_forward, is_cut

Take = Callable[[str, Tensor], None]
"""Function (parameter name, gradient) that adds a gradient to the parameter."""


class _Deferred(NamedTuple):
    """Deferred weight gradient."""

    name: str
    compute: partial[Tensor]
    version: int
    """Sum of the version counters of the saved tensors at the time of deferral."""
    main: MainGradient | None
    """Main gradient to which W adds this gradient; a gradient computed ahead takes the usual path instead."""


class DeferredWeightGrads:
    """Queue of deferred weight gradients of one stage and microbatch."""

    def __init__(self) -> None:
        self._work: deque[_Deferred] = deque()
        self._done: deque[tuple[str, Tensor]] = deque()
        """Gradients that were computed ahead."""

    def leave(self, name: str, compute: partial[Tensor], main: MainGradient | None = None) -> None:
        """Defers ``compute``, a callback that returns the weight gradient of the parameter ``name``.

        ``main``: gradient buffer of the parameter, to which the queue may add the callback's result in place.
        """
        self._work.append(_Deferred(name, compute, _version(compute), main))

    @property
    def bytes(self) -> int:
        """Bytes of the tensors saved for deferred gradients, and of the gradients that :meth:`ahead` has computed."""
        kept = [arg.untyped_storage() for work in self._work for arg in work.compute.args if isinstance(arg, Tensor)]
        kept += [grad.untyped_storage() for _, grad in self._done]
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def ahead(self) -> None:
        """Computes and stores the next deferred gradient, if there is one."""
        if self._work:
            with _plain(self._work[0].compute):
                work = self._next()
                self._done.append((work.name, work.compute()))

    @torch.no_grad()
    def compute(self, take: Take) -> None:
        """Computes all deferred weight gradients, frees their inputs, and calls ``take(name, gradient)`` for each.

        Gradients added in place to a parameter's gradient buffer are not passed to ``take``.

        Raises:
            EngineError: the model has written in place to a tensor that was saved for a gradient.
        """
        while self._done or self._work:
            name, grad = self._done.popleft() if self._done else self._rest(self._next())
            if grad is not None:
                take(name, grad)

    @staticmethod
    def _rest(work: _Deferred) -> tuple[str, Tensor | None]:
        return work.name, unless_added(work.compute, work.main, None)

    def _next(self) -> _Deferred:
        work = self._work.popleft()
        if _version(work.compute) != work.version:
            raise EngineError(
                f"a tensor saved for the deferred gradient of {work.name!r} was written in place before the gradient "
                "was computed; do not write to tensors of another microbatch, or choose a schedule "
                "without split backwards, such as 1f1b."
            )
        return work


class SplitBackward:
    """Patch of the linear layers of ``model``: inside :meth:`leaving`, backward queues weight gradients for later.

    Construct it after tensor parallelism has sharded the layers.
    """

    def __init__(self, model: nn.Module, patches: ForwardPatches, kernels: Kernels = REFERENCE) -> None:
        self.kernels = kernels
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._open: DeferredWeightGrads | None = None
        for module in model.modules():
            slot = "multiply" if is_cut(module) else "forward"
            fused = vars(module).get(slot)
            if fused is not None and not isinstance(fused, FusedForward):
                continue
            # a layer without a plain forward (code reads the weight as a global tensor) is not deferred
            if is_linear(module) and has_plain_forward(module) and hasattr(module, slot):
                product = _Layer(self, module, names, getattr(module, slot)).multiply
                with patches.changing(module, PatchLayer.DEFERRED, "can defer its weight gradient to a W action"):
                    object.__setattr__(module, slot, product)

    @contextmanager
    def leaving(self, deferred: DeferredWeightGrads) -> Iterator[None]:
        """Makes backward inside the context put weight gradients into ``deferred`` instead of computing them."""
        before, self._open = self._open, deferred
        try:
            yield
        finally:
            self._open = before

    @property
    def open(self) -> DeferredWeightGrads | None:
        """Queue to which the running backward defers weight gradients (see :meth:`leaving`); None: it defers none."""
        return self._open


class _Layer:
    """Matrix product of one linear layer."""

    def __init__(
        self,
        split_backward: SplitBackward,
        module: nn.Module,
        names: Mapping[int, str],
        plain: Callable[[Tensor], Tensor],
    ) -> None:
        self.split_backward, self._module, self._plain = split_backward, module, plain
        self._parameters = module._parameters
        self._transposed = is_conv1d(module)
        self._with_bias = not isinstance(module, RowLayer)
        self._names = names

    def multiply(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Maps the only argument, x [.., I], to [.., O]."""
        x = only_argument(given, named)
        if not {"weight", "bias"} <= self._parameters.keys():  # computed from others (torch.nn.utils.parametrize)
            return self._plain(x)
        weight, bias = self._parameters["weight"], self._parameters["bias"] if self._with_bias else None
        if weight is None or not self._can_wait(x, weight, bias):
            return self._plain(x)
        names = self._names[id(weight)], "" if bias is None else self._names[id(bias)]
        kernels = self.split_backward.kernels
        waits = _Waits(self.split_backward, names)
        y = deferrable_linear(x, weight, bias, LinearSpec(self._transposed, waits, kernels))
        return followed(self._module, y, kernels)

    def _can_wait(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return can_multiply(x, weight) and all(p is None or self._is_ours(p) for p in (weight, bias))

    def _is_ours(self, parameter: Tensor) -> bool:
        """Returns True if only the engine uses the parameter's gradient."""
        hooked = parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1
        return parameter.requires_grad and parameter.is_leaf and not hooked and id(parameter) in self._names


class _Waits(NamedTuple):
    """Deferral of the gradients of one layer, identified by parameter name.

    The tensors of a product need not be the parameters: a trace passes twins, and a recomputed forward saves other
    objects.
    """

    split_backward: SplitBackward
    names: tuple[str, str]
    """First names of weight and bias in the model."""

    def put_off(self, wanted: GradsWanted, nodes: tuple[Any, ...]) -> bool:
        """Defers the gradients and returns True if this backward runs inside an I and belongs to the step."""
        deferred = self.split_backward.open
        # enabled gradients: create_graph, so the gradient needs a graph. A weight's node that does not run: a call of
        # torch.autograd.grad for other tensors
        if deferred is None or torch.is_grad_enabled() or not is_executed(nodes[1][0]):
            return False
        deferred.leave(self.names[0], wanted.weight, wanted.main)
        if wanted.bias is not None:
            deferred.leave(self.names[1], wanted.bias)
        return True


def _version(compute: partial[Tensor]) -> int:
    """Returns the sum of the tensors' version counters, which grows with every in-place write."""
    return sum(arg._version for arg in compute.args if isinstance(arg, Tensor))


@contextmanager
def _plain(compute: partial[Tensor]) -> Iterator[None]:
    """Switches off the surrounding pass's modes: gradients, autocast, selective recomputation, function modes."""
    devices = {arg.device.type for arg in compute.args if isinstance(arg, Tensor)}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
