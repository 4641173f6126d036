"""What all global tensors of a model share: the axis, the rules, tensors that have entered, records for the plan."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.parallel.model.rng_streams import draw_alike, draw_apart
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError
from engine.parallel.tensor.tp_axis import TensorAxis

Result = TypeVar("Result")
TensorRule = Callable[..., Any]
"""Gets (context, function, *args, **kwargs), and gives what the function gives on global tensors."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What torch functions do with global tensors."""

    by_function: Mapping[Any, TensorRule]
    fallback: TensorRule
    """The rule of all other functions."""


class GlobalTensorContext:
    """The context of all views of a cut model, or of one unit.

    ``sequence``: sums of products stay cut along the dim before the last one (sequence parallelism). ``regather``: what
    column layers gather of them is gathered again in backward.
    """

    def __init__(self, axis: TensorAxis, rules: Rules, sequence: bool = False, regather: bool = False) -> None:
        self.axis, self.sequence, self.regather = axis, sequence, regather
        self.rules = rules
        self.gathers: dict[str, int] = {}
        """How often a function had to gather, by its name."""
        self.partial: set[nn.Parameter] = set()
        """The plain parameters that met a View: on each rank their gradient is a part, to be summed once a step."""
        self.planned: frozenset[nn.Parameter] | None = None
        """In a run: those that are summed once a step. What the plan's example has not shown is summed at each use."""
        self.equal: set[nn.Parameter] = set()
        """Parameters that plain code uses as well: their gradient is summed at each use, as for any plain tensor."""
        self.reached_below: str | None = None
        """What has asked for memory that is not there."""
        self._entered: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._found: dict[Hashable, Any] = {}

    def sums_once(self, parameter: nn.Parameter) -> bool:
        """Whether the parts of its gradient stay parts until the step ends."""
        return self.planned is None or parameter in self.planned

    def clear(self) -> None:
        """Forget the tensors that have entered: a block is over."""
        self._entered.clear()

    def entered(self, key: Hashable, given: Tensor, enter: Callable[[Callable[[], None]], Tensor]) -> Tensor:
        """``enter(passed)``, made of ``given``: the same for the same key until ``passed`` is called, in backward.

        The key names ``given`` by its id, which stays its own because it is kept.
        """
        hit = self._entered.get(key)
        if hit is not None and hit[0] is given:
            return hit[1]
        copied = enter(lambda: self._forget(key, given))
        if copied.requires_grad:  # otherwise no backward will say that it has passed
            self._entered[key] = given, copied
        return copied

    def _forget(self, key: Hashable, given: Tensor) -> None:
        hit = self._entered.get(key)
        if hit is not None and hit[0] is given:
            del self._entered[key]

    def find(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """``make()``, once for each key; raises NoRuleError again if that did."""
        try:
            found = self._found[key]
        except KeyError:
            try:
                found = make()
            except NoRuleError as problem:
                found = NoRuleError(*problem.args)  # a new one: that one knows all frames, and they their tensors
            self._found[key] = found
        if isinstance(found, NoRuleError):
            raise NoRuleError(*found.args)
        return found  # type: ignore[no-any-return]

    def note_gather(self, name: str) -> None:
        """A function has gathered."""
        self.gathers[name] = self.gathers.get(name, 0) + 1

    @contextmanager
    def own_draws(self, device: torch.device) -> Iterator[None]:
        """Within, this rank draws random numbers of its own; before and after, generators agree on all ranks."""
        if self.axis.size == 1 or self.axis.dry:
            yield
            return
        drawn = draw_apart(device, self.axis.index)
        try:
            yield
        finally:
            draw_alike(device, drawn)
