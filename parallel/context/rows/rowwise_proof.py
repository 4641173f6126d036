"""Proof by trial that a module treats every position by itself.

A twin of the module with random parameters is called with random content and few positions. It must hold, for two sets
of positions P, in evaluation and in training:

    values        f(x[P]) = f(x)[P] for every output
    gradients     of inputs and parameters: those of f(x[P]) are those of f(x) with a cotangent that is 0 elsewhere
    state         no attribute, buffer or argument is written; no number is drawn but by dropout of elements

Modules that other code listens to from inside (hooks) are not tried, since the listener expects all positions.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from engine.parallel.context.rows.call_forms import CallForm, SeenCall, SeenTensor, SequenceSize, flatten_leaves
from engine.parallel.model.rng_streams import HostState
from engine.parallel.model.side_effects import restoring_state

_POSITIONS = 12
_SETS = ((1, 2, 11, 7, 5), (10, 9, 8, 7, 6))
_Precision = tuple[torch.dtype, float]
"""Dtype of a trial, and its relative tolerance."""
_PRECISIONS: tuple[_Precision, ...] = ((torch.float64, 1e-6), (torch.float32, 1e-4))
_LARGE = 1 << 22
"""Elements of a matrix from which on the rows of the twin's matrix are equal and share memory."""
_DROPOUT = (functional.dropout, torch.dropout, functional.alpha_dropout)


class ProvenForm(NamedTuple):
    """Conditions for calls in which a module is proven to compute each position independently.

    The object also describes the result of such a call, and counts the elements of the call's tensors.
    """

    call: CallForm
    spec: pytree.TreeSpec
    """Structure of the result."""
    dims: tuple[int | None, ...]
    """Dim of positions of each tensor of the result; None for other values."""
    stream: int
    """Elements of the arguments and results of one position."""
    saved: int
    """Elements of one position that backward needs beside arguments and results."""
    tokens: int
    """Positions of all rows in the call that was seen."""
    draws: bool = False
    """True if training draws random numbers."""


@contextmanager
def apart() -> Iterator[None]:
    """Returns a context for a trial run, hidden from torch modes and saved-tensor hooks of the outer forward."""

    def same(saved: Tensor) -> Tensor:
        return saved

    with torch._C.DisableTorchFunction(), _disable_current_modes(), saved_tensors_hooks(same, same):
        yield


def prove_rowwise(module: nn.Module, call: SeenCall, size: SequenceSize) -> ProvenForm | None:
    """Tests ``module`` on random arguments with the form of the recorded ``call``, for sequences of ``size``.

    Returns a description of such calls if the module computes each position independently; otherwise None.
    """
    form = size.form_of(call)
    if form is None:
        return None
    with restoring_state(module, torch.device("cpu")), torch.device("cpu"), torch.enable_grad():
        tried = (_tried(module, form, call, size, precision) for precision in _PRECISIONS)
        return next((found for found in tried if found is not None), None)


def _tried(
    module: nn.Module, form: CallForm, call: SeenCall, size: SequenceSize, precision: _Precision
) -> ProvenForm | None:
    try:
        return _Trial(module, form, call, size, precision).proven()
    except Exception:  # any: it is code of the user with arguments that it may not be made for
        return None


@dataclass(slots=True)
class _Run:
    """One call of a twin: its leaves with positions, the result, and the floating tensors of the result."""

    inputs: list[Tensor]
    out: Any
    floats: list[Tensor]


