"""Main gradients of a reducer: products of a backward add to slices of the flat buckets (``kernels/main_gradient``).

    backward of a layer    dx │ db │ bucket += dy' x
    its weight's node      the bucket is complete: its reduction is launched directly behind that kernel
    autograd               the layer below

The node of autograd that accumulates the weight marks a sum as complete: it waits for all uses, whether
products have added them or a gradient arrives, and runs before the layer below. The reducer's own hook of the parameter
hears of it, also where no gradient has come: a hook for each backward would take 3 us a weight.
"""

from typing import Any, Protocol

from torch import nn

from engine.kernels.dispatch import OpenSum


class ProductSums(Protocol):
    """Sums of a reducer, as products see them."""

    def open_sum(self, name: str, node: Any | None) -> OpenSum | None:
        """Returns the sum of a parameter for a product of the running backward; None: the backward has to deliver a
        gradient."""

    def added(self, name: str) -> None:
        """Notes that a product has been added to the sum."""

    def complete(self, name: str) -> None:
        """Notes that the running backward adds nothing more to the sum."""


class BucketGradient:
    """Main gradient of one parameter."""

    def __init__(self, name: str, parameter: nn.Parameter, sums: ProductSums) -> None:
        self.name, self.parameter, self._sums = name, parameter, sums
        self._waits = False
        """True between the first product of a backward and the parameter's node."""

    def begin(self, node: Any | None) -> OpenSum | None:
        """Returns the slice of the bucket, if the running backward may write there; see :class:`MainGradient`."""
        return self._sums.open_sum(self.name, node)

    def end(self, node: Any | None) -> None:
        """Notes that a product has been added, and later, after the last one, that the sum is complete."""
        self._sums.added(self.name)
        if node is None:
            self._sums.complete(self.name)
        else:
            self._waits = True

    def forget(self) -> None:
        """Stops waiting for nodes: their backward has ended, or the reducer takes a gradient in addition to the
        products."""
        self._waits = False

    def all_done(self) -> None:
        """Notes that the node has run: all uses have added their products, and no other gradient follows."""
        if self._waits:
            self._waits = False
            self._sums.complete(self.name)
