"""Linear layers sharded over the axis "tp" (Megatron-LM, Shoeybi et al. 2019, section 3).

    column    y = x A'    A sharded by outputs: x full, y sharded     backward sums x's gradient
    row       y = x B'    B sharded by inputs: x sharded, y full      forward sums y
    pair      y = gelu(x A') B'     one sum of y and one of x's gradient for both layers
    gathered  a column layer that gathers its outputs, for layers without a row layer after them
    experts   a module whose own code computes with the shards of its parameters (fused experts of an MoE)

        full tokens  ─ f ─┐
        full routing ─ f ─┴── the module on its shard of every expert ── g ── full y

    Experts sharded by their hidden width need no routing between ranks: every rank processes all tokens.

A layer of a user's model stays the same object: ``apply_plan`` changes its class to one that derives from
``ColumnLayer`` or ``RowLayer`` and from the original class, so hooks, attributes, ``isinstance`` and the user's own
forward stay. ``ColumnLinear`` and ``RowLinear`` are for model writers.

Weights are [out, in] as in ``nn.Linear``, or [in, out] as in Hugging Face's ``Conv1D``.

Shape suffixes: I inputs, O outputs, P this rank's shard of the inputs or outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from engine.errors import PlanError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import Activation
from engine.kernels.ops.linear import LinearForm, linear
from engine.parallel.model.operand_casts import is_watched
from engine.parallel.shard_table import Range
from engine.parallel.tensor.collectives import COLUMN_OUTPUTS, gather_last
from engine.parallel.tensor.deferred_linear import followed, fused_activation, fused_forward, is_conv1d, only_argument
from engine.parallel.tensor.global_tensor.rules.matmul import plus_bias
from engine.parallel.tensor.layers.parallel_region import Region
from engine.parallel.tensor.plan.ranges import cut_parts, held
from engine.parallel.tensor.tp_axis import TensorAxis


def is_cut(module: nn.Module) -> bool:
    """Returns True if ``module`` is sharded by one of the engine's tensor-parallel layers."""
    return any(_ours(base) for base in type(module).__mro__)


def has_plain_forward(module: nn.Module) -> bool:
    """Returns True if ``module`` has the unchanged forward of ``nn.Linear``, ``nn.Embedding`` or Hugging Face's
    ``Conv1D``."""
    owner = next((base for base in type(module).__mro__ if "forward" in vars(base) and not _ours(base)), nn.Module)
    return owner in (nn.Linear, nn.Embedding) or owner.__name__ == "Conv1D"


def _ours(base: type) -> bool:
    return base.__module__.startswith("engine.parallel.tensor.")


def is_replaced(x: Tensor, kernels: Kernels) -> bool:
    """Returns True if the fused operator ``kernels.ops.linear`` computes a layer's product with ``x``."""
    if not kernels.replaces(x.device) or (kernels.mode == "reference" and not kernels.main):
        return False
    # a tracer that matches operations by name must see torch's own product
    return not is_watched()


class ColumnLayer(nn.Module):
    """Linear layer with outputs sharded over "tp": x [.., I], equal on all ranks -> y [.., P], this rank's columns.

    Backward sums the gradient of x over "tp" (label "column inputs"). Under sequence parallelism x is a global tensor
    sharded along the sequence: forward gathers x, and backward reduce-scatters the gradient of x.
    """

    tensor_region: Region
    tensor_plain = False
    """True if the layer's own forward is a matrix product and nothing else."""
    tensor_activation: Activation | None = None
    """Activation fused into the layer; the model's own activation module then returns its input."""

    tensor_joined = False
    """True if a PEFT layer around this one communicates for it and for its pairs."""

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Computes this rank's columns of the output for the only argument, x [.., I]."""
        x_I = only_argument(given, named)
        if self.tensor_joined:
            return self.multiply(x_I)
        return self.tensor_leave(self.tensor_region.enter(self, x_I).multiply(self))

    def tensor_enter(self, x_I: Tensor) -> Tensor:
        """Returns a copy of ``x_I``, shared by all column layers of the same parallel region.

        Backward sums the gradient of the copy over "tp".
        """
        return self.tensor_region.enter(self, x_I).copy

    def tensor_leave(self, y_P: Tensor) -> Tensor:
        """Returns ``y_P``, this rank's columns of the output, unchanged."""
        return y_P

    def multiply(self, x_I: Tensor) -> Tensor:
        """Returns this rank's columns of the output for ``x_I``, after the activation fused into the layer, if any.

        Communicates nothing.
        """
        kernels = self.tensor_region.axis.kernels
        if self.tensor_plain and is_replaced(x_I, kernels):
            return fused_forward(self, x_I, fused_activation(self), kernels)
        return followed(self, super().forward(x_I), kernels)


