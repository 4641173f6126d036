"""Expert load: rows routed to each expert of a mixture of experts, counted on the ranks that store them.

A router sends each row to some of the experts of its layer. Two forms are found, of any class:

stack   a module that owns matrices [experts, ., .] and is called with (rows, numbers of experts, ...) list    a
ModuleList or ModuleDict named "...expert...", whose members are called with their own rows

Attention may own matrices [width, heads, .] too; a stack has one of ``WORDS`` in its name or in its arguments' names.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.parallel.grid import Axis
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.parametrized_weights import outermost_adapters
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor

logger = logging.getLogger("trine")
_NOTE = "has the rows of its experts counted (monitor.expert_load)"
WORDS = ("expert", "router", "index", "indices", "numbers", "sizes", "counts")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class ExpertStack(NamedTuple):
    """Name of the module that owns the experts of one layer, and the number of these experts."""

    name: str
    """Name of the module that owns the experts."""
    experts: int


_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k", "num_selected_experts")
"""Names of the number of experts of a token in configurations of models."""


def chosen_experts(model: nn.Module, experts: int) -> int:
    """Returns the number of experts per token from the model's ``config``, or 2 if it has none; at most ``experts``."""
    config = getattr(model, "config", None)
    given = next((value for name in _CHOSEN if isinstance(value := getattr(config, name, None), int)), 2)
    return min(given, experts)


def find_experts(model: nn.Module, key: str = "monitor.expert_load") -> tuple[ExpertStack, ...]:
    """Returns name and number of experts of each module of ``model`` that owns experts, in model order. Reads only
    names, signatures and shapes.

    ``key``: configuration key that requires experts, for the error message.

    Raises:
        ConfigError: the model has no experts.
    """
    adapters = outermost_adapters(model)
    found = tuple(
        ExpertStack(adapters.get(module, name), count)
        for name, module in model.named_modules()
        if (count := _held_by(name, module))
    )
    if not found:
        raise ConfigError(
            f"{key} is set, but the model has no experts: no module owns parameters [experts, ., .] and takes expert "
            f'indices in forward, and no nn.ModuleList has "expert" in its name; leave {key} out.'
        )
    return found


