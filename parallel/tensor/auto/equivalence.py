"""Proof of a tensor plan: all ranks of a block in one process, forward and backward, against the unsharded block.

The proof compares the outputs and the input gradients of every rank, and every parameter's gradient, assembled from the
rows of the ranks: rows with several holders and partial gradients are summed, as in training.

Arithmetic is float64, so that the bound is tight: a value is correct if its error is at most TOLERANCE times the
tensor's largest value. A tensor with all values below ZERO times the largest gradient of the block (the gradient of a
key's bias) counts as zero, and must be zero on both sides.

:class:`Exact` keeps the block in float64, although many models convert to fp32 in norms and softmax, and disables
dropout.
"""

import copy
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from engine.errors import first_line
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.rng_streams import highest_draws
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.tensor.auto.coupled_parameters import Given, float_leaves
from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight, WholeWeightError, gradient_leaves
from engine.parallel.tensor.auto.matmul_trace import DROPOUTS
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import SequenceError, enter_stream, full
from engine.parallel.tensor.global_tensor.rules.attention import multi_head_in_steps
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.plan.ranges import rows_of_rank
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.tensor.thread_ranks import CollectiveCall, SimulatedAxis, run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis

TOLERANCE = 1e-9
ZERO = 1e-9
PROOF = "proof"
"""Label of gathers that the proof itself makes."""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Outputs and gradients of one forward and backward of a block."""

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor | None, ...]
    """Gradients of the inputs; None for inputs without gradient."""
    parameters: Mapping[str, tuple[Tensor | None, ...]]
    """Gradients of parameters by name; a low-rank weight has two products of its gradient with vectors."""
    evaluated: tuple[Tensor, ...] = ()
    """Outputs in eval mode, in which a block may run other code."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the comparison of a sharded block with the unsharded block: outputs and gradients."""

    problem: str = ""
    """First difference or error; empty if the plan is correct."""
    called: tuple[CollectiveCall, ...] = ()
    """Collectives of one rank during the proof."""
    gathers: tuple[str, ...] = ()
    """Names of functions that gathered a global tensor."""

    @property
    def holds(self) -> bool:
        """True if the comparison found no difference and no error."""
        return not self.problem


class BlockReference:
    """Unsharded ``block`` with its outputs and gradients, the reference for tests of a tensor plan.

    ``block`` has random float64 parameters. ``givens``: arguments of each call, the longest sequence first. ``used``:
    indices of the output leaves to compare, None for all.
    """

    def __init__(self, block: nn.Module, givens: Sequence[Given], used: Collection[int] | None = None) -> None:
        self.block, self.givens, self.used = block, givens, used
        with exactly():
            self._outcomes = [_both_modes(copy.deepcopy(block), given, used) for given in givens]

    def prove(self, plan: TensorPlan, tp: int, watch: Callable[[nn.Module], None] | None = None) -> Verdict:
        """Compares the block under ``plan`` on ``tp`` simulated tensor ranks with the unsharded block.

        Runs the calls in ``givens`` in reverse order. Returns the result of the first that differs, or of the last that
        runs. ``watch``: callback that gets the block of each rank before a run.
        """
        verdict = Verdict()
        # the first arguments are the longest: shorter ones show an error sooner
        for given, truth in reversed([*zip(self.givens, self._outcomes, strict=True)]):
            verdict = self._prove(plan, tp, (given, truth), watch)
            if not verdict.holds:
                return verdict
        return verdict

    def _prove(
        self, plan: TensorPlan, tp: int, expected: tuple[Given, BlockResult], watch: Callable[[nn.Module], None] | None
    ) -> Verdict:
        given, truth = expected

        def body(axis: TensorAxis) -> _TrialOutcome:
            mine = copy.deepcopy(self.block)
            thin = _shard_low_rank(mine, plan, axis.index)
            context = apply_plan(mine, plan, axis, ForwardPatches(), already_cut=thin)
            assert isinstance(axis, SimulatedAxis)
            if watch is not None:
                watch(mine)
            check = None if axis.index else partial(_refuse_outputs, truth.outputs)
            with Exact(axis.index + 1):  # inside a region every rank draws its own random numbers
                outcome = _run_trial(mine, given, self.used, context, check)
                summed = {name for name, p in mine.named_parameters() if p in context.partial}
                tried = _TrialOutcome(outcome, list(axis.called), list(context.gathers), summed)
                evaluated = _evaluate(mine, given, self.used, context)
            return tried._replace(outcome=replace(outcome, evaluated=evaluated))

        try:
            with exactly(), _freeing_cycles():
                ranks = run_tensor_ranks(tp, body)
        except (SequenceError, WholeWeightError):
            raise
        except _WrongOutputError as wrong:
            return Verdict(str(wrong))
        except Exception as error:  # the block's own code may raise anything on a shard
            if is_own_mistake(error):
                raise
            return Verdict(f"{type(error).__name__}: {first_line(error)}")
        plan = replace(plan, partial=plan.partial | ranks[0].partial)
        problem = next(_differences(plan, truth, [rank.outcome for rank in ranks]), "")
        return Verdict(problem, tuple(ranks[0].called), tuple(ranks[0].gathers))


