"""State that all global tensors of a model share: the axis, the rules, entered tensors, records for the plan."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.parallel.model.rng_streams import draw_alike, draw_apart
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError, Sets
from engine.parallel.tensor.tp_axis import TensorAxis

Result = TypeVar("Result")
TensorRule = Callable[..., Any]
"""Function (context, function, *args, **kwargs) that returns the function's result on global tensors."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Table of rules that run torch functions on the shards of global tensors (DTensor-like).

    ``fallback`` runs all other functions.
    """

    by_function: Mapping[Any, TensorRule]
    fallback: TensorRule
    """Rule for all functions without a specific rule."""

    def __deepcopy__(self, memo: object) -> "Rules":
        """Returns ``self``: rules never change, so a copied model shares them."""
        return self


class PlainGradient(Enum):
    """Kind of gradient of a plain replicated tensor used with global tensors: equal on all ranks, or partial."""

    EQUAL = auto()
    """The gradient is equal on all ranks too: a sum follows where the tensor meets a shard (tensor parallelism)."""
    PARTIAL = auto()
    """Each rank has a part of the gradient: ZeRO sums those of parameters (context parallelism)."""


class GlobalTensorContext:
    """Settings and caches of all global tensors (DTensor-like) of a sharded model.

    ``sequence``: True for sequence parallelism. ``regather``: True frees the gathered inputs of column layers after
    forward and gathers them again in backward.
    """

    plain = PlainGradient.EQUAL
    """Gradient of the plain tensors that meet global tensors of this context."""

    def __init__(self, axis: TensorAxis, rules: Rules, sequence: bool = False, regather: bool = False) -> None:
        self.axis, self.sequence, self.regather = axis, sequence, regather
        self.rules = rules
        self.gathers: dict[str, int] = {}
        """The number of gathers by each function without a suitable rule, by the function's name."""
        self.partial: set[nn.Parameter] = set()
        """The plain parameters that met a global tensor: each rank has a partial gradient, to be summed once a step."""
        self.planned: frozenset[nn.Parameter] | None = None
        """In training, the parameters summed once a step; a parameter that was not partial in the plan's example is
        summed at each use."""
        self.equal: set[nn.Parameter] = set()
        """Parameters that plain code uses as well: their gradient is summed at each use, as for any plain tensor."""
        self.reached_below: str | None = None
        """The name of the caller that has asked a global tensor for memory."""
        self._entered: dict[Hashable, tuple[Tensor, int, Tensor]] = {}
        """(tensor, its version, its copy) by key: a write in place ends the equality of tensor and copy."""
        self._found: dict[Hashable, Any] = {}

    def sums_once(self, parameter: nn.Parameter) -> bool:
        """Returns True if the gradient of ``parameter`` is summed over the ranks only at the end of the step.

        False: backward sums it at each use.
        """
        return self.planned is None or parameter in self.planned

    def clear(self) -> None:
        """Drops the copies that :meth:`entered` has cached; called at the end of a block's forward."""
        self._entered.clear()

    def entered(self, key: Hashable, given: Tensor, enter: Callable[[Callable[[], None]], Tensor]) -> Tensor:
        """Returns the copy of ``given`` that ``enter`` makes, or the cached copy of an earlier call with the same
        ``key``.

        ``key`` must contain the id of ``given``, a plain tensor. ``enter(drop)`` makes the copy for operations with
        global tensors. The copy's backward must call ``drop()``, which removes it from the cache.
        """
        hit = self._entered.get(key)
        if hit is not None and hit[0] is given and hit[1] == given._version:
            return hit[2]
        copied = enter(lambda: self._forget(key, given))
        if copied.requires_grad:  # without a gradient, no backward would call ``passed``
            self._entered[key] = given, given._version, copied
        return copied

    def _forget(self, key: Hashable, given: Tensor) -> None:
        hit = self._entered.get(key)
        if hit is not None and hit[0] is given:
            del self._entered[key]

    def find(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Returns ``make()``, or its result cached under ``key``. A NoRuleError is cached and raised again."""
        try:
            found = self._found[key]
        except KeyError:
            try:
                found = make()
            except NoRuleError as problem:
                found = NoRuleError(*problem.args)  # the original's traceback would keep its frames' tensors alive
            self._found[key] = found
        if isinstance(found, NoRuleError):
            raise NoRuleError(*found.args)
        return found  # type: ignore[no-any-return]

    def current(self, sets: Sets) -> Sets:
        """Converts ``sets``, a tensor's sharding in an earlier forward, to the tensor's sharding in the running
        forward.

        This class returns ``sets``; a subclass may return another sharding.
        """
        return sets

    def found(self, key: Hashable) -> Any:
        """Returns the value that :meth:`find` has cached under ``key``, or None."""
        return self._found.get(key)

    def note_gather(self, name: str) -> None:
        """Counts one gather of global tensors under ``name``, a torch function without a suitable rule."""
        self.gathers[name] = self.gathers.get(name, 0) + 1

    @contextmanager
    def own_draws(self, device: torch.device) -> Iterator[None]:
        """Makes random numbers on ``device`` differ between the tensor ranks inside the context only."""
        if self.axis.size == 1 or self.axis.dry:
            yield
            return
        drawn = draw_apart(device, self.axis.index)
        try:
            yield
        finally:
            draw_alike(device, drawn)
