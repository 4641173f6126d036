"""Main gradients of a reducer: products of a backward add to slices of the flat buckets (``kernels/main_gradient``).

    backward of a layer    dx │ db │ bucket += dy' x │ the bucket is complete: its reduction is launched
    autograd                       the layer below, no gradient to accumulate

A weight with one use is told as soon as its product is added, directly behind its kernel. That it has no other use
must have shown: in an earlier backward, and in the forwards since. Until then, and where there are several uses, it is
told by the node of autograd that waits for all of them, whether products have added them or a gradient arrives.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from engine.kernels.main_gradient import OpenSum


class ProductSums(Protocol):
    """The sums of a reducer, as products see them."""

    forwards: int
    """Number of forwards so far."""

    @property
    def knows_uses(self) -> bool:
        """True if the uses of a parameter in a forward are all that the running backward goes through.

        So it is after the first step, in which uses that no product makes have shown.
        """

    def open_sum(self, name: str, node: Any | None) -> OpenSum | None:
        """The sum of a parameter for a product of the running backward; None: it has to deliver a gradient."""

    def added(self, name: str) -> None:
        """A product has been added to the sum."""

    def complete(self, name: str) -> None:
        """The running backward adds nothing more to the sum."""


class BucketGradient:
    """The main gradient of one parameter."""

    def __init__(self, name: str, parameter: nn.Parameter, sums: ProductSums) -> None:
        self.name, self.parameter, self._sums = name, parameter, sums
        self.sole = False
        """True once one product has given all of a backward's gradient."""
        self.several = False
        """True once the parameter had several uses in one forward."""
        self._last_forward = 0
        self._added = 0
        """Products of the running backward, while its end is awaited."""
        self._handle: RemovableHandle | None = None

    def use(self) -> None:
        """Notice a second use in one forward; a recomputed block uses its parameters once more and counts once."""
        if torch._C._current_graph_task_id() != -1:  # inside a backward
            return
        self.several = self.several or self._last_forward == self._sums.forwards
        self._last_forward = self._sums.forwards

    def begin(self, node: Any | None) -> OpenSum | None:
        """The slice of the bucket, if the running backward may write there; see :class:`MainGradient`."""
        return self._sums.open_sum(self.name, node)

    def end(self, node: Any | None) -> None:
        """Count the product, and say that the sum is complete when it is the last one."""
        self._sums.added(self.name)
        if node is None or (self._sums.knows_uses and self.sole and not self.several):
            self._sums.complete(self.name)
            return
        self._added += 1
        if self._handle is None:
            self._handle = node.register_prehook(self._all_done)

    def forget(self) -> None:
        """Wait for no node any more: its backward has ended."""
        handle, self._handle, self._added = self._handle, None, 0
        if handle is not None:
            handle.remove()

    def _all_done(self, grads: Sequence[Tensor | None]) -> None:
        """All uses have given what they have; a gradient beside the products is taken by the parameter's own hook."""
        others = any(grad is not None for grad in grads)
        self.several = self.several or self._added > 1 or others
        self.sole = True
        self.forget()
        if not others:
            self._sums.complete(self.name)