class _Trial:
    """Calls of a twin with random content in one precision."""

    def __init__(
        self,
        module: nn.Module,
        form: CallForm,
        call: SeenCall,
        size: SequenceSize,
        precision: _Precision,
    ) -> None:
        self._form, self._tokens = form, size.rows * size.length
        self._size = SequenceSize(min(size.rows, 2), _POSITIONS)
        self._dtype, self._tolerance = precision
        self._draw = torch.Generator().manual_seed(0)
        self._twin, self._parameters = random_twin(module, self._dtype, self._draw)
        self._leaves = [
            self._content(leaf, each.dim) if isinstance(leaf, SeenTensor) else leaf
            for leaf, each in zip(call.leaves, form.leaves, strict=True)
        ]

    def _content(self, leaf: SeenTensor, dim: int | None) -> Tensor:
        shape = list(leaf.shape)
        if dim == 1:
            shape[:2] = [min(shape[0], self._size.rows), _POSITIONS]
        elif dim == 0:
            shape[0] = self._size.rows * _POSITIONS
        if leaf.dtype.is_floating_point:
            return torch.randn(shape, generator=self._draw, dtype=self._dtype)
        return torch.randint(0, 2, shape, generator=self._draw).to(leaf.dtype)

    def proven(self) -> ProvenForm | None:
        """Returns the form of the call; None if a rule does not hold."""
        found = None
        for training in (False, True):
            self._twin.train(training)
            if (found := self._in_mode()) is None:
                return None
        assert found is not None
        return found._replace(draws=self._draws())

    def _in_mode(self) -> ProvenForm | None:
        before = _state(self._twin)
        with _WithoutDropout(), _EqualRows(), _no_draws() as drawn:
            saved = _Saved()
            with saved.hooks():
                whole = self._run(self._leaves)
            parts = [self._run(self._part(self._leaves, self._form, keep)) for keep in map(torch.tensor, _SETS)]
        if drawn() or not _same_state(before, _state(self._twin)):
            return None
        made, spec = flatten_leaves(whole.out)
        dims = [self._size.dim_of(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in made]
        tensors = [dim for leaf, dim in zip(made, dims, strict=True) if isinstance(leaf, Tensor)]
        if not tensors or None in tensors or not whole.floats:
            return None
        for keep, part in zip(map(torch.tensor, _SETS), parts, strict=True):
            if not self._equal(whole, part, dims, keep):
                return None
        rows = self._size.rows * _POSITIONS
        given = [x for x, each in zip(self._leaves, self._form.leaves, strict=True) if each.dim is not None]
        stream = sum(x.numel() for x in (*given, *(x for x in made if isinstance(x, Tensor)))) // rows
        kept = saved.elements(
            (*whole.inputs, *made, *self._parameters, *self._twin.parameters(), *self._twin.buffers())
        )
        return ProvenForm(self._form, spec, tuple(dims), stream, kept // rows, self._tokens)

    def _run(self, leaves: Sequence[Any]) -> _Run:
        own = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = [leaf for leaf in own if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        given = [leaf.requires_grad_().view_as(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
                 for leaf in own]  # fmt: skip
        versions = [leaf._version for leaf in given if isinstance(leaf, Tensor)]
        out = self._form.call(self._twin.forward, given)
        if versions != [leaf._version for leaf in given if isinstance(leaf, Tensor)]:
            raise ValueError("an argument was written in place")
        floats = [leaf for leaf in flatten_leaves(out)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return _Run(inputs, out, floats)

    def _part(self, leaves: Sequence[Any], form: CallForm, keep: Tensor) -> list[Any]:
        return [self._kept(leaf, each.dim, keep) for leaf, each in zip(leaves, form.leaves, strict=True)]

    def _kept(self, leaf: Any, dim: int | None, keep: Tensor) -> Any:
        return leaf if dim is None else leaf.index_select(dim, self._places(dim, keep))

    def _places(self, dim: int, keep: Tensor) -> Tensor:
        return keep if dim == 1 else (torch.arange(self._size.rows)[:, None] * _POSITIONS + keep).flatten()

    def _equal(self, whole: _Run, part: _Run, dims: Sequence[int | None], keep: Tensor) -> bool:
        """Compares values and gradients of a run on the positions ``keep`` with those of the run on all."""
        ours, theirs = flatten_leaves(part.out), flatten_leaves(whole.out)
        if ours[1] != theirs[1]:
            return False
        for one, other, dim in zip(ours[0], theirs[0], dims, strict=True):
            if isinstance(other, Tensor):
                if not isinstance(one, Tensor) or not self._close(one, self._kept(other, dim, keep)):
                    return False
            elif one != other:
                return False
        floating = [dim for leaf, dim in zip(theirs[0], dims, strict=True)
                    if isinstance(leaf, Tensor) and leaf.is_floating_point()]  # fmt: skip
        some = [torch.randn(x.shape, generator=self._draw, dtype=x.dtype) for x in part.floats]
        spread = [torch.zeros_like(x).index_copy(dim, self._places(dim, keep), y)
                  for x, y, dim in zip(whole.floats, some, floating, strict=True) if dim is not None]  # fmt: skip
        mine = self._gradients(part, some)
        full = self._gradients(whole, spread)
        forms = [each.dim for leaf, each in zip(self._leaves, self._form.leaves, strict=True)
                 if isinstance(leaf, Tensor) and leaf.is_floating_point()]  # fmt: skip
        forms += [None] * len(self._parameters)
        pairs = zip(mine, full, forms, strict=True)
        return all(self._close(one, self._kept(other, dim, keep)) for one, other, dim in pairs)

    def _gradients(self, run: _Run, cotangents: list[Tensor]) -> list[Tensor]:
        pairs = [(x, y) for x, y in zip(run.floats, cotangents, strict=True) if x.requires_grad]
        wanted = (*run.inputs, *self._parameters)
        if not pairs:
            return [torch.zeros_like(x) for x in wanted]
        outs, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outs, wanted, grads, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, found, strict=True)]

    def _close(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        if not other.numel():
            return True
        most = self._tolerance * float(other.detach().abs().max().clamp(min=1e-6))
        return float((one - other).detach().abs().max()) <= most

    def _draws(self) -> bool:
        with _no_draws() as drawn:
            self._run(self._leaves)
        return drawn()


def random_twin(module: nn.Module, dtype: torch.dtype, draw: torch.Generator) -> tuple[nn.Module, list[Tensor]]:
    """Returns a copy of ``module`` with random parameters of ``dtype``, and the leaf tensors of these parameters.

    To save memory, a matrix with more than 2**22 elements repeats one row. ``draw``: generator of the random numbers.
    """
    leaves, fresh = list[Tensor](), dict[int, Any]()
    for each in module.parameters():
        shape = list(each.shape)
        thin = each.numel() > _LARGE and len(shape) > 1
        if thin:
            shape[-2] = 1
        scale = each.shape[-1] ** -0.5 if each.ndim > 1 else 1.0
        leaf = (torch.randn(shape, generator=draw, dtype=dtype) * scale).requires_grad_()
        leaves.append(leaf)
        fresh[id(each)] = leaf.expand(each.shape) if thin else nn.Parameter(leaf.detach())
        if not thin:
            leaves[-1] = fresh[id(each)]
    twin = copy.deepcopy(module, fresh)
    for own in twin.modules():
        for name, buffer in own._buffers.items():
            if buffer is not None:
                own._buffers[name] = _content_of(buffer, dtype)
    return twin, leaves


def _content_of(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    made = torch.ones(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.detach().cpu().clone()
    return made.to(dtype) if made.is_floating_point() else made


class _WithoutDropout(TorchFunctionMode):
    """Mode in which dropout of elements changes nothing, since it treats every element by itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUT:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


class _EqualRows(TorchFunctionMode):
    """Mode in which a product with a matrix of equal rows computes one of them, so that large layers take no time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row = _row_of(args[1]) if func in (functional.linear, functional.embedding) and len(args) > 1 else None
        if row is None:
            return func(*args, **(kwargs or {}))
        if func is functional.embedding:
            return row.expand(*args[0].shape, row.shape[1]).contiguous()
        x, weight, bias = (*args, (kwargs or {}).get("bias"))[:3]
        y = functional.linear(x, row).expand(*x.shape[:-1], len(weight)).contiguous()
        return y if bias is None else y + bias


def _row_of(weight: Tensor) -> Tensor | None:
    """Returns the row [1, I] that a twin's matrix [O, I] repeats; None if its rows differ."""
    return weight._base if weight.ndim == 2 and weight._base is not None and weight.stride(0) == 0 else None


@contextmanager
def _no_draws() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True if a random number has been drawn inside the context."""
    torch_state, host = torch.get_rng_state(), HostState.take()
    found: list[bool] = []
    yield lambda: found[0]
    found.append(not torch.equal(torch.get_rng_state(), torch_state) or not host.is_present())


class _Saved:
    """Memory that autograd saves."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def hooks(self) -> saved_tensors_hooks:
        """Returns the hooks of a forward."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def elements(self, others: Sequence[Any]) -> int:
        """Returns the saved elements that share no memory with ``others``."""
        known = {other.untyped_storage()._cdata for other in others if isinstance(other, Tensor)}
        return sum(tensor.numel() for memory, tensor in self._kept.items() if memory not in known)


def _state(module: nn.Module) -> list[tuple[dict[str, Any], list[Any], dict[str, Tensor]]]:
    """Returns the attributes, the items of holders among them, and the content of buffers."""
    return [
        (
            dict(vars(each)),
            [copy.copy(value) for value in vars(each).values() if type(value) in (list, dict, set)],
            {name: buffer.clone() for name, buffer in each._buffers.items() if buffer is not None},
        )
        for each in module.modules()
    ]


def _same_state(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return False
    for (old, held, stored), (new, holding, storing) in zip(before, after, strict=True):
        if old.keys() != new.keys() or any(old[key] is not new[key] for key in old):
            return False
        if len(held) != len(holding) or any(map(_differ, held, holding)):
            return False
        if stored.keys() != storing.keys() or any(not torch.equal(stored[key], storing[key]) for key in stored):
            return False
    return True


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) != list(other) or any(one[key] is not other[key] for key in one)
    if len(one) != len(other) or isinstance(one, set):
        return bool(one != other)
    return any(a is not b for a, b in zip(one, other, strict=True))
