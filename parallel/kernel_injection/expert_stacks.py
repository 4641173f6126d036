"""Finds stacks of experts that a loop computes, by trials of their code, and makes forwards of grouped products.

    y[t] = sum over the experts e of row t of   w[t, e] down_e(act(gate_e(x[t])) * up_e(x[t]))

Matrices are [experts, out, in] or [experts, in, out]; gate and up are two stacks or one; or experts have no gate. A
trial of small matrices compares the module with the operator, and counts products: a module that makes one for each
expert is a loop, and others, which have grouped or batched products of their own, stay as they are.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from itertools import permutations, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.dispatch import REFERENCE, Kernels, is_autocast, is_narrow
from engine.kernels.ops.activations import ACTIVATIONS, Activation, activate, gated
from engine.kernels.ops.grouped_product import grouped_product
from engine.parallel.kernel_injection.equivalence import (
    SCALES,
    agrees,
    is_hooked,
    own_forward,
    parameterless_copy,
    random,
    twin,
)
from engine.parallel.model.forward_patch import through_class
from engine.parallel.model.placeholders import is_expanded
from engine.parallel.tensor.layers.linear import ExpertsLayer

_EXPERTS, _HIDDEN, _INNER = 4, 6, 10
"""Sizes of a trial."""
_NUMBERS = (((0, 3), (1, 0), (3, 1), (2, 3), (4, 1)), ((3,), (0,), (3,), (4,), (2,)))
"""Experts of the rows of a trial; one has no rows, and there is no expert 4, so that its slot adds nothing."""


class GroupedStack(NamedTuple):
    """Description of a module that computes MoE experts from stacked weights: parameter names, activation and argument
    order.
    """

    up: str
    down: str
    activation: Activation
    gate: str | None = None
    joint: bool = False
    """True: ``up`` computes gate and up together, in halves."""
    gate_first: bool = True
    """True if the first half is the gate."""
    transposed: bool = False
    """True: matrices are [experts, in, out]."""
    weights_last: bool = True
    """True if the arguments are rows, numbers of experts, weights; False: rows, weights, numbers."""

    @property
    def words(self) -> str:
        """Formula of each expert, as text for reports."""
        inner = f"{self.activation}({self.gate or self.up})"
        other = " * its other half" if self.joint else f" * {self.up}" * (self.gate is not None)
        return f"{inner}{other}, {self.down}, all experts at once"

    def run(self, module: nn.Module, x: Tensor, numbers: Tensor, weights: Tensor, kernels: Kernels) -> Tensor:
        """Returns the output [T, H] of ``module`` for the rows ``x`` [T, H], by grouped matrix products.

        The host does not wait for the device.

        ``numbers`` [T, k]: indices of the k experts of each row; ``weights`` [T, k]: their routing weights. An index
        outside the range of experts adds nothing.
        """
        stacks = module._parameters
        experts = len(cast(Tensor, stacks[self.down]))
        known = (numbers >= 0) & (numbers < experts)
        flat = numbers.masked_fill(~known, experts - 1).view(-1)
        order = flat.argsort(stable=True)
        ends = torch.searchsorted(flat[order], torch.arange(experts, device=flat.device), right=True).int()
        token = order.div(numbers.shape[1], rounding_mode="floor")

        def mapped(rows: Tensor, name: str) -> Tensor:
            stack = cast(Tensor, stacks[name])
            return grouped_product(rows, stack if self.transposed else stack.transpose(1, 2), ends, kernels)

        rows = x[token]
        first = mapped(rows, self.gate or self.up)
        if self.joint or self.gate is not None:
            halves = first.chunk(2, dim=-1) if self.joint else (first, mapped(rows, self.up))
            gate, up = halves if self.gate_first else (halves[1], halves[0])
            inner = gated(gate, up, self.activation, kernels)
        else:
            inner = activate(first, None, self.activation, kernels)
        weight = weights.masked_fill(~known, 0).reshape(-1)[order, None]
        y = (mapped(inner, self.down) * weight).to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, y)


def find_expert_stack(module: nn.Module) -> GroupedStack | None:
    """Returns a description of the MoE experts that ``module`` computes in a loop over stacked weights; None if it
    computes none.

    The function tests the description on random inputs: its formula and a small copy of ``module`` must have equal
    outputs and gradients.
    """
    forward, stacks = own_forward(module), {name: p for name, p in module._parameters.items() if p is not None}
    if forward is None or len(stacks) not in (2, 3) or any(p.dim() != 3 for p in stacks.values()):
        return None
    if len(list(module.parameters())) != len(stacks) or any(True for _ in module.buffers()) or is_hooked(module):
        return None
    if len({len(p) for p in stacks.values()}) != 1 or not _has_three_arguments(module):
        return None
    for stack, sizes in _forms({name: (p.shape[1], p.shape[2]) for name, p in stacks.items()}):
        copy = _small(module, stack, sizes)
        for weights_last in (True, False):
            found = _matching(copy, forward, stack._replace(weights_last=weights_last))
            if found is not None:
                return found
    return None


def _has_three_arguments(module: nn.Module) -> bool:
    """Returns True if the forward takes rows, numbers and weights, and nothing else."""
    given = inspect.signature(module.forward).parameters.values()
    return len(given) == 3 and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in given)


def _forms(shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[GroupedStack, tuple[int, int]]]:
    """Yields the roles that matrices of these shapes may have, with their sizes (H, I)."""
    for names, transposed in product(permutations(shapes), (False, True)):
        (*firsts, down) = (shapes[name] if transposed else shapes[name][::-1] for name in names)  # (in, out)
        inner, hidden = down
        form = GroupedStack(names[-2], names[-1], "none", transposed=transposed)
        if len(names) == 3:
            if firsts == [(hidden, inner)] * 2:
                yield form._replace(gate=names[0]), (hidden, inner)
        elif firsts == [(hidden, 2 * inner)]:
            yield form._replace(joint=True), (hidden, inner)
        elif firsts == [(hidden, inner)]:
            yield form, (hidden, inner)


def _small(module: nn.Module, stack: GroupedStack, sizes: tuple[int, int]) -> nn.Module:
    """Returns a copy of ``module`` with small random stacks; integers that are its sizes are those of the copy."""
    hidden, inner = sizes
    small = {inner: _INNER, 2 * inner: 2 * _INNER}
    small.setdefault(hidden, _HIDDEN)
    experts = small.setdefault(len(cast(Tensor, module._parameters[stack.down])), _EXPERTS)
    parameters = {}
    for seed, (name, given) in enumerate(module._parameters.items()):
        if given is not None:
            shape = (small[given.shape[1]], small[given.shape[2]])
            parameters[name] = random(experts, *shape, seed=seed) / shape[not stack.transposed] ** 0.5
    copy = twin(module, parameters, {name: parameterless_copy(child) for name, child in module.named_children()})
    for name, value in list(vars(copy).items()):
        if type(value) is int and value in small:
            object.__setattr__(copy, name, small[value])
    return copy


def _matching(copy: nn.Module, forward: Callable[..., Any], form: GroupedStack) -> GroupedStack | None:
    """Returns ``form`` with the activation of a module that computes it by a loop; None if it computes another."""
    hidden = cast(Tensor, copy._parameters[form.down]).shape[2 if form.transposed else 1]
    trial = _Trial(copy, forward, hidden)
    if not trial.is_loop(form):
        return None
    sides = (True, False) if form.joint or form.gate is not None else (True,)
    for name, first in product(sorted(ACTIVATIONS, reverse=True), sides):  # silu is the most frequent one
        found = form._replace(activation=cast(Activation, name), gate_first=first)
        if trial.agrees(found):
            return found if trial.rounds_alike(found) else None
    return None


class _Trial:
    """Calls of a small copy of a module of experts."""

    def __init__(self, copy: nn.Module, forward: Callable[..., Any], hidden: int) -> None:
        self._copy, self._forward, self._hidden = copy, forward, hidden

    def is_loop(self, form: GroupedStack) -> bool:
        """Returns True if the module makes a product for each expert."""
        _, x, weights = self._given(0)
        experts = len(cast(Tensor, self._copy._parameters[form.down]))
        every, counted = torch.arange(experts)[:, None], _Products()

        def call(x: Tensor, weights: Tensor) -> Any:
            with counted:
                return self._call(form, x, every, weights)

        given = [x[:1].expand(experts, -1), weights[:1, :1].expand(experts, 1)]
        return agrees(call, call, given) and counted.count >= 2 * experts

    def rounds_alike(self, form: GroupedStack) -> bool:
        """Returns True if bf16 rows with weights in fp32 make a bf16 result, as the operator's. Casts the copy."""
        numbers, x, weights = self._given(0)
        self._copy.bfloat16()
        found = self._call(form, x.bfloat16(), numbers, weights.float())
        return isinstance(found, Tensor) and found.dtype == torch.bfloat16

    def agrees(self, form: GroupedStack) -> bool:
        """Returns True if module and operator have equal results and gradients, in training and in evaluation."""
        parameters = list(self._copy.parameters())
        most = len(SCALES)
        for number, scale in enumerate((*SCALES, 1.0, 1.0)):
            self._copy.train(number != most)
            numbers, x, weights = self._given(number > most)
            own = partial(self._own, form, numbers)
            ours = partial(self._ours, form, numbers)
            if not agrees(own, ours, [x * scale, weights], parameters):
                return False
        return True

    def _given(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        numbers = torch.tensor(_NUMBERS[number])
        experts = len(next(iter(self._copy.parameters())))
        numbers = numbers.masked_fill(numbers == _EXPERTS, experts)
        return numbers, random(len(numbers), self._hidden, seed=8), random(*numbers.shape, seed=9)

    def _call(self, form: GroupedStack, x: Tensor, numbers: Tensor, weights: Tensor) -> Any:
        return self._forward(self._copy, x, *((numbers, weights) if form.weights_last else (weights, numbers)))

    def _own(self, form: GroupedStack, numbers: Tensor, x: Tensor, weights: Tensor) -> Any:
        return self._call(form, x, numbers, weights)

    def _ours(self, form: GroupedStack, numbers: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        return form.run(self._copy, x, numbers, weights, REFERENCE)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that counts products of two matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def injected_experts(found: GroupedStack, own: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    """Returns a forward for a module with stacked experts; grouped matrix products compute the experts.

    ``found``: description of the experts; ``own``: original forward. Unsupported inputs, and experts with features
    sharded over tensor ranks, use the forward of the module's class.
    """

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        if len(named) == len(names) == len(args) + len(kwargs) and not isinstance(self, ExpertsLayer):
            x, *others = (named[name] for name in names)
            numbers, weights = others if found.weights_last else reversed(others)
            if _fits(self, (x, numbers, weights), kernels):
                return found.run(self, x, numbers, weights, kernels)
        return type(self).forward(self, *args, **kwargs)

    names = list(inspect.signature(own).parameters)[1:]
    return through_class(forward)


def _fits(module: nn.Module, given: tuple[Any, Any, Any], kernels: Kernels) -> bool:
    x, numbers, weights = given
    if torch.compiler.is_compiling() or any(type(each) is not Tensor or each.is_meta for each in given):
        return False
    if x.dim() != 2 or numbers.dim() != 2 or numbers.shape != weights.shape or len(x) != len(numbers):
        return False
    stacks = [stack for stack in module._parameters.values() if stack is not None]
    if any(type(stack) is not nn.Parameter or stack.dtype != x.dtype or is_expanded(stack) for stack in stacks):
        return False  # such as codes, global tensors, and matrices of a proof that share memory
    return is_narrow(x) and not is_autocast(x) and (kernels.mode != "auto" or kernels.triton("grouped", x, x.shape[1]))
