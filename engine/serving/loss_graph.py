"""Losses that a client uploads as a graph of torch calls: data from an allow-list, never code.

Nodes are placeholders, calls of functions and methods, and an output (loss, metrics). Before a node runs, it runs on
the meta device, which computes its result's size without memory; a graph therefore cannot allocate more than
``MOST_ELEMENTS`` per result.
"""

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.serving.losses import ServedError

MOST_NODES = 4096
MOST_ELEMENTS = 1 << 24
"""Largest number of elements of a node's result."""


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


_OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        name: getattr(operator, name)
        for name in _words(
            "add sub mul truediv floordiv mod pow neg pos getitem lt le gt ge eq ne and_ or_ xor invert abs matmul"
        )
    }
)
_TORCH = _words(
    "abs acos add all amax amin any arange asin atan atan2 bitwise_and bitwise_not bitwise_or broadcast_tensors bmm",
    "cat ceil clamp clip clone cos cosh cummax cummin cumprod cumsum diff div dot einsum eq erf erfc exp exp2 expm1",
    "eye flatten flip floor full full_like gather ge gt index_select isfinite isinf isnan le lerp linspace log log10",
    "log1p log2 logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logit logsumexp lt masked_fill",
    "masked_select matmul max maximum mean median min minimum mul nan_to_num ne neg norm ones ones_like permute pow",
    "prod quantile reciprocal relu reshape roll round rsqrt scatter scatter_add sigmoid sign sin sinh softmax",
    "log_softmax sort sqrt square squeeze stack std sub sum tan tanh tensordot topk transpose tril triu trunc",
    "unsqueeze var where zeros zeros_like",
)
_FUNCTIONAL = _words(
    "softplus relu sigmoid logsigmoid softmax log_softmax mse_loss l1_loss huber_loss smooth_l1_loss kl_div pad",
    "binary_cross_entropy_with_logits normalize cosine_similarity elu gelu silu tanh threshold",
)
_METHODS = _TORCH | _words(
    "detach float double int long bool view view_as expand expand_as repeat t size dim numel type_as to unbind chunk",
    "split clamp_min clamp_max contiguous nonzero",
)
_ATTRIBUTES = _words("shape dtype device ndim T mT")
_FORBIDDEN = frozenset({"out", "generator", "names", "pin_memory"})
"""Keyword arguments that write into other tensors or read global state."""
_OF_CONTENT = frozenset({"masked_select", "nonzero"})
"""Calls with a result of a size that depends on values, and is at most the arguments' size."""

Values = dict[str, Any]


