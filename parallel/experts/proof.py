"""Proof by trial that the experts of a module may be computed on other ranks, before anything is sharded.

A twin of the module with random parameters, and few experts, is called with random rows x [T, H], numbers n [T, k] and
weights w [T, k], in each form of call that its signature allows. It must hold:

    rows      f(x[p], n[p], w[p]) = f(x, n, w)[p]                    a row does not depend on other rows
    slots     f(x, n, w) = sum over j of f(x, n[:, j], w[:, j])      experts of a row are added
    local     the same with NaN in the parameters of experts that no row asks for; NaN if it is in those asked for
    renumber  the same with the experts of one rank alone, counted from 0
    empty     no rows give no rows
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from engine.parallel.experts.calls import ExpertCall, Rows, possible_calls
from engine.parallel.experts.forms import RoutedExperts, Stack, count_names, possible_stacks, possible_widths

_ROWS, _MOST = 12, 4
"""Rows of a trial, and the most experts of a twin."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """Module that stacks matrices as experts do, and cannot be shared; its experts stay on every rank."""

    name: str
    reason: str

    def named(self, name: str) -> "Unproven":
        """Returns the same for another module of the same kind."""
        return replace(self, name=name)


def prove_routed(name: str, module: nn.Module) -> RoutedExperts | Unproven:
    """Tries each way to call ``module``, which stacks experts, and returns the first that is proven."""
    if any(True for _ in module.buffers()):
        return Unproven(name, "it has buffers, which are not shared among ranks")
    reasons = list[str]()
    for stack in possible_stacks(module):
        twin = _twin(module, stack)
        for call, width in product(possible_calls(module), possible_widths(module)):
            reason = _Trial(twin, stack, call, width).failure()
            if reason is None:
                return RoutedExperts(name, stack.experts, width, call, stack.own, stack.common)
            reasons.append(reason)
    told = [reason for reason in reasons if reason != _REFUSED]
    return Unproven(name, told[0] if told else _UNKNOWN)


_REFUSED = "it does not take these arguments"
_UNKNOWN = (
    "its arguments are neither rows, numbers of experts and weights, nor rows and their number for each expert, nor "
    "equally many rows for each expert"
)


class _Trial:
    """Calls of a twin with random content."""

    def __init__(self, twin: nn.Module, stack: Stack, call: ExpertCall, width: int) -> None:
        self._twin, self._stack, self._form, self._experts = twin, stack, call, min(stack.experts, _MOST)
        self._names = list(inspect.signature(twin.forward).parameters)
        draw = torch.Generator().manual_seed(0)
        chosen = min(call.slots, self._experts)
        self._rows = torch.randn(_ROWS, width, generator=draw)
        self._weights = torch.rand(_ROWS, chosen, generator=draw) + 0.5  # without effect if the form has no weights
        self._numbers = torch.stack([torch.randperm(self._experts, generator=draw)[:chosen] for _ in range(_ROWS)])

    @torch.no_grad()
    def failure(self) -> str | None:
        """Returns the rule that does not hold; None if all hold."""
        x, n, w = self._rows, self._numbers, self._weights
        whole = self._call(self._twin, x, n, w)
        if whole is None or whole.dim() != 2 or len(whole) != len(x) or not whole.isfinite().all():
            return _REFUSED
        some = torch.arange(0, _ROWS, 2).flip(0)
        if not _close(self._call(self._twin, x[some], n[some], w[some]), whole[some]):
            return "a row's result depends on other rows"
        slots = [self._call(self._twin, x, n[:, j : j + 1], w[:, j : j + 1]) for j in range(n.shape[1])]
        if any(slot is None for slot in slots) or not _close(sum(slot for slot in slots if slot is not None), whole):
            return "the results of a row's experts are not added"
        half = self._experts // 2
        for chosen in (range(1), range(half), range(half, self._experts)):
            if (reason := self._failure_of(chosen)) is not None:
                return reason
        return None

    def _failure_of(self, chosen: Sequence[int]) -> str | None:
        """Returns the rule that does not hold for a rank with the experts ``chosen`` alone."""
        token, slot = ((self._numbers >= chosen[0]) & (self._numbers <= chosen[-1])).nonzero().unbind(1)
        x, n, w = self._rows[token], self._numbers[token, slot][:, None], self._weights[token, slot][:, None]
        wanted = self._call(self._twin, x, n, w)
        asked = self._call(self._without(chosen), x, n, w)
        if wanted is None or asked is None or not asked.isnan().any(-1).all():
            return _REFUSED  # numbers that choose nothing may be weights
        others = [index for index in range(self._experts) if index not in chosen]
        if not _close(self._call(self._without(others), x, n, w), wanted):
            return "a row's result depends on experts that it does not ask for"
        alone = self._with_only(chosen)
        if not _close(self._call(alone, x, n - chosen[0], w, len(chosen)), wanted):
            return "its forward needs the number of all experts"
        empty = self._call(alone, x[:0], n[:0], w[:0], len(chosen))
        return None if empty is not None and empty.shape == wanted[:0].shape else "it cannot be called without rows"

    def _call(self, module: nn.Module, x: Tensor, n: Tensor, w: Tensor, experts: int = 0) -> Tensor | None:
        """Returns the result, or None if the module raises or returns anything but a tensor."""
        written = self._form.write(Rows(x, n, w), experts or self._experts, {})
        try:  # by position: a forward may hand its arguments to code that has other names for them
            result: object = module(*(written.arguments[name] for name in self._names[: len(written.arguments)]))
            return written.back(result) if isinstance(result, Tensor) else None
        except Exception:  # any: it is code of the user with arguments that it may not be made for
            return None

    def _without(self, experts: Sequence[int]) -> nn.Module:
        """Returns the twin with NaN in the parameters of ``experts``."""
        fresh = {id(each): nn.Parameter(each.detach().clone()) for each in self._twin.parameters()}
        for name, rows in self._stack.own.items():
            stacked = fresh[id(self._twin.get_parameter(name))].data
            stacked.view(self._experts, rows, *stacked.shape[1:])[list(experts)] = torch.nan
        return copy.deepcopy(self._twin, dict(fresh))

    def _with_only(self, chosen: Sequence[int]) -> nn.Module:
        """Returns the twin with the experts ``chosen`` alone."""
        fresh = {
            id(each): nn.Parameter(each.detach()[chosen[0] * rows : (chosen[-1] + 1) * rows].clone())
            for name, rows in self._stack.own.items()
            for each in (self._twin.get_parameter(name),)
        }
        alone = copy.deepcopy(self._twin, dict(fresh))
        for name in count_names(self._twin, self._experts):
            setattr(alone, name, len(chosen))
        return alone


def _close(a: Tensor | int | None, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def _twin(module: nn.Module, stack: Stack) -> nn.Module:
    """Returns a copy of ``module`` in evaluation, with random fp32 parameters of its first experts."""
    draw, experts = torch.Generator().manual_seed(1), min(stack.experts, _MOST)
    fresh = dict[int, nn.Parameter]()
    for name, each in module.named_parameters():
        sizes = (experts * stack.own[name], *each.shape[1:]) if name in stack.own else each.shape
        fresh[id(each)] = nn.Parameter(torch.randn(sizes, generator=draw) * each.shape[-1] ** -0.5)
    twin = copy.deepcopy(module, dict(fresh)).eval()
    for name in count_names(module, stack.experts):
        setattr(twin, name, experts)
    return twin
