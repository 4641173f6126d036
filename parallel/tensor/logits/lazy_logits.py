"""Lazy logits: hidden states and head in place of logits, and the functions that leave them uncomputed.

    from a head      hidden states, weight and bias   computed as: their product
    from logits      the same after a view, a slice   computed as: that function of the source's logits

Functions that only change shapes act on the hidden states (``logits.rules``); a wider dtype is recorded; a loss
computes the logits in chunks. Every other function computes the logits first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.errors import EngineError
from engine.parallel.tensor.logits.logit_shard import LateProduct, LogitShard
from engine.parallel.tensor.logits.losses import logsumexp, sharded_cross_entropy
from engine.parallel.tensor.logits.rules import CONVERSIONS, LOGIT_RULES, SHAPES, VIEWS, LogitRule, is_view


def _widened(func: Callable[..., Any], x: LogitShard, *args: Any, **kwargs: Any) -> Any:
    """Applies ``float`` and similar conversions; an empty tensor shows the new dtype."""
    product = x.product
    if product is None or any(isinstance(arg, LogitShard) for arg in (*args, *kwargs.values())):
        return NotImplemented
    before = torch.empty(0, dtype=x.dtype, device=x.local.device)
    after = func(before, *args, **kwargs)
    if not isinstance(after, Tensor) or after.device != before.device or kwargs.get("copy"):
        return NotImplemented
    if after.dtype == x.dtype:
        return x
    if after.dtype == torch.float64 or torch.promote_types(x.dtype, after.dtype) != after.dtype:
        return NotImplemented
    wider = LateProduct(product.weight, product.bias, after.dtype, product.kernels)
    return LogitShard(x.local, x.vocabulary, x.dim, x.softmax, wider)


def _contiguous(func: Callable[..., Any], x: LogitShard, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else x.now(x.local, same=True)


def _detached(func: Callable[..., Any], x: LogitShard) -> Any:
    return x.detached()


def _viewed(func: Callable[..., Any], x: LogitShard, *sizes: Any, **kwargs: Any) -> Any:
    """Runs ``view`` as ``reshape``, because hidden states may have another memory layout than the logits."""
    return LOGIT_RULES[func](Tensor.reshape, x, *sizes, **kwargs)


def _functions(*names: str) -> list[Callable[..., Any]]:
    return [getattr(owner, name) for owner in (torch, Tensor) for name in names]


LATE_RULES: Mapping[Callable[..., Any], LogitRule] = MappingProxyType(
    {func: LOGIT_RULES[func] for func in SHAPES}
    | dict.fromkeys(CONVERSIONS, _widened)
    | dict.fromkeys(VIEWS, _viewed)
    | dict.fromkeys(_functions("detach"), _detached)
    | {Tensor.contiguous: _contiguous, Tensor._is_view: is_view, functional.cross_entropy: sharded_cross_entropy}
    | dict.fromkeys((*_functions("logsumexp"), torch.special.logsumexp), logsumexp)
)


def late_answer(func: Callable[..., Any], x: LogitShard, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of ``func`` on lazy (not yet computed) logits with the hidden states ``x``: for a view or
    similar, a shard with changed hidden states; for a loss or similar, its value; ``NotImplemented`` if ``func`` needs
    the computed logits. ``args``, ``kwargs``: other arguments of ``func``.
    """
    rule = LATE_RULES.get(func)
    return NotImplemented if rule is None else rule(func, x, *args, **kwargs)


class LogitsSource(Protocol):
    """Interface of logits from which lazy (not yet computed) logits are made, for example by a view."""

    @property
    def part(self) -> LogitShard:
        """This rank's shard of the logits. If they are not computed yet, a read computes them."""

    @property
    def waits(self) -> bool:
        """True while the logits are not computed yet."""


@dataclass(frozen=True, slots=True, eq=False)
class LazyLogits:
    """Logits that are not computed yet: their hidden states, and the callback ``compute`` for this rank's shard of the
    logits.
    """

    part: LogitShard
    """Shard of the hidden states, with the head's product."""
    compute: Callable[[], LogitShard]
    source: LogitsSource | None = None
    arrivals: list[Callable[[Tensor], None]] = field(default_factory=list)
    """Functions that are called when a backward reaches the logits, with the gradient of the logits or of a loss."""
    version: int = field(init=False)
    """Number of in-place writes to the hidden states so far."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.part.local._version)

    def check(self) -> None:
        """Checks that no code has written to the hidden states.

        Raises:
            EngineError: the hidden states have changed, so the logits are lost.
        """
        if self.part.local._version != self.version:
            raise EngineError(_CHANGED)


_CHANGED = (
    "logits were read for the first time after their weights or hidden states had changed, but lazy logits "
    "are computed at their first read; read them before the step, or store output.logits.clone()."
)


def product_of(hidden: LogitShard, weight: Tensor) -> Callable[[], LogitShard]:
    """Returns a function that computes lazy logits, with gradients, from the hidden states, weight and bias that
    ``hidden`` contains. ``weight``: the head's parameter, checked for changes.

    Raises:
        EngineError: raised by the returned function, if the head or the hidden states have changed, or if ZeRO has
            freed the weight.
    """
    product = hidden.product
    assert product is not None
    kept = weight, hidden.local, product.bias

    def state() -> tuple[int, ...]:
        return tuple(tensor._version for tensor in kept if tensor is not None)

    before = state()

    def compute() -> LogitShard:
        if state() != before:
            raise EngineError(_CHANGED)
        try:
            with torch.enable_grad(), torch.autocast(hidden.local.device.type, enabled=False):
                local = functional.linear(hidden.local, product.weight, product.bias)
        except EngineError as error:  # the weight is not gathered any more
            raise EngineError(
                "logits were read for the first time after the backward, and ZeRO 3 has freed the weight from which "
                "lazy logits are computed; read them before eng.backward(), or store output.logits.clone()."
            ) from error
        return LogitShard(local, hidden.vocabulary, hidden.dim, hidden.softmax)

    return compute


def derived(source: LogitsSource, part: LogitShard, change: Callable[[LogitShard], Any]) -> LazyLogits:
    """Returns the lazy result of ``change``, which applies an operation such as a view, on the logits of ``source``.
    ``part``: result of the same operation on the hidden states of ``source``, computed by the caller.
    """
    graded = torch.is_grad_enabled()

    def compute() -> LogitShard:
        logits = source.part
        with torch.set_grad_enabled(graded):
            found = change(logits)
        assert isinstance(found, LogitShard), "the rule took the hidden states but refuses the logits"
        return found

    return LazyLogits(part, compute, source)
