"""Proof by trial that the experts of a module may be computed on other ranks, before anything is sharded.

A twin of the module with random parameters, and few experts, is called with random rows x [T, H], numbers n [T, k] and
weights w [T, k], in each form of call that its signature allows. It must hold:

    rows      f(x[p], n[p], w[p]) = f(x, n, w)[p]                    a row does not depend on other rows
    slots     f(x, n, w) = sum over j of f(x, n[:, j], w[:, j])      experts of a row are added
    local     the same with NaN in the parameters of experts that no row asks for; NaN if it is in those asked for
    renumber  the same with the experts of one rank alone, counted from 0
    empty     no rows give no rows

A block with a list of equal modules is called with experts that note their rows, and must ask for the same rows
whatever they answer; a member must treat each row by itself. All of this holds in evaluation and, for a module whose
results are not random then, in training.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.experts.calls import ExpertCall, Rows, possible_calls
from engine.parallel.experts.forms import (
    RoutedExperts,
    Stack,
    adapted_stacks,
    list_members,
    possible_counts,
    possible_stacks,
    possible_widths,
    set_counts,
)
from engine.parallel.experts.thin_products import ThinProducts
from engine.parallel.model.parametrized_weights import adapter_chain
from engine.parallel.model.placeholders import is_expanded
from engine.parallel.model.side_effects import forward_settings

_ROWS, MOST = 12, 4
"""Rows of a trial, and the most experts of a twin."""
LARGE = 1 << 24
"""Number of elements of a parameter from which a trial first draws thin matrices."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """Negative test result: expert parallelism cannot be applied to a module, for the ``reason``."""

    name: str
    reason: str

    def named(self, name: str) -> "Unproven":
        """Returns a copy of this result for another module, ``name``, with the same code, shapes and settings."""
        return replace(self, name=name)


def prove_routed(name: str, module: nn.Module) -> RoutedExperts | Unproven:
    """Tests numerically, on small copies with random parameters, whether the experts of ``module`` can run on different
    ranks.

    Each row's result must be the sum of results of its experts, and depend on nothing else. Returns the parameters of
    each expert and the form of the arguments, or an :class:`Unproven` with the reason. ``name``: name of the module.
    """
    if any(True for _ in module.buffers()):
        return Unproven(name, "it has buffers, which are not shared among ranks")
    if not _can_copy(module):
        return Unproven(name, _UNCOPIED)
    reasons = list[str]()
    thin_first = (True, False) if any(each.numel() > LARGE for each in module.parameters()) else (False,)
    for thin, stack in product(thin_first, possible_stacks(module)):
        if not thin and set(reasons) - {_REFUSED}:
            break  # a rule that fails for thin matrices holds for no others: the large trial is for what refuses them
        for counts in possible_counts(module, stack.experts):
            counted = replace(stack, counts=counts)
            experts = min(stack.experts, 2 if thin else MOST)
            twin = make_twin(module, counted, experts, thin)
            for call, width in product(possible_calls(module), possible_widths(module)):
                reason = Trial(twin, counted, call, width, experts).failure()
                if reason is None:
                    return RoutedExperts(name, stack.experts, width, call, stack.own, stack.common, counts)
                reasons.append(reason)
    told = [reason for reason in reasons if reason != _REFUSED]
    return Unproven(name, told[0] if told else _UNKNOWN)


def prove_adapted(name: str, adapter: nn.Module, ranks: int) -> RoutedExperts | Unproven:
    """Tests whether the experts of a module with adapters, such as LoRA, can run on different ranks.

    Returns the parameters of each expert, including adapters, or an :class:`Unproven` with the reason. Every adapter
    parameter must affect the result. ``ranks``: number of expert ranks.
    """
    base = adapter_chain(adapter)[-1][1]
    found = prove_routed(name, base)
    if isinstance(found, Unproven):
        return found
    if not _can_copy(adapter):
        return Unproven(name, _UNCOPIED)
    experts, least = min(found.experts, MOST), min(found.experts // ranks, 2)
    thin = any(each.numel() > LARGE for each in base.parameters())
    for stack in adapted_stacks(found, adapter):
        trial = Trial(make_twin(adapter, stack, experts, thin), stack, found.call, found.width, experts, least)
        if trial.failure() is None:
            if idle := trial.without_effect():
                return Unproven(name, f"its adapter {idle} has no effect")
            return replace(found, own=stack.own, common=stack.common, counts=stack.counts)
    return Unproven(name, "its adapters are not divided by experts")


_UNCOPIED = "it cannot be copied for a trial"
_BY_ROWS = "a row's result depends on other rows"
_REFUSED = "it does not take these arguments"
_UNKNOWN = (
    "its arguments are neither rows, numbers of experts and weights, nor rows and their number for each expert, nor "
    "equally many rows for each expert"
)


class Trial:
    """Numerical test, on random rows, that the experts of a module can run on different ranks.

    A row's result must be the sum of results of its experts, and depend on nothing else. ``twin``: small copy of the
    module.
    """

    def __init__(
        self, twin: nn.Module, stack: Stack, call: ExpertCall, width: int, experts: int, least: int = 1
    ) -> None:
        self._twin, self._stack, self._form, self._experts = twin, stack, call, experts
        self._least = least
        """Fewest experts of a rank."""
        self._names = list(inspect.signature(adapter_chain(twin)[-1][1].forward).parameters)
        draw = torch.Generator().manual_seed(0)
        chosen = min(call.slots, self._experts)
        self._rows = torch.randn(_ROWS, width, generator=draw)
        self._weights = torch.rand(_ROWS, chosen, generator=draw) + 0.5  # without effect if the form has no weights
        self._numbers = torch.stack([torch.randperm(self._experts, generator=draw)[:chosen] for _ in range(_ROWS)])

    @torch.no_grad()
    def failure(self) -> str | None:
        """Returns the reason if the experts cannot run on different ranks; None if ``twin`` passes the test."""
        thin = any(map(is_expanded, self._twin.parameters()))
        with ThinProducts() if thin else nullcontext():  # type: ignore[no-untyped-call]
            return self._failure_in(False) or self._failure_in(True)

    @torch.no_grad()
    def is_sum_of(self, parts: Sequence[nn.Module]) -> bool:
        """Returns True if the outputs of ``parts`` on the random rows sum to the output of the whole module, in
        evaluation and training mode.
        """
        return self._adds_up(parts, False) and self._adds_up(parts, True)

    def _adds_up(self, parts: Sequence[nn.Module], training: bool) -> bool:
        given = self._rows, self._numbers, self._weights
        whole = self._call(self._twin.train(training), *given)
        if whole is None or (training and not are_close(self._call(self._twin, *given), whole)):
            return whole is not None  # a forward that draws random numbers is tried in evaluation
        results = [self._call(part.train(training), *given) for part in parts]
        found = [each for each in results if each is not None]
        return len(found) == len(parts) and are_close(sum(found), whole)

    def _failure_in(self, training: bool) -> str | None:
        self._twin.train(training)
        x, n, w = self._rows, self._numbers, self._weights
        whole = self._call(self._twin, x, n, w)
        if whole is None or whole.dim() != 2 or len(whole) != len(x) or not whole.isfinite().all():
            return _REFUSED
        if training and not are_close(self._call(self._twin, x, n, w), whole):
            return None
        some = torch.arange(0, _ROWS, 2).flip(0)
        if not are_close(self._call(self._twin, x[some], n[some], w[some]), whole[some]):
            return _BY_ROWS
        slots = [self._call(self._twin, x, n[:, j : j + 1], w[:, j : j + 1]) for j in range(n.shape[1])]
        if any(slot is None for slot in slots) or not are_close(sum(slot for slot in slots if slot is not None), whole):
            return "the results of a row's experts are not added"
        half = self._experts // 2
        for chosen in dict.fromkeys((range(self._least), range(half), range(half, self._experts))):
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
        if not are_close(self._call(self._without(others), x, n, w), wanted):
            return "a row's result depends on experts that it does not ask for"
        alone = self._with_only(chosen)
        if not are_close(self._call(alone, x, n - chosen[0], w, len(chosen)), wanted):
            return "its forward needs the number of all experts"
        empty = self._call(alone, x[:0], n[:0], w[:0], len(chosen))
        return None if empty is not None and empty.shape == wanted[:0].shape else "it cannot be called without rows"

    @torch.no_grad()
    def without_effect(self) -> str | None:
        """Returns the name of the first parameter of ``twin`` without effect on the output; None if there is none."""
        names, rows = dict(self._twin.named_parameters()), (self._rows, self._numbers, self._weights)
        for name in names:
            whole = self._call(self._without(range(self._experts), (name,)), *rows)
            if whole is None or not whole.isnan().any():
                return name
        return None

    def _call(self, module: nn.Module, x: Tensor, n: Tensor, w: Tensor, experts: int = 0) -> Tensor | None:
        """Returns the result, or None if the module raises or returns anything but a tensor."""
        written = self._form.write(Rows(x, n, w), experts or self._experts, {})
        try:  # by position: a forward may hand its arguments to code that has other names for them
            result: object = module(*(written.arguments[name] for name in self._names[: len(written.arguments)]))
            return written.back(result) if isinstance(result, Tensor) else None
        except Exception:  # any: it is code of the user with arguments that it may not be made for
            return None

    def _without(self, experts: Sequence[int], names: Sequence[str] = ()) -> nn.Module:
        """Returns the twin with NaN in the parameters of ``experts``, or in those of ``names``."""
        fresh = dict[int, nn.Parameter]()
        for name in names or self._stack.own:
            each = self._twin.get_parameter(name).detach()
            content = (each[:, :1] if is_expanded(each) else each).clone()
            if (packing := self._stack.own.get(name)) is None:
                content.fill_(torch.nan)
            else:
                packing.apart(content, self._experts)[list(experts)] = torch.nan
            fresh[id(self._twin.get_parameter(name))] = nn.Parameter(content.expand_as(each))
        return copy.deepcopy(self._twin, dict(fresh))

    def _with_only(self, chosen: Sequence[int]) -> nn.Module:
        """Returns the twin with the experts ``chosen`` alone."""
        fresh = {
            id(each): nn.Parameter(packing.chosen(each.detach(), self._experts, chosen))
            for name, packing in self._stack.own.items()
            for each in (self._twin.get_parameter(name),)
        }
        alone = copy.deepcopy(self._twin, dict(fresh))
        set_counts(alone, self._stack.counts, len(chosen))
        return alone


def _can_copy(module: nn.Module) -> bool:
    """Returns True if a module without its parameters can be copied."""
    try:
        copy.deepcopy(module, {id(each): each for each in module.parameters()})
    except Exception:  # any: attributes of the user's module decide
        return False
    return True


def are_close(a: Tensor | int | None, b: Tensor) -> bool:
    """Returns True if ``a`` has the shape of ``b`` and differs by at most 1e-5 of the largest magnitude in ``b``."""
    return isinstance(a, Tensor) and a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def make_twin(module: nn.Module, stack: Stack, experts: int, thin: bool) -> nn.Module:
    """Returns a copy of ``module`` with random fp32 parameters, reduced to ``experts`` experts.

    ``stack``: interpretation of its parameters as stacks of experts. ``thin``: True to save memory by repeating one
    row in each matrix.
    """
    draw = torch.Generator().manual_seed(1)
    fresh = dict[int, nn.Parameter]()
    for name, each in module.named_parameters():
        sizes = stack.own[name].shape(each.shape, experts) if name in stack.own else each.shape
        drawn = (sizes[0], 1, sizes[2]) if thin and len(sizes) == 3 else sizes
        fresh[id(each)] = nn.Parameter((torch.randn(drawn, generator=draw) * each.shape[-1] ** -0.5).expand(sizes))
    twin = copy.deepcopy(module, dict(fresh))
    set_counts(twin, stack.counts, experts)
    return twin


def prove_listed(block: nn.Module, child: str) -> tuple[int, int] | str:
    """Tests numerically whether the modules in the list ``child`` of ``block`` can run on different ranks as experts.

    Returns (width of input rows, width of results), or the reason for a refusal as text.
    """
    members = list(list_members(block.get_submodule(child)).values())
    required = required_argument(block)
    if required is None or any(isinstance(each, nn.Embedding) for each in block.modules()):
        return "its block is not called with one tensor"
    if any(True for each in members for _ in each.buffers()):
        return "its members have buffers, which are not shared among ranks"
    if not _can_copy(block):
        return _UNCOPIED
    draw = torch.Generator().manual_seed(1)
    shared, notes = random_copy(members[0], {}, draw), _Notes()
    stand_ins = [_Scaled(shared, number, notes) for number in range(len(members))]
    twin = random_copy(block, dict(zip(map(id, members), stand_ins, strict=True)), draw)
    reasons = []
    for width in sorted({size for each in shared.parameters() if each.dim() == 2 for size in each.shape}):
        for shape in ((2, _ROWS // 2, width), (_ROWS, width)):
            reason = _ListTrial(twin, shared, notes, required, torch.randn(shape, generator=draw)).failure()
            if reason is None:
                return _prove_members(members, shared, notes.asked[0][1].shape[-1])
            reasons.append(reason)
    told = [reason for reason in reasons if reason != _REFUSED]
    return told[0] if told else "its block is not called with one tensor"


@torch.no_grad()
def _prove_members(members: Sequence[nn.Module], shared: nn.Module, width: int) -> tuple[int, int] | str:
    """Tests the members with other settings than the first, whose twin ``shared`` has passed the trial of the block.

    Returns (``width``, width of results), or the reason for a refusal. ``width``: width of the experts' rows, which may
    differ from the block's.
    """
    rows = torch.randn(6, width, generator=torch.Generator().manual_seed(3))
    wanted: Tensor = shared.eval()(rows)
    others = {forward_settings(each): each for each in reversed(members)}
    others.pop(forward_settings(members[0]))
    for each in others.values():
        twin = copy.deepcopy(each, dict(zip(map(id, each.parameters()), shared.parameters(), strict=True)))
        found, again = _answer(twin.eval(), rows), _answer(twin.train(), rows)
        if found is None or again is None:
            return "its members do not all take the same rows"
        if any(one.shape != wanted.shape or one.dtype != wanted.dtype for one in (found, again)):
            return "its members have results of different shapes or dtypes"
        random = not are_close(_answer(twin, rows), again)
        if not _is_by_rows(twin.eval(), width) or not (random or _is_by_rows(twin.train(), width)):
            return _BY_ROWS
    return width, wanted.shape[-1]


def _answer(member: nn.Module, rows: Tensor) -> Tensor | None:
    """Returns the result of a member, or None if it raises or returns anything but a tensor."""
    try:
        found: object = member(rows)
    except Exception:  # any: it is code of the user with rows that it may not be made for
        return None
    return found if isinstance(found, Tensor) else None


def _is_by_rows(member: nn.Module, width: int) -> bool:
    """Returns True if each row of the member's result depends on its row alone, and no rows give no rows."""
    given = torch.randn(6, width, generator=torch.Generator().manual_seed(2))
    some = torch.tensor([4, 1])
    whole, empty, picked = (_answer(member, rows) for rows in (given, given[:0], given[some]))
    if whole is None or empty is None or whole.dim() != 2 or empty.shape != whole[:0].shape:
        return False
    return are_close(picked, whole[some])


