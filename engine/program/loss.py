"""Loss of a microbatch as (sum, weight).

A 0-dim mean is a sum of weight 1, so that every microbatch weighs the same. A ``loss_fn`` that returns (sum, weight)
makes the global loss sum/weight exact for unequal token counts.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.model.user_code import call_user_code
from engine.program.batch import Batch

LossFunction = Callable[[Any, Batch], Any]


class WeightedLoss(NamedTuple):
    """Sum and weight of a microbatch's loss; the global loss is the total sum divided by the total weight."""

    sum: Tensor
    """Sum of losses, a 0-dim floating tensor."""
    weight: Tensor | float
    """Number of summed losses, such as tokens."""
    metrics: tuple[Tensor | float, ...] = ()
    """Sum and weight of each metric: (sum, weight, sum, weight, ...), in the order of ``monitor.metrics``."""


def find_loss(
    output: Any, batch: Batch, loss_fn: LossFunction | None, names: Sequence[str] | None = None, weight: float = 1.0
) -> WeightedLoss:
    """Returns the loss of one microbatch, from ``loss_fn`` or from the model's ``output``.

    ``loss_fn`` returns a 0-dim tensor or (sum, weight), optionally followed by a dict of metrics. Without ``loss_fn``,
    the loss is ``output.loss``, ``output["loss"]``, or the only 0-dim floating tensor.

    ``names``: metrics that the run averages; None: none. ``weight``: weight of a loss that comes without one.

    Raises:
        EngineError: there is no loss, or it is not a 0-dim floating tensor; a metric is missing, is not in ``names``,
            or is not a number.
    """
    if loss_fn is None:
        metrics: Mapping[str, Any] = {}
        found = _loss_in(output)
        loss = WeightedLoss(check_scalar(found, "the loss that the model returned"), 1.0)
    else:
        found, metrics = _without_metrics(call_user_code(loss_fn, (output, batch), {}))
        loss = check_pair(found, "the {} that loss_fn returned")
    if weight != 1.0 and isinstance(found, Tensor):
        loss = WeightedLoss(loss.sum * weight, weight)
    return loss if names is None else loss._replace(metrics=_summands(metrics, names))


def _without_metrics(found: Any) -> tuple[Any, Mapping[str, Any]]:
    """Splits the result of loss_fn into loss and metrics."""
    if isinstance(found, tuple) and len(found) > 1 and isinstance(found[-1], Mapping):
        return (found[0] if len(found) == 2 else found[:-1]), found[-1]
    return found, {}


def with_metrics(loss: WeightedLoss, metrics: Mapping[str, Any], names: Sequence[str]) -> WeightedLoss:
    """Returns ``loss`` with ``metrics``, a dict by name that a user's loop passes to ``backward``.

    ``names``: all metrics in ``monitor.metrics``; absent metrics get weight 0.

    Raises:
        EngineError: a metric is not named in ``monitor.metrics``, or is not a number.
    """
    _check_named(metrics, names, "backward was given")
    nothing = dict.fromkeys(names, (0.0, 0.0))
    return loss._replace(metrics=_pairs(nothing | dict(metrics), names, "backward was given"))


def _check_named(metrics: Mapping[str, Any], names: Sequence[str], by: str) -> None:
    if unnamed := sorted(set(metrics) - set(names)):
        raise EngineError(
            f'{by} the metric "{unnamed[0]}", which monitor.metrics does not name; add it to monitor.metrics, so that '
            "all ranks average it, or remove it from the metrics."
        )


def _summands(metrics: Mapping[str, Any], names: Sequence[str]) -> tuple[Tensor | float, ...]:
    _check_named(metrics, names, "loss_fn returned")
    if missing := [name for name in names if name not in metrics]:
        raise EngineError(
            f'loss_fn returned no metric "{missing[0]}", which monitor.metrics names; return (loss, {{"{missing[0]}": '
            "value}) for every microbatch, or remove it from monitor.metrics."
        )
    return _pairs(metrics, names, "loss_fn returned")


def _pairs(metrics: Mapping[str, Any], names: Sequence[str], by: str) -> tuple[Tensor | float, ...]:
    """Returns sum and weight of each metric; a plain value has weight 1."""
    pairs = [
        value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0) for value in map(metrics.get, names)
    ]
    return tuple(_number(part, name, by) for name, pair in zip(names, pairs, strict=True) for part in pair)


def _number(value: Any, name: str, by: str) -> Tensor | float:
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex():
        return value.detach()
    if isinstance(value, Real):  # of numpy too
        return float(value)
    given = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} " * value.is_complex()
        given = f"a {kind}tensor of shape {tuple(value.shape)}"
    raise EngineError(f'the metric "{name}" that {by} is {given}; give a number, a 0-dim tensor, or (sum, weight).')


def check_pair(found: Any, what: str = "the {} given to backward") -> WeightedLoss:
    """Converts a 0-dim loss (weight 1) or a pair (sum, weight) to a :class:`WeightedLoss`.

    ``what``: subject of error texts; ``{}`` in it becomes "loss", "sum" or "weight".

    Raises:
        EngineError: ``found`` is neither a loss nor a pair.
    """
    if isinstance(found, tuple) and len(found) == 2:
        return WeightedLoss(check_scalar(found[0], what.format("sum")), _check_weight(found[1], what.format("weight")))
    return WeightedLoss(check_scalar(found, what.format("loss")), 1.0)


