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
    """Interface through which the matrix products of a backward add weight gradients directly to a reducer's flat
    buckets. No separate gradient tensors exist.
    """

    def open_sum(self, name: str, node: Any | None) -> OpenSum | None:
        """Returns the memory of the gradient sum of parameter ``name`` for in-place additions, with a flag: True if it
        contains a sum already. Returns None if the backward must return a separate gradient tensor.

        ``node``: the parameter's autograd node; None: the product runs outside autograd.
        """

    def added(self, name: str) -> None:
        """Records that a matrix product has added to the gradient sum of parameter ``name``."""

    def complete(self, name: str) -> None:
        """Records that the gradient sum of parameter ``name`` is complete for the running backward, so its bucket may
        be reduced.
        """


class BucketGradient:
    """Gradient of one parameter, summed in a slice of a flat bucket. The matrix products of a backward add to the slice
    in place.
    """

    def __init__(self, name: str, parameter: nn.Parameter, sums: ProductSums) -> None:
        self.name, self.parameter, self._sums = name, parameter, sums
        self._waits = False
        """True between the first product of a backward and the parameter's node."""

    def begin(self, node: Any | None) -> OpenSum | None:
        """Returns the parameter's slice of the bucket for in-place additions, with a flag: True if it contains a sum
        already. Returns None if the backward must return a separate gradient tensor.

        ``node``: the parameter's autograd node; None: the product runs outside autograd.
        """
        return self._sums.open_sum(self.name, node)

    def end(self, node: Any | None) -> None:
        """Records that one matrix product has added to the parameter's slice of its bucket. The sum is complete once
        the autograd node ``node`` has run; at once if None.
        """
        self._sums.added(self.name)
        if node is None:
            self._sums.complete(self.name)
        else:
            self._waits = True

    def forget(self) -> None:
        """Stops waiting for the parameter's autograd node, and does not mark the sum as complete."""
        self._waits = False

    def all_done(self) -> None:
        """Records that the parameter's autograd node has run in this backward. A sum in the parameter's slice of the
        bucket is then complete.
        """
        if self._waits:
            self._waits = False
            self._sums.complete(self.name)
