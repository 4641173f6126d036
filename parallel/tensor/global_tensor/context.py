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
    """Table of the rules by which torch functions run on global tensors, with a fallback for all other functions."""

    by_function: Mapping[Any, TensorRule]
    fallback: TensorRule
    """Rule for all functions without a specific rule."""

    def __deepcopy__(self, memo: object) -> "Rules":
        """Returns ``self``: rules never change, so a copied model shares them."""
        return self


class PlainGradient(Enum):
    """Kind of the gradient of a plain tensor; the tensor itself is equal on all ranks of the axis."""

    EQUAL = auto()
    """The gradient is equal on all ranks too: a sum follows where the tensor meets a shard (tensor parallelism)."""
    PARTIAL = auto()
    """Each rank has a part of the gradient: ZeRO sums those of parameters (context parallelism)."""


class GlobalTensorContext:
    """State that all global tensors of a sharded model, or of one unit, share.

    ``sequence``: sums of products stay sharded along the dim before the last one (sequence parallelism). ``regather``:
    inputs that column layers gather are gathered again in backward.
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
        self._entered: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._found: dict[Hashable, Any] = {}

    def sums_once(self, parameter: nn.Parameter) -> bool:
        """Returns True if the gradient of ``parameter`` stays partial and is summed over the ranks at the end of the
        step.

        False: the gradient is summed at each use.
        """
        return self.planned is None or parameter in self.planned

    def clear(self) -> None:
        """Drops the cached copies of plain tensors that :meth:`entered` has made; called at the end of a block's
        forward.
        """
        self._entered.clear()

    def entered(self, key: Hashable, given: Tensor, enter: Callable[[Callable[[], None]], Tensor]) -> Tensor:
        """Returns a copy of a plain tensor, made by ``enter(passed)`` at the first use and shared by later ones.

        ``key`` contains the id of ``given``, which the context keeps alive. ``enter`` returns a copy of ``given`` with
        a backward that calls ``passed``, which drops the cached copy.
        """
        hit = self._entered.get(key)
        if hit is not None and hit[0] is given:
            return hit[1]
        copied = enter(lambda: self._forget(key, given))
        if copied.requires_grad:  # without a gradient, no backward would call ``passed``
            self._entered[key] = given, copied
        return copied

    def _forget(self, key: Hashable, given: Tensor) -> None:
        hit = self._entered.get(key)
        if hit is not None and hit[0] is given:
            del self._entered[key]

    def find(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Returns ``make()``, cached by ``key``; a NoRuleError is cached and raised again as well."""
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
        """Returns the sharding that a tensor has in this forward, if a trace has sharded it as ``sets``; here ``sets``
        itself.
        """
        return sets

    def found(self, key: Hashable) -> Any:
        """Returns the value that :meth:`find` has cached by ``key``; None if there is none."""
        return self._found.get(key)

    def note_gather(self, name: str) -> None:
        """Counts a gather for the torch function ``name``, which has no suitable rule; the plan's notes show it."""
        self.gathers[name] = self.gathers.get(name, 0) + 1

    @contextmanager
    def own_draws(self, device: torch.device) -> Iterator[None]:
        """Draws different random numbers on each tensor rank inside the context, and equal ones after it, on
        ``device``.
        """
        if self.axis.size == 1 or self.axis.dry:
            yield
            return
        drawn = draw_apart(device, self.axis.index)
        try:
            yield
        finally:
            draw_alike(device, drawn)