class RowLayer(nn.Module):
    """Linear layer with inputs sharded over "tp": x [.., P], this rank's features -> y [.., O], equal on all ranks.

    Forward sums the products over "tp" (label "row outputs"), then adds the replicated bias. Under sequence parallelism
    the sum is reduce-scattered: y is a global tensor sharded along the sequence.
    """

    tensor_region: Region
    tensor_product: str
    tensor_joined = False
    """True if a PEFT layer around this one sums its product with those of its pairs."""

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Returns the product of the only argument, x [.., P], with this rank's weight, summed over "tp", plus the
        bias."""
        x_P = only_argument(given, named)
        if self.tensor_joined:
            return self.multiply(x_P)
        return self._after_sum(self.tensor_region.product(self, x_P))

    def tensor_enter(self, x_P: Tensor) -> Tensor:
        """Returns ``x_P``, this rank's features, unchanged."""
        return x_P

    def tensor_leave(self, y_O: Tensor) -> Tensor:
        """Returns ``y_O``, this rank's partial product, summed over "tp", plus the bias."""
        return self._after_sum(self.tensor_region.combine(y_O))

    def _after_sum(self, y_O: Tensor) -> Tensor:
        self.tensor_region.leave(y_O.device)
        return plus_bias(y_O, self._parameters["bias"])

    def multiply(self, x_P: Tensor) -> Tensor:
        """Returns this rank's partial product with ``x_P``, before the sum over "tp" and without the bias."""
        weight: Any = self.weight
        kernels = self.tensor_region.axis.kernels
        if self.tensor_product != "own" and is_replaced(x_P, kernels):
            return linear(x_P, weight, None, LinearForm(transposed=self.tensor_product == "conv1d"), kernels)
        if self.tensor_product == "linear":
            return functional.linear(x_P, weight)
        if self.tensor_product == "conv1d":
            return torch.matmul(x_P, weight)
        return self._own_forward_without_bias(x_P)

    def _own_forward_without_bias(self, x_P: Tensor) -> Tensor:
        bias = self._parameters["bias"]
        self._parameters["bias"] = None
        try:
            y_O: Tensor = super().forward(x_P)
            return y_O
        finally:
            self._parameters["bias"] = bias


class ColumnLinear(ColumnLayer, nn.Linear):
    """``nn.Linear`` with sharded outputs: each rank stores ``out_features / size`` of them, for ``size`` ranks of
    ``axis``.

    Seed all ranks equally, so that their shards belong to one weight. ``region``: parallel region, which column layers
    with a common input (query, key, value) share with the next row layer.

    Raises:
        PlanError: the number of ranks does not divide ``out_features``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, axis: TensorAxis, region: Region | None = None
    ) -> None:
        _check_divides("out_features", out_features, axis.size)
        super().__init__(in_features, out_features, bias)
        keep_rows(self, 0, cut_parts(out_features, axis.size), axis.index)
        prepare_column(self, region or Region(axis))


class RowLinear(RowLayer, nn.Linear):
    """``nn.Linear`` with sharded inputs: each rank stores ``in_features / size`` of them, for ``size`` ranks of
    ``axis``.

    Seed all ranks equally, so that their shards belong to one weight. ``region``: parallel region of the column layers
    before it.

    Raises:
        PlanError: the number of ranks does not divide ``in_features``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, axis: TensorAxis, region: Region | None = None
    ) -> None:
        _check_divides("in_features", in_features, axis.size)
        super().__init__(in_features, out_features, bias)
        keep_rows(self, 1, cut_parts(in_features, axis.size), axis.index)
        prepare_row(self, region or Region(axis))


