"""A linear layer cut by its outputs that gives the whole: for layers without a partner that takes parts."""

from torch import Tensor, nn

from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.collectives import gather_last
from engine.parallel.tensor.layers import ColumnLayer, ColumnLinear
from engine.parallel.tensor.ranges import cut_parts, held
from engine.parallel.tensor.region import Region

COLUMN_OUTPUTS = "column outputs"


class GatheredColumnLayer(ColumnLayer):
    """x [.., I], whole and equal on all ranks -> y [.., O], whole and equal on all ranks.

    Forward gathers y over "tp" (label "column outputs"), backward sums the gradient of x ("column inputs").
    """

    tensor_widths: tuple[int, ...]

    def forward(self, x_I: Tensor) -> Tensor:
        """This rank's columns, then everybody's."""
        region = self.tensor_region
        y_O = gather_last(super().forward(x_I), self.tensor_widths, region.axis, COLUMN_OUTPUTS)
        region.leave(x_I.device)
        return y_O


class GatheredColumnLinear(GatheredColumnLayer, ColumnLinear):
    """An ``nn.Linear`` that holds ``out_features / size`` of its outputs and gives all; see :class:`ColumnLinear`.

    Raises:
        PlanError: the axis does not divide ``out_features``.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, axis: TensorAxis) -> None:
        super().__init__(in_features, out_features, bias, axis=axis, region=Region(axis))
        ranges = cut_parts(out_features, axis.size)
        self.tensor_widths = tuple(held(ranges, index) for index in range(axis.size))


def prepare_gathered(module: nn.Module, widths: tuple[int, ...]) -> None:
    """Give an already cut layer what it needs beside its region."""
    module.tensor_widths = widths  # type: ignore[assignment]
