"""Weight gradients that wait: a backward in two parts (Qi et al. 2023, Zero Bubble Pipeline Parallelism).

    y = x W'      I    dx = dy W     at once: the stage before waits for it
                  W    dW = dy' x    later, from x and dy alone: neither W nor the graph is needed any more

Nothing is computed twice. The linear layers of a model are the ones whose weight gradient costs as much as their
input gradient; those of all other parameters come with I, and so does a layer whose input needs no gradient, one
that is compiled, or one whose weight has hooks of the user's. A recomputed block (activation checkpointing) is
recomputed once, in I.

Shape suffixes: I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.deferred_linear import (
    FusedForward,
    GradsWanted,
    LinearSpec,
    can_multiply,
    deferrable_linear,
    followed,
    is_conv1d,
    is_executed,
    is_linear,
)
from engine.parallel.tensor.layers.linear import RowLayer, has_plain_forward, is_cut

Take = Callable[[str, Tensor], None]
"""Gets (parameter name, gradient)."""


class DeferredWeightGrads:
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


class SplitBackward:
    """Gives the linear layers of ``model`` a backward whose weight gradient can be deferred.

    Sharded layers (``parallel.tensor``) are among them, so it is put on after the tensor plan.
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
            # one that shows its weight as a view has no product of its own: its gradient does not wait
            if is_linear(module) and has_plain_forward(module) and hasattr(module, slot):
                product = _Layer(self, module, names, getattr(module, slot)).multiply
                with patches.changing(module, PatchLayer.DEFERRED, "can defer its weight gradient to a W action"):
                    object.__setattr__(module, slot, product)

    @contextmanager
    def leaving(self, leftover: DeferredWeightGrads) -> Iterator[None]:
        """Around an I: what can wait goes into ``leftover``."""
        before, self._open = self._open, leftover
        try:
            yield
        finally:
            self._open = before

    @property
    def open(self) -> DeferredWeightGrads | None:
        """Where the running backward leaves what can wait; None outside an I."""
        return self._open


class _Layer:
    """The product of one linear layer."""

    def __init__(
        self, waiting: SplitBackward, module: nn.Module, names: Mapping[int, str], plain: Callable[[Tensor], Tensor]
    ) -> None:
        self.waiting, self._module, self._plain = waiting, module, plain
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
        names = self._names[id(weight)], "" if bias is None else self._names[id(bias)]
        kernels = self.waiting.kernels
        y = deferrable_linear(x, weight, bias, LinearSpec(self._transposed, _Waits(self.waiting, names), kernels))
        return followed(self._module, y, kernels)

    def _can_wait(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return can_multiply(x, weight) and all(p is None or self._is_ours(p) for p in (weight, bias))

    def _is_ours(self, parameter: Tensor) -> bool:
        """Whether nobody but the engine waits for its gradient."""
        hooked = parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) > 1
        return parameter.requires_grad and parameter.is_leaf and not hooked and id(parameter) in self._names


class _Waits(NamedTuple):
    """Leaves the gradients of one layer to W; the tensors of a product need not be the parameters themselves: a probe
    shows twins of them, a recomputed forward saves other objects."""

    waiting: SplitBackward
    names: tuple[str, str]
    """Of weight and bias: their first names in the model."""

    def put_off(self, wanted: GradsWanted, nodes: tuple[Any, ...]) -> bool:
        """Inside an I, where this backward is that of the step."""
        leftover = self.waiting.open
        if leftover is None or torch.is_grad_enabled() or not is_executed(nodes[1][0]):
            return False
        leftover.leave(self.names[0], wanted.weight)
        if wanted.bias is not None:
            leftover.leave(self.names[1], wanted.bias)
        return True


def _version(compute: partial[Tensor]) -> int:
    """Grows with every write into one of the tensors."""
    return sum(arg._version for arg in compute.args if isinstance(arg, Tensor))