def _check_divides(what: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise PlanError(f"{what} = {size} does not divide among {ranks} tensor ranks; choose a multiple of {ranks}.")


def prepare_column(module: nn.Module, region: Region) -> None:
    """Adds the column layer ``module``, with its weight already sharded, to ``region``."""
    plain = has_plain_forward(module)
    region.add(module, plain)
    module.tensor_region, module.tensor_plain = region, plain  # type: ignore[assignment]
    weight: Any = module.weight
    if is_conv1d(module):
        module.nf = weight.shape[1]
    else:
        module.out_features = weight.shape[0]


def prepare_row(module: nn.Module, region: Region) -> None:
    """Sets the parallel region and the input size of the row layer ``module``, with its weight already sharded."""
    module.tensor_region = region  # type: ignore[assignment]
    weight: Any = module.weight
    plain = has_plain_forward(module)
    if is_conv1d(module):
        module.tensor_product = "conv1d" if plain else "own"  # type: ignore[assignment]
        module.nx = weight.shape[0]
    else:
        module.tensor_product = "linear" if plain else "own"  # type: ignore[assignment]
        module.in_features = weight.shape[1]


def keep_rows(module: nn.Module, dim: int, ranges: tuple[Range, ...], index: int) -> None:
    """Replaces the weight of ``module`` by the shard of rank ``index`` along ``dim``; for ``dim`` 0 also the bias.

    ``ranges``: ranges of rows; each rank in a range's ``holders`` stores the whole range.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if name == "weight" or dim == 0:
            parameter.data = local_rows(parameter.data, dim, ranges, index)


def local_rows(full: Tensor, dim: int, ranges: tuple[Range, ...], index: int) -> Tensor:
    """Returns the rows of ``full`` along ``dim`` that rank ``index`` stores, as a contiguous copy.

    ``ranges``: ranges of rows; each rank in a range's ``holders`` stores the whole range.
    """
    return torch.cat([full.narrow(dim, r.start, r.stop - r.start) for r in ranges if index in r.holders], dim)


class GatheredColumnLayer(ColumnLayer):
    """Column layer that gathers its outputs over "tp": x [.., I] -> y [.., O], both equal on all ranks.

    The gather in forward has the label "column outputs" in reports. Backward sums the gradient of x, with the label
    "column inputs".
    """

    tensor_widths: tuple[int, ...]

    def tensor_leave(self, y_P: Tensor) -> Tensor:
        """Returns the full output, gathered over "tp" from ``y_P``, the columns of each rank."""
        y_O = gather_last(y_P, self.tensor_widths, self.tensor_region.axis, COLUMN_OUTPUTS)
        self.tensor_region.leave(y_O.device)
        return y_O


class GatheredColumnLinear(GatheredColumnLayer, ColumnLinear):
    """``nn.Linear`` with sharded outputs that are gathered over ``axis``, so that every rank returns all
    ``out_features``.

    The arguments are the sizes of the full layer. Seed all ranks equally, so that their shards belong to one weight.

    Raises:
        PlanError: the number of ranks does not divide ``out_features``.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, axis: TensorAxis) -> None:
        super().__init__(in_features, out_features, bias, axis=axis, region=Region(axis))
        ranges = cut_parts(out_features, axis.size)
        self.tensor_widths = tuple(held(ranges, index) for index in range(axis.size))


def prepare_gathered(module: nn.Module, widths: tuple[int, ...]) -> None:
    """Sets ``widths``, the number of output features on each rank, in a column layer that gathers its outputs."""
    module.tensor_widths = widths  # type: ignore[assignment]


class ExpertsLayer(nn.Module):
    """Module with sharded parameters, such as fused MoE experts; its partial outputs are summed over "tp".

    Inputs and summed outputs are equal on all ranks. The sum has the label "row outputs" in reports. Backward sums the
    gradients of the float inputs, with the label "column inputs".
    """

    tensor_region: Region
    tensor_inside = False
    """True: the forward runs within :meth:`tensor_summed`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's original forward on this rank's shards and sums all float outputs over "tp"."""
        if self.tensor_inside:
            return self.tensor_forward(*args, **kwargs)
        return self.tensor_summed(self.tensor_forward, args, kwargs)

    @property
    def tensor_forward(self) -> Callable[..., Any]:
        """The module's original forward, which returns partial sums."""
        return super().forward

    def tensor_summed(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls ``run(*args, **kwargs)`` and returns its result, with float tensors summed over "tp".

        Backward sums the gradients of the float arguments over "tp".
        """
        region = self.tensor_region
        device = next(self.parameters()).device

        def enter(leaf: Any) -> Any:
            return region.enter(self, leaf, again=True).copy if _is_float(leaf) else leaf

        region.leave(device)
        args, kwargs = pytree.tree_map(enter, (args, kwargs), is_leaf=_is_float)
        out = run(*args, **kwargs)
        out = pytree.tree_map(lambda leaf: region.combine(leaf) if _is_float(leaf) else leaf, out)
        region.leave(device)
        return out


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def prepare_experts(module: nn.Module, region: Region) -> None:
    """Sets the parallel region of ``module``, which computes with the shards of its experts."""
    region.add(module, plain=False)
    module.tensor_region = region  # type: ignore[assignment]