class LossGraph:
    """Custom loss that a client uploads as a graph of torch calls: ``loss, metrics = graph(logprobs, *inputs)``."""

    def __init__(self, text: str, inputs: Sequence[str]) -> None:
        """Checks the graph.

        Args:
            text: graph as JSON: {"nodes": [{"op", "name", "target", "args", "kwargs"}]}.
            inputs: names of the placeholders in order; the first receives the log-probabilities.

        Raises:
            ServedError: the text is no graph, or a node calls something that is not allowed.
        """
        self._inputs = tuple(inputs)
        try:
            nodes = json.loads(text)["nodes"]
            self._nodes = [
                (node["op"], str(node["name"]), node["target"], node["args"], node["kwargs"]) for node in nodes
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ServedError(
                f"the loss is no graph with nodes of op, name, target, args and kwargs: {error}."
            ) from error
        if len(self._nodes) > MOST_NODES:
            raise ServedError(f"the loss has {len(self._nodes)} nodes, but at most {MOST_NODES} are run; shorten it.")
        for op, _, target, _, kwargs in self._nodes:
            _check_node(op, target, kwargs)

    def run(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, float]]:
        """Returns the 0-dim loss of one datum, attached to autograd, and the client's metrics by name.

        Args:
            logprobs: log-probabilities of the datum's target tokens.
            inputs: the datum's other inputs by name.

        Raises:
            ServedError: an input is missing, the output is no scalar loss, or an operation of the loss fails or makes
                too large a tensor.
        """
        values: Values = {}
        given = iter([logprobs, *(self._input(name, inputs) for name in self._inputs[1:])])
        for op, name, target, args, kwargs in self._nodes:
            if op == "placeholder":
                values[name] = next(given, None)
                continue
            arguments = [_decode(arg, values, logprobs) for arg in args]
            if op == "output":
                return _outcome(arguments)
            named = {key: _decode(arg, values, logprobs) for key, arg in kwargs.items()}
            values[name] = _call(target, _callable(op, target), arguments, named)
        raise ServedError("the loss has no output node; return (loss, metrics) from the function.")

    def _input(self, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
        if name not in inputs:
            raise ServedError(f"the custom loss needs loss_fn_inputs[{name!r}], which the datum lacks; send it.")
        return inputs[name]


def _check_node(op: str, target: Any, kwargs: Any) -> None:
    if op in ("placeholder", "output"):
        return
    if op not in ("call_function", "call_method") or not isinstance(target, str) or not isinstance(kwargs, dict):
        raise ServedError(f"a node of the loss is {op!r}, but a loss only calls functions and methods of tensors.")
    _callable(op, target)
    if refused := sorted(_FORBIDDEN & set(kwargs)):
        raise ServedError(f"a node of the loss passes {refused[0]!r} to {target}, which a loss may not; leave it out.")


def _callable(op: str, target: str) -> Callable[..., Any]:
    module, _, name = target.rpartition(".")
    if op == "call_method" and target in _METHODS:
        return lambda tensor, *args, **kwargs: getattr(_tensor(tensor), target)(*args, **kwargs)
    if op == "call_function":
        if module in ("operator", "_operator") and name in _OPERATORS:
            return partial(_operate, name)
        if module == "torch" and name in _TORCH:
            return getattr(torch, name)  # type: ignore[no-any-return]
        if module == "torch.nn.functional" and name in _FUNCTIONAL:
            return getattr(functional, name)  # type: ignore[no-any-return]
        if target in ("getattr", "builtins.getattr"):
            return _attribute
    raise ServedError(f"the loss calls {target}, which is not on the server's list; use calls of torch on tensors.")


def _operate(name: str, *args: Any) -> Any:
    """Applies an operator of Python; without a tensor only to numbers, since a tuple times a number needs memory."""
    numbers = all(isinstance(one, int | float) for one in args)
    plain = name == "getitem" or (numbers and name != "pow")
    if not plain and not any(isinstance(one, Tensor) for one in args):
        kinds = ", ".join(type(one).__name__ for one in args)
        raise ServedError(f"the loss applies {name} to {kinds}; apply it to a tensor.")
    return _OPERATORS[name](*args)


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ServedError(f"the loss calls a method of a {type(value).__name__}; only methods of tensors are run.")
    return value


def _attribute(value: Any, name: str) -> Any:
    if name not in _ATTRIBUTES:
        raise ServedError(f"the loss reads the attribute {name!r}; it may read {', '.join(sorted(_ATTRIBUTES))}.")
    return getattr(_tensor(value), name)


def _call(target: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Runs a node, after the meta device has shown that its result is small enough."""
    try:
        if target.rpartition(".")[2] not in _OF_CONTENT and not _picks(target, args):
            _check_size(target, pytree.tree_map(_on_meta, (args, kwargs)), function)
        return function(*args, **kwargs)
    except ServedError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, OverflowError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ServedError(f"the loss failed in {target}: {line}") from error


def _picks(target: str, args: list[Any]) -> bool:
    """Returns True for an index with a mask: its result is no larger than the tensor."""
    masks = [one for one in pytree.tree_leaves(args[1:2]) if isinstance(one, Tensor) and one.dtype is torch.bool]
    return target.endswith("getitem") and bool(masks)


def _check_size(target: str, given: tuple[list[Any], dict[str, Any]], function: Callable[..., Any]) -> None:
    args, kwargs = given
    with torch.no_grad(), torch.device("meta"):
        made = function(*args, **kwargs)
    largest = max((leaf.numel() for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)), default=0)
    if largest > MOST_ELEMENTS:
        raise ServedError(f"{target} of the loss makes {largest} elements, but a result has at most {MOST_ELEMENTS}.")


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _outcome(arguments: list[Any]) -> tuple[Tensor, Mapping[str, float]]:
    pair = arguments[0] if arguments else None
    loss, metrics = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (pair, {})
    if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
        raise ServedError("the custom loss returned no scalar tensor; return (loss, metrics) with a 0-dim loss.")
    return loss, dict(_metrics(metrics if isinstance(metrics, Mapping) else {}))


def _metrics(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            yield str(name), float(value.detach())
        elif isinstance(value, int | float):
            yield str(name), float(value)


def _decode(arg: Any, values: Values, logprobs: Tensor) -> Any:
    if isinstance(arg, list):
        return [_decode(part, values, logprobs) for part in arg]
    if not isinstance(arg, dict):
        return arg
    if len(arg) != 1:
        raise ServedError(f"an argument of the loss has the keys {sorted(arg)}; it must have one that names its kind.")
    ((kind, value),) = arg.items()
    if kind == "ref":
        if not isinstance(value, str) or value not in values:
            raise ServedError(f"the loss refers to the node {value!r} before it is computed.")
        return values[value]
    if kind in ("tuple", "slice") and isinstance(value, list):
        parts = tuple(_decode(part, values, logprobs) for part in value)
        return parts if kind == "tuple" else slice(*parts)
    if kind == "dict" and isinstance(value, dict):
        return {name: _decode(part, values, logprobs) for name, part in value.items()}
    return _constant(kind, value, logprobs)


def _constant(kind: str, value: Any, logprobs: Tensor) -> Any:
    if kind == "float":
        return float(value)
    if kind == "ellipsis":
        return ...
    if kind == "device":
        return logprobs.device
    types = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
    found = getattr(torch, value, None) if kind in types and isinstance(value, str) and value.isidentifier() else None
    if found is None or not isinstance(found, types[kind]):
        raise ServedError(f"an argument of the loss is {kind} {value!r}, which is no value of a graph.")
    return found
