"""Column and row layers of a stream that is cut along the sequence, whose products run while their rows travel.

    stream [.., S/T, I] ── gathered in pieces, each multiplied as it comes ── query     the gathered rows: key, value
    parts  [.., S, P] ── multiplied in pieces, each summed and scattered meanwhile ── stream

Where collectives run beside compute and the tensors are large enough (``TensorAxis.overlap``, ``overlap``); elsewhere
layers gather or scatter at once.
"""

from typing import Any

from torch import Tensor, nn

from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.collectives import COLUMN_INPUTS, ROW_OUTPUTS, gather_to
from engine.parallel.tensor.fused import followed
from engine.parallel.tensor.late import Shared, has_own_weights
from engine.parallel.tensor.overlap import Pieced, choose_pieces, gather_multiply, multiply_scatter
from engine.parallel.tensor.product import is_conv1d


class SharedInPieces(Shared):
    """Gathered by the first plain product that multiplies it; the others share what that has gathered."""

    def __init__(self, part: Tensor, axis: TensorAxis, plain: list[nn.Module]) -> None:
        self._part, self._axis, self._plain = part, axis, plain
        self._whole: Tensor | None = None

    @property
    def copy(self) -> Tensor:  # type: ignore[override]
        """All rows."""
        if self._whole is None:
            self._whole = gather_to(self._part, self._axis, self._part.ndim - 2, COLUMN_INPUTS)
        return self._whole

    def multiply(self, layer: nn.Module) -> Tensor:
        """The layer's product with all rows."""
        if self._whole is None and any(layer is other for other in self._plain) and has_own_weights(layer):
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            assert weight is not None
            pieced = Pieced(self._axis, COLUMN_INPUTS, transposed=is_conv1d(layer))
            y, self._whole = gather_multiply(self._part, weight, bias, pieced)
            return followed(layer, y, self._axis.kernels)
        own: Any = layer
        product: Tensor = own.multiply(self.copy)
        return product


def is_in_pieces(rows: int, part: Tensor, axis: TensorAxis) -> bool:
    """Whether ``rows`` rows of a rank, with as many bytes as ``part``, are to travel in more than one piece."""
    size = part.numel() * part.element_size()
    return choose_pieces(rows, size, part.device.type, axis) > 1


def scatter_product(layer: nn.Module, x: Tensor, axis: TensorAxis) -> Tensor:
    """x [.., S, P] -> this rank's rows [.., S/T, O] of the layer's product, summed over the ranks; without the bias."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return multiply_scatter(x, weight, Pieced(axis, ROW_OUTPUTS, transposed=is_conv1d(layer)))