def _held_by(name: str, module: nn.Module) -> int:
    """Returns the number of experts that a module itself owns; 0 if none."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        uniform = len({type(child) for child in module.children()}) == 1 and len(module) > 1
        return len(module) if uniform and "expert" in name.rpartition(".")[2].lower() else 0
    names = [*inspect.signature(module.forward).parameters]
    named = any(word in text.lower() for word in WORDS for text in (name, type(module).__name__, *names[1:]))
    if type(module).__module__.startswith("torch.nn.") or len(names) < 2 or not named:
        return 0
    sizes = {weight.shape[0] for weight in module.parameters(recurse=False) if weight.dim() == 3}
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 1 else 0


class ExpertCounter:
    """Counter of the rows that this rank's routers send to each expert, for ``monitor.expert_load``.

    Rows that several tp or cp ranks share count once. Recomputed forwards do not count.

    Args:
        ranks: this rank's index by axis, for tp and cp.
    """

    def __init__(
        self, stacks: Sequence[ExpertStack], device: torch.device, ranks: Mapping[Axis, int] = MappingProxyType({})
    ) -> None:
        self._stacks, self._device, self._ranks = stacks, device, {axis: rank for axis, rank in ranks.items() if rank}
        self._into: Tensor | None = None
        self._told: set[str] = set()

    def zeros(self) -> Tensor:
        """Returns an fp64 tensor of zeros for a step's row counts, one for each expert of each layer."""
        return torch.zeros(sum(stack.experts for stack in self._stacks), dtype=torch.float64, device=self._device)

    def install(self, model: nn.Module, patches: ForwardPatches) -> None:
        """Wraps the experts' forwards to count rows; call it before patches that run a forward twice."""
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
        """Returns a context in which forwards add their row counts to ``into``, a tensor from :meth:`zeros`, unless it
        is None.
        """
        before, self._into = self._into, into
        try:
            yield
        finally:
            self._into = before

    @staticmethod
    def _watch(module: nn.Module, see: Callable[[Any, Any], None], patches: ForwardPatches) -> None:
        """Counts in the module's own forward; a hook would also be called where another pipeline stage runs it."""
        own: Callable[..., Any] = module.forward
        look = torch.compiler.disable(see)  # type: ignore[no-untyped-call]

        def forward(*args: Any, **kwargs: Any) -> Any:
            look(args, kwargs)
            return own(*args, **kwargs)

        patches.wrap_forward(module, PatchLayer.COUNT, forward, _NOTE)

    def _see_expert(self, place: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        rows = _first_rows((*args, *kwargs.values()))
        if self._into is not None and rows is not None:
            with torch._C.DisableTorchFunction():  # hidden from what watches the forward
                self._into[place] += int(self._own(rows, rows.ndim - 1).sum())

    def _see_stack(self, stack: ExpertStack, start: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._into is None:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            counts = self._by_expert((*args, *kwargs.values()), stack.experts)
            if counts is not None:
                self._into[start : start + stack.experts] += counts
        if counts is None and stack.name not in self._told:
            self._told.add(stack.name)
            logger.warning(
                "%s has %d experts and was called without their numbers, an integer tensor next to the rows; its "
                "expert load stays 0.",
                stack.name,
                stack.experts,
            )

    def _by_expert(self, values: Sequence[Any], experts: int) -> Tensor | None:
        """Counts the rows of each expert on this rank, fp64 [experts], from a stack's arguments. The host does not
        wait.

        An integer tensor of any shape names one expert per element; numbers outside 0 to experts - 1 name none. A
        tensor of one integer for each expert has their numbers of rows, unless the number of rows is the same.
        """
        for value in values:
            if isinstance(value, list | tuple) and len(value) == experts and all(type(count) is int for count in value):
                return torch.tensor(value, dtype=torch.float64, device=self._device) * (not self._ranks)
        chosen = next((value for value in values if isinstance(value, Tensor) and value.dtype in _INTEGERS), None)
        if chosen is None:
            return None
        rows, own = _first_rows(values), self._own(chosen, chosen.ndim)
        local = chosen
        while isinstance(local, GlobalTensor):
            local = local.local
        if not own.any():
            return torch.zeros(experts, dtype=torch.float64, device=local.device)
        if tuple(chosen.shape) == (experts,) and (rows is None or prod(rows.shape[:-1]) != experts):
            return local.double()
        numbers = local.long()
        if not own.all():
            numbers = numbers.where(torch.from_numpy(own).to(local.device), experts)
        numbers = numbers.where((numbers >= 0) & (numbers < experts), experts).flatten()
        counts = torch.zeros(experts + 1, dtype=torch.float64, device=numbers.device)
        return counts.index_add_(0, numbers, torch.ones_like(numbers, dtype=torch.float64))[:experts]

    def _own(self, given: Tensor, dims: int) -> NDArray[np.bool_]:
        """Returns the mask of elements, over the first ``dims`` dims, that no earlier rank stores; these count here."""
        earlier, own = dict(self._ranks), np.full(tuple(given.shape[:dims]), True)
        while isinstance(given, GlobalTensor):
            rank = earlier.pop(given.views.axis.name, 0)
            # a bit for each rank that stores an element; the lowest bit is the first of these ranks
            holders = np.full(tuple(given.local.shape[:dims]), -1, dtype=np.int64)
            for dim, index in enumerate(given.sets[:dims]):
                if index is not None:
                    own = own.take(index.ranks[rank], axis=dim)
                    holders &= index.holders[index.ranks[rank]].reshape([-1 if n == dim else 1 for n in range(dims)])
            own, given = own & ((holders & -holders) == 1 << rank), given.local
        return own & (not earlier)


def _first_rows(values: Sequence[Any]) -> Tensor | None:
    """Returns the first floating tensor, [..., width]."""
    return next((v for v in values if isinstance(v, Tensor) and v.dtype.is_floating_point and v.ndim), None)
