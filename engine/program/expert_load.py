"""How many rows each expert of a mixture of experts is given: where experts are, and who counts.

A router sends each row to some of the experts of its layer. Two forms are found, of any class:

stack   a module that owns matrices [experts, ., .] and is called with (rows, numbers of experts, ...)
list    a ModuleList or ModuleDict named "...expert...", whose members are called with their own rows

Attention may own matrices [width, heads, .] too; a stack has one of ``WORDS`` in its name or those of its arguments.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer

logger = logging.getLogger("trine")
_NOTE = "has the rows of its experts counted (monitor.expert_load)"
WORDS = ("expert", "router", "index", "indices", "numbers", "sizes", "counts")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class ExpertStack(NamedTuple):
    """The experts of one layer."""

    name: str
    """Of the module that holds them."""
    experts: int


def find_experts(model: nn.Module) -> tuple[ExpertStack, ...]:
    """Every module of ``model`` that holds experts, in its order. Reads shapes alone.

    Raises:
        ConfigError: there is none.
    """
    found = tuple(
        ExpertStack(name, count) for name, module in model.named_modules() if (count := _held_by(name, module))
    )
    if not found:
        raise ConfigError(
            "monitor.expert_load = true, but the model has no experts: neither a module with matrices [experts, ., .] "
            "that is called with numbers of experts, nor a ModuleList named experts; leave it out."
        )
    return found


def _held_by(name: str, module: nn.Module) -> int:
    """The number of experts that a module holds itself; 0 if none."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        alike = len({type(child) for child in module.children()}) == 1 and len(module) > 1
        return len(module) if alike and "expert" in name.rpartition(".")[2].lower() else 0
    names = [*inspect.signature(module.forward).parameters]
    named = any(word in text.lower() for word in WORDS for text in (name, type(module).__name__, *names[1:]))
    if type(module).__module__.startswith("torch.nn.") or len(names) < 2 or not named:
        return 0
    sizes = {weight.shape[0] for weight in module.parameters(recurse=False) if weight.dim() == 3}
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 1 else 0


class ExpertCounter:
    """Counts on this rank while ``counting`` is open; a forward that is repeated in backward counts once.

    Tensor ranks route the same rows, so the first one counts; the sum over the world is then that over all rows.
    """

    def __init__(self, stacks: Sequence[ExpertStack], device: torch.device) -> None:
        self._stacks, self._device = stacks, device
        self._into: Tensor | None = None
        self._told: set[str] = set()

    def zeros(self) -> Tensor:
        """Counts of a step so far, fp64 [experts of all layers]."""
        return torch.zeros(sum(stack.experts for stack in self._stacks), dtype=torch.float64, device=self._device)

    def install(self, model: nn.Module, patches: ForwardPatches) -> None:
        """Look at the calls of the experts of ``model``, before anything is put around them that may run them twice."""
        start = 0
        for stack in self._stacks:
            module = model.get_submodule(stack.name)
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                for place, expert in enumerate(module.children(), start):
                    self._watch(expert, partial(self._see_expert, place), patches)
            else:
                self._watch(module, partial(self._see_stack, stack, start), patches)
            start += stack.experts

    @contextmanager
    def counting(self, into: Tensor | None) -> Iterator[None]:
        """Context of a forward whose rows are added to ``into``; None: they are not counted."""
        before, self._into = self._into, into
        try:
            yield
        finally:
            self._into = before

    @staticmethod
    def _watch(module: nn.Module, see: Callable[[Any, Any], None], patches: ForwardPatches) -> None:
        """Count where the module runs; a hook would also be called where another pipeline stage runs it."""
        own: Callable[..., Any] = module.forward
        look = torch.compiler.disable(see)  # type: ignore[no-untyped-call]

        def forward(*args: Any, **kwargs: Any) -> Any:
            look(args, kwargs)
            return own(*args, **kwargs)

        patches.wrap_forward(module, PatchLayer.COUNT, forward, _NOTE)

    def _see_expert(self, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        rows = _first_rows((*args, *kwargs.values()))
        if self._into is not None and rows is not None:
            self._into[place] += rows

    def _see_stack(self, stack: ExpertStack, start: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._into is None:
            return
        counts = _rows_by_expert((*args, *kwargs.values()), stack.experts, self._device)
        if counts is not None:
            self._into[start : start + stack.experts] += counts
        elif stack.name not in self._told:
            self._told.add(stack.name)
            logger.warning(
                "%s holds %d experts and was called without their numbers, an integer tensor beside the rows; its "
                "expert load stays 0.",
                stack.name,
                stack.experts,
            )


def _first_rows(values: Sequence[Any]) -> int | None:
    """Rows of the first floating tensor, [..., width]."""
    rows = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
    return None if rows is None else rows.numel() // max(1, rows.shape[-1])


@torch.no_grad()
def _rows_by_expert(values: Sequence[Any], experts: int, device: torch.device) -> Tensor | None:
    """Rows of each expert, fp64 [experts], of the arguments of a stack. The host does not wait.

    Numbers of experts, of any shape, name one expert each; those outside of 0 to experts - 1 stand for none. One
    integer for each expert, where there are not just as many rows, says how many rows it has.
    """
    for value in values:
        if isinstance(value, list | tuple) and len(value) == experts and all(type(count) is int for count in value):
            return torch.tensor(value, dtype=torch.float64, device=device)
    chosen = next((value for value in values if isinstance(value, Tensor) and value.dtype in _INTEGERS), None)
    if chosen is None:
        return None
    if chosen.shape == (experts,) and _first_rows(values) != experts:
        return chosen.double()
    numbers = chosen.flatten().long()
    numbers = numbers.where((numbers >= 0) & (numbers < experts), experts)
    counts = torch.zeros(experts + 1, dtype=torch.float64, device=numbers.device)
    return counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.float64))[:experts]
