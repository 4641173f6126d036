"""Sharded layers that compute this rank's positions of sequences that context ranks share."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from engine.parallel.tensor.global_tensor.context import PlainGradient
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, global_tensors_in
from engine.parallel.tensor.global_tensor.operands import fit
from engine.parallel.tensor.global_tensor.redistribute import gather_global
from engine.parallel.trace.torch_function import map_leaves


class PositionLayer(nn.Module):
    """Mixin for a layer sharded over "tp" in a model with sequences sharded over "cp".

    Each rank computes its own positions. Arguments and results are global tensors over "cp". Only arguments with
    features sharded over "cp" are communicated.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer on this rank's sequence positions and returns global tensors over "cp"."""
        return run_on_positions(super().forward, *args, **kwargs)


def run_on_positions(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``forward`` on this rank's sequence positions of all arguments; results are global tensors.

    ``forward`` must compute each position independently. Without an argument sharded along a sequence,
    ``forward`` gets the arguments as given.
    """
    args, kwargs = map_leaves(_entered, (args, kwargs))
    positions = [each for each in global_tensors_in(args, kwargs) if _has_positions(each)]
    if not positions:
        return forward(*args, **kwargs)
    given = next((each for each in positions if each.is_floating_point()), positions[0])
    args, kwargs = map_leaves(lambda value: _local(value, given), (args, kwargs))
    return map_leaves(lambda made: _of_positions(made, given), forward(*args, **kwargs))


def layer_input(x: Tensor) -> Tensor:
    """Returns ``x``; an active torch function mode may replace it by a global tensor over "cp"."""
    if has_torch_function_unary(x):
        entered: Tensor = handle_torch_function(layer_input, (x,), x)
        return entered
    return x


def _entered(value: Any) -> Any:
    return layer_input(value) if type(value) is Tensor else value


def _has_positions(x: GlobalTensor) -> bool:
    return x.views.plain is PlainGradient.PARTIAL


def _local(value: Any, given: GlobalTensor) -> Any:
    """Returns this rank's positions of an argument; a plain tensor with the rows of ``given`` is sliced."""
    if type(value) is Tensor and value.ndim and value.shape[0] == given.full[0] and given.sets[0] is not None:
        return fit(given.views, value, given.sets[:1])
    if type(value) is not GlobalTensor or not _has_positions(value):
        return value
    features = value.is_floating_point() and value.ndim > 0 and value.sets[-1] is not None
    return gather_global(value).local if features else value.local


def _of_positions(made: Any, given: GlobalTensor) -> Any:
    """Returns a result of the layer with the positions of its argument ``given``."""
    if not isinstance(made, Tensor) or made.ndim == 0:
        return made
    ids = not given.is_floating_point()
    lead = given.ndim if ids else given.ndim - 1
    sets = (*given.sets[:lead], *(None,) * (made.ndim - lead))
    return GlobalTensor(made, (*given.full[:lead], *made.shape[lead:]), sets, given.views)