class _Notes:
    """What the experts of a twin are asked for, and how they answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Tensor]] = []
        self.answers: list[Tensor] | None = None
        """Answers to give in turn; None: experts compute."""
        self.zeros = False
        """Experts answer zeros."""


class _Scaled(nn.Module):
    """Expert of a twin."""

    def __init__(self, shared: nn.Module, number: int, notes: _Notes) -> None:
        super().__init__()
        self.shared, self.number, self.notes = shared, number, notes

    def forward(self, x: Tensor) -> Tensor:
        """Notes the rows, and answers as the notes say."""
        notes = self.notes
        notes.asked.append((self.number, x.clone()))
        if notes.answers is not None:
            return notes.answers.pop(0)
        found: Tensor = self.shared(x) * (1 + self.number / 8)
        return torch.zeros_like(found) if notes.zeros else found


class _ListTrial:
    """Calls of a twin of a block with random content."""

    def __init__(self, twin: nn.Module, shared: nn.Module, notes: _Notes, argument: str, x: Tensor) -> None:
        self._twin, self._shared, self._notes, self._argument, self._x = twin, shared, notes, argument, x

    @torch.no_grad()
    def failure(self) -> str | None:
        """Returns the rule that does not hold; None if all hold."""
        return self._failure_in(False) or self._failure_in(True)

    def _failure_in(self, training: bool) -> str | None:
        self._twin.train(training)
        whole, asked = self._run()
        if whole is None or not asked or not all(torch.isfinite(leaf).all() for leaf in whole):
            return _REFUSED
        if len({rows.shape[-1:] for _, rows in asked}) > 1:
            return _REFUSED
        if training:
            again, _ = self._run()
            if again is None or not all(are_close(a, b) for a, b in zip(again, whole, strict=True)):
                return None  # it draws random numbers, so two runs differ anyway
        _, first = self._run(zeros=True)
        same = [number for number, _ in first] == [number for number, _ in asked]
        if not same or not all(torch.equal(a, b) for (_, a), (_, b) in zip(first, asked, strict=True)):
            return "the rows of an expert depend on the results of others"
        for _, rows in asked[:2]:
            if rows.dim() < 2 or not _is_by_rows(self._shared, rows.shape[-1]):
                return _BY_ROWS
        answers = [self._shared(rows) * (1 + number / 8) for number, rows in asked]
        with _without_values(self._shared):
            again, _ = self._run(answers=answers)
        if again is None or not all(are_close(a, b) for a, b in zip(again, whole, strict=True)):
            return "its block does more with its experts than to call them"
        return None

    def _run(
        self, zeros: bool = False, answers: list[Tensor] | None = None
    ) -> tuple[list[Tensor] | None, list[tuple[int, Tensor]]]:
        """Returns the floating tensors of the output, None if the twin raises, and what experts were asked for."""
        notes = self._notes
        notes.asked, notes.zeros, notes.answers = [], zeros, answers
        try:
            out: object = self._twin(**{self._argument: self._x.clone()})
        except Exception:  # any: it is code of the user with arguments that it may not be made for
            return None, []
        leaves = pytree.tree_leaves(out)
        return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()], notes.asked


@contextmanager
def _without_values(module: nn.Module) -> Iterator[None]:
    """Context in which the parameters of ``module`` are NaN."""
    kept = [(parameter, parameter.data) for parameter in module.parameters()]
    for parameter, values in kept:
        parameter.data = torch.full_like(values, torch.nan)
    try:
        yield
    finally:
        for parameter, values in kept:
            parameter.data = values


def required_argument(module: nn.Module) -> str | None:
    """Returns the name of a forward's only required argument; None if it requires several or none."""
    try:
        given = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    named = [each for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = [each.name for each in named if each.default is each.empty]
    return required[0] if len(required) == 1 else None


def random_copy(module: nn.Module, memo: dict[int, nn.Module], draw: torch.Generator) -> nn.Module:
    """Returns a copy of ``module`` in evaluation mode, with random fp32 parameters from the generator ``draw``.

    ``memo``: replacements of submodules, by ``id`` of the original.
    """
    inside = {id(parameter) for each in memo.values() for parameter in each.parameters()}
    left = {id(p) for key in memo for m in module.modules() if id(m) == key for p in m.parameters()}
    fresh: dict[int, object] = {
        id(p): nn.Parameter(torch.randn(p.shape, generator=draw) * (p.shape[-1] if p.dim() else 1) ** -0.5)
        for p in module.parameters()
        if id(p) not in left and id(p) not in inside
    }
    return copy.deepcopy(module, {**fresh, **memo}).eval()
