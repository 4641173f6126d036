"""Main gradients of a reducer: backward products add to slices of the flat buckets (``kernels/main_gradient``).

    backward of a layer    dx │ db │ bucket += dy' x
    its weight's node      the bucket is complete: its reduction is launched directly behind that kernel
    autograd               the layer below

The node of autograd that accumulates the weight marks a sum as complete: it waits for all uses, whether products have
added them or a gradient arrives, and runs before the layer below. The reducer's own hook of the parameter hears of it,
also where no gradient has come: a hook for each backward would take 3 us a weight.
"""

from typing import Any, Protocol

from torch import nn

from engine.kernels.dispatch import OpenSum


class ProductSums(Protocol):
    """Interface through which matrix products of a backward add weight gradients to a reducer's buckets."""

    def open_sum(self, name: str, node: Any | None) -> OpenSum | None:
        """Returns the sum to which a product may add the gradient of parameter ``name``.

        None: the backward must return the gradient. ``node``: the node of autograd that accumulates the parameter.
        """

    def added(self, name: str) -> None:
        """Records that a product has added to the gradient sum of parameter ``name``."""

    def complete(self, name: str) -> None:
        """Records that the running backward adds nothing more to the gradient sum of parameter ``name``."""


class BucketGradient:
    """Main gradient of one parameter: its slice of a bucket, to which matrix products add in place."""

    def __init__(self, name: str, parameter: nn.Parameter, sums: ProductSums) -> None:
        self.name, self.parameter, self._sums = name, parameter, sums
        self._waits = False
        """True between the first product of a backward and the parameter's node."""

    def begin(self, node: Any | None) -> OpenSum | None:
        """Returns the slice of the bucket if the running backward may add to it; see :class:`MainGradient`."""
        return self._sums.open_sum(self.name, node)

    def end(self, node: Any | None) -> None:
        """Records that one product has been added; after the last one the gradient sum is complete."""
        self._sums.added(self.name)
        if node is None:
            self._sums.complete(self.name)
        else:
            self._waits = True

    def forget(self) -> None:
        """Stops the wait for autograd nodes: the backward has ended, or a separate gradient is added too."""
        self._waits = False

    def all_done(self) -> None:
        """Records that the autograd node has run, so that the sum is complete."""
        if self._waits:
            self._waits = False
            self._sums.complete(self.name)