@contextmanager
def exactly() -> Iterator[None]:
    """Makes this thread compute in float64, without dropout, with seeded random numbers, inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.enable_grad(), Exact():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _freeing_cycles() -> Iterator[None]:
    """Frees cycles at the end of the context: copies of blocks and their patches refer to each other.

    After an error on a rank, such cycles would keep all activations alive.
    """
    collecting = gc.isenabled()
    gc.collect(0)
    gc.disable()  # all new objects stay in the youngest generation, which is cheap to collect
    try:
        yield
    finally:
        gc.collect(0)
        if collecting:
            gc.enable()


class _TrialOutcome(NamedTuple):
    """Results of one simulated rank."""

    outcome: BlockResult
    called: list[CollectiveCall]
    gathers: list[str]
    partial: set[str]


class _WrongOutputError(Exception):
    """Error for a wrong output, which makes the backward unnecessary."""


def _refuse_outputs(wholes: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for problem in _of_leaves("output", 0, (outputs, wholes), 0.0):
        raise _WrongOutputError(problem)


def _run_trial(
    block: nn.Module,
    given: Given,
    used: Collection[int] | None,
    context: GlobalTensorContext | None = None,
    check: Callable[[Sequence[Tensor]], None] | None = None,
) -> BlockResult:
    """Runs the block on copies of ``given``, then backward from a fixed random gradient of every used float output.

    ``check`` gets the outputs before backward.
    """
    fresh = _Fresh(context)
    args, kwargs = pytree.tree_map(fresh, given)
    with highest_draws():
        outputs = [_plain(leaf) for leaf in float_leaves(block(*args, **kwargs), used)]
    if check is not None:
        check(outputs)
    generator = torch.Generator().manual_seed(7)
    roots = [leaf for leaf in outputs if leaf.requires_grad]
    noise = [torch.randn(root.shape, generator=generator, dtype=root.dtype) for root in roots]
    if roots:
        torch.autograd.backward(roots, noise)
    gradients = {name: tuple(leaf.grad for leaf in gradient_leaves(p)) for name, p in block.named_parameters()}
    return BlockResult(tuple(leaf.detach() for leaf in outputs), tuple(t.grad for t in fresh.inputs), gradients)


def _both_modes(block: nn.Module, given: Given, used: Collection[int] | None) -> BlockResult:
    return replace(_run_trial(block, given, used), evaluated=_evaluate(block, given, used))


def _evaluate(
    block: nn.Module, given: Given, used: Collection[int] | None, context: GlobalTensorContext | None = None
) -> tuple[Tensor, ...]:
    """Returns the block's outputs in eval mode; the block stays in eval mode."""
    args, kwargs = pytree.tree_map(_Fresh(context), given)
    with highest_draws():
        return tuple(_plain(leaf).detach() for leaf in float_leaves(block.eval()(*args, **kwargs), used))


class _Fresh:
    """Copy of arguments. The copy of a tensor that requires a gradient is no leaf, so the block may write into it."""

    def __init__(self, context: GlobalTensorContext | None) -> None:
        self.inputs: list[Tensor] = []
        self._context = context

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        twin = leaf.detach().clone()
        if not leaf.requires_grad:
            return twin
        self.inputs.append(twin.requires_grad_())
        if self._context is not None and self._context.sequence:  # the previous block returns a sharded stream
            twin = enter_stream(self._context, twin)
        return twin.clone()


def _shard_low_rank(block: nn.Module, plan: TensorPlan, rank: int) -> set[str]:
    """Replaces every sharded low-rank weight by the shard of ``rank``; returns the names of these weights."""
    found = {}
    for name, parameter in block.named_parameters():
        if isinstance(parameter, LowRankWeight) and (cut := plan.parameters.get(name)) is not None:
            found[id(parameter)] = name, parameter.shard(cut.dim, rows_of_rank(cut.ranges, rank))
    for module in block.modules():
        for local, own in module._parameters.items():
            if id(own) in found:
                module._parameters[local] = found[id(own)][1]  # type: ignore[assignment]
    return {name for name, _ in found.values()}


def _plain(leaf: Tensor) -> Tensor:
    return full(leaf, PROOF) if isinstance(leaf, GlobalTensor) else leaf