def check_scalar(loss: Any, what: str) -> Tensor:
    """Checks that ``loss`` is a 0-dim floating tensor, and returns it. ``what``: subject of the error message.

    Raises:
        EngineError: ``loss`` is anything else.
    """
    if not isinstance(loss, Tensor):
        given = f"a {type(loss).__name__}"
    elif loss.ndim or not loss.is_floating_point():
        given = f"a {str(loss.dtype).removeprefix('torch.')} tensor of shape {tuple(loss.shape)}"
    else:
        return loss
    raise EngineError(f"{what} is {given}; a loss is a 0-dim floating tensor: return a mean, or (sum, weight).")


def _check_weight(weight: Any, what: str) -> Tensor | float:
    if isinstance(weight, Tensor) and weight.ndim == 0:
        if weight.requires_grad:
            raise EngineError(
                f"{what} requires a gradient, but the second value of a pair (sum, weight) is a constant number, by "
                "which the engine divides the sum; add both values if the second is another loss, or else detach it."
            )
        return weight
    if isinstance(weight, Real):
        return float(weight)
    given = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
    raise EngineError(f"{what} is {given}; give a pair (sum, weight) with a number or a 0-dim tensor as weight.")


def check_trainable(loss: Tensor) -> None:
    """Checks that ``loss`` requires a gradient.

    Raises:
        EngineError: the loss does not depend on any trainable parameter.
    """
    if not loss.requires_grad:
        raise EngineError(
            "the loss does not depend on any trainable parameter; check requires_grad, torch.no_grad and detach in "
            "the model and the loss function."
        )


def has_loss(output: Any) -> bool:
    """Returns True if a model output contains a loss: a ``loss`` entry, a 0-dim tensor as output, or a tuple with
    exactly one 0-dim floating tensor.
    """
    try:
        found = _loss_in(output)
    except EngineError:
        return False
    return found is not output or found.ndim == 0


def _loss_in(output: Any) -> Any:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        scalars = [part for part in output if _is_scalar(part)]
        if len(scalars) == 1:
            return scalars[0]
    raise EngineError(
        f"the model returned a {type(output).__name__} without a loss; pass labels to the model, or "
        "loss_fn=... to engine.initialize."
    )


def _is_scalar(part: Any) -> bool:
    return isinstance(part, Tensor) and part.ndim == 0 and torch.is_floating_point(part)


LABEL = "gathered rows"
_ARGUMENT = "gather_rows"


class RowGather:
    """Differentiable all-gather of rows over dp, for contrastive losses that compare rows of all data ranks.

        forward     rows [b, ...] of each data rank -> [N*b, ...] on all N of them      all-gather over dp
        backward    gradients [N*b, ...] of each rank -> sum for its own rows [b, ...]  reduce-scatter over dp

    Before :meth:`open`, it communicates nothing and returns tensors that only have the right shape, for planning.
    Parameters get the gradient of the mean of all ranks' losses (weighted for losses (sum, weight)), so that a loss of
    the whole batch that every rank computes counts once.
    """

    def __init__(self, ranks: int = 1, uneven: bool = False) -> None:
        """Takes ``uneven``: data ranks have different numbers of microbatches, so that nothing can be gathered."""
        self.ranks, self._uneven = ranks, uneven and ranks > 1
        self.comm: Comm | None = None

    def open(self, comm: Comm) -> None:
        """Enables communication through ``comm``."""
        self.comm = comm

    def __call__(self, rows: Tensor) -> Tensor:
        """Gathers rows; see :meth:`engine.Engine.gather_rows`."""
        self._refuse_uneven()
        if not isinstance(rows, Tensor) or not rows.ndim:
            given = "a 0-dim tensor" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise EngineError(
                f"gather_rows was given {given}; give a tensor with the rows of this rank along its first dim."
            )
        gathered: Tensor = rows if self.ranks == 1 else _GatherRows.apply(rows, self)  # type: ignore[no-untyped-call]
        return gathered

    def given_to(self, loss_fn: LossFunction | None) -> LossFunction | None:
        """Returns ``loss_fn``, with this object bound to its parameter ``gather_rows`` if it has one.

        Raises:
            EngineError: ``loss_fn`` has the parameter, but data ranks run different numbers of microbatches.
        """
        try:
            named = loss_fn is not None and _ARGUMENT in inspect.signature(loss_fn).parameters
        except (TypeError, ValueError):  # a callable without a signature
            return loss_fn
        if named:
            self._refuse_uneven()
        return partial(loss_fn, **{_ARGUMENT: self}) if loss_fn is not None and named else loss_fn

    def _refuse_uneven(self) -> None:
        if self._uneven:
            raise EngineError(
                "gather_rows needs a forward of every data rank, but with uneven_microbatches they run different "
                "numbers of them; set uneven_microbatches to false, or compute the loss without gather_rows."
            )


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: RowGather) -> Tensor:
        ctx.gather = gather
        if gather.comm is None or rows.is_meta:
            return torch.cat([rows] * gather.ranks)
        full = rows.new_empty(gather.ranks * rows.shape[0], *rows.shape[1:])
        gather.comm.all_gather(full.view(-1), rows.contiguous().view(-1), gather.comm.grid.rows, LABEL).wait()
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gather: RowGather = ctx.gather
        own = grad.new_empty(grad.shape[0] // gather.ranks, *grad.shape[1:])
        if gather.comm is not None:
            full = grad.clone(memory_format=torch.contiguous_format)  # a reduce-scatter may overwrite it
            gather.comm.reduce_scatter(own.view(-1), full.view(-1), gather.comm.grid.rows, LABEL).wait()
        return own, None