def _differences(plan: TensorPlan, truth: BlockResult, ranks: Sequence[BlockResult]) -> Iterator[str]:
    """Yields the differences from the unsharded block, outputs first."""
    of_parameters = (grad for grads in truth.parameters.values() for grad in grads)
    gradients = [grad for grad in (*truth.inputs, *of_parameters) if grad is not None]
    largest = max((_top(grad) for grad in gradients), default=0.0)
    for rank, outcome in enumerate(ranks):
        yield from _of_leaves("output", rank, (outcome.outputs, truth.outputs), 0.0)
        yield from _of_leaves("output in eval mode", rank, (outcome.evaluated, truth.evaluated), 0.0)
        yield from _of_leaves("input", rank, (outcome.inputs, truth.inputs), largest)
    for name, wholes in truth.parameters.items():
        for place, whole_grad in enumerate(wholes):
            parts = [outcome.parameters[name][place] for outcome in ranks]
            for grad in _assembled(plan, name, whole_grad, parts):
                if wrong := _wrong(grad, whole_grad, largest):
                    yield f"the gradient of {name} {wrong}"


def _of_leaves(
    kind: str, rank: int, sides: tuple[Sequence[Tensor | None], Sequence[Tensor | None]], floor: float
) -> Iterator[str]:
    mine, whole = sides
    if len(mine) != len(whole):
        yield f"there are {len(mine)} {kind}s on rank {rank}, not {len(whole)}"
        return
    what = "gradient of input" if kind == "input" else kind
    for number, (a, b) in enumerate(zip(mine, whole, strict=True)):
        if wrong := _wrong(a, b, floor):
            yield f"{what} {number} on rank {rank} {wrong}"


def _assembled(
    plan: TensorPlan, name: str, whole: Tensor | None, parts: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Returns the gradient of the full parameter; every rank's gradient if the parameter is replicated, not partial."""
    cut = plan.parameters.get(name)
    if cut is None and name not in plan.partial:
        return parts
    if whole is None or any(part is None for part in parts):
        return [None] if all(part is None for part in parts) else [next(p for p in parts if p is not None)]
    total = torch.zeros_like(whole)
    for rank, part in enumerate(parts):
        assert part is not None
        if cut is None or total.shape[cut.dim] == 1:  # multiplied by a vector along the sharded dim
            total += part
        else:
            total.index_add_(cut.dim, torch.tensor(rows_of_rank(cut.ranges, rank)), part)
    return [total]


def _wrong(mine: Tensor | None, whole: Tensor | None, largest: float) -> str:
    """Returns a clause about the error of a value, or "". ``largest``: the largest gradient of the block."""
    if mine is None or whole is None:
        return "" if mine is None and whole is None else "is missing" if mine is None else "is unexpected"
    if mine.shape != whole.shape:
        return f"has the shape {list(mine.shape)}, not {list(whole.shape)}"
    if not whole.numel():
        return ""
    top = _top(whole)
    error, allowed = _top(mine - whole), max(TOLERANCE * top, TOLERANCE * ZERO * largest)
    finite = bool(torch.isfinite(mine).all()) or not bool(torch.isfinite(whole).all())
    if finite and (error <= allowed or (top <= ZERO * largest and _top(mine) <= ZERO * largest)):
        return ""
    return f"is off by {error:.1e}; its largest value is {top:.1e}"


def _top(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


_GROUPED = frozenset({torch._grouped_mm, getattr(functional, "grouped_mm", torch._grouped_mm)})
_FLOAT = frozenset((Tensor.float,))


_DRAWS = frozenset(
    (torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.bernoulli,
     torch.normal, torch.multinomial, Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_,
     Tensor.random_, Tensor.exponential_, Tensor.multinomial)
)  # fmt: skip


class Exact(TorchFunctionMode):
    """Torch function mode for reproducible runs: float64 instead of fp32, no dropout, random numbers from ``seed``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _widened(value) for key, value in (kwargs or {}).items()}
        args = tuple(map(_widened, args))
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _DRAWS:
            kwargs.setdefault("generator", self._generator)
        if func in _FLOAT:
            func = Tensor.double
        if func in _GROUPED and args[0].dtype == torch.float64:  # torch has no float64 kernel for grouped products
            return _grouped_mm(*args, **kwargs)
        if func is functional.multi_head_attention_forward:  # its inner functions bypass this mode
            with self:
                return multi_head_in_steps(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _grouped_mm(x_SI: Tensor, weight_EIO: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Returns the products of rows ``offs[e-1]:offs[e]`` of x with matrix e, for all e."""
    ends = [0, *offs.tolist()]
    left = x_SI.shape[0] - ends[-1]
    if isinstance(weight_EIO, LowRankWeight) and not isinstance(x_SI, GlobalTensor) and not left:
        places = torch.arange(len(offs)).repeat_interleave(
            torch.tensor([stop - start for start, stop in pairwise(ends)])
        )
        return weight_EIO.factors.grouped(x_SI, places)
    # one function for all groups: the gradient of a slice is as large as x
    groups = torch.split(x_SI, [*(stop - start for start, stop in pairwise(ends)), left])[:-1]
    parts = [own @ weight_EIO[e] for e, own in enumerate(groups) if own.shape[0] or not e]
    rest = x_SI.new_zeros(left, weight_EIO.shape[-1])
    return torch.cat([*parts, rest])


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
