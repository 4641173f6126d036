"""Forms of module calls, and the dim of each argument that has positions.

[B, S, ..] or [1, S, ..]    dim 1
[B * S, ..]                 dim 0, rows of the flattened batch
anything else               no positions: equal for all
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types of arguments that two calls are compared by."""


class SeenTensor(NamedTuple):
    """Shape and dtype of a tensor argument, recorded in place of the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SeenCall:
    """Arguments of one recorded module call, flattened, with shape and dtype in place of tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


class LeafForm(NamedTuple):
    """Condition for one argument of a call: it is a tensor with ``dims`` dims, or equals ``value``.

    ``dims``: None for an argument that is no tensor. ``dim``: the tensor's dim of positions; None: it has none.
    """

    dims: int | None
    dim: int | None = None
    value: Any = None


@dataclass(frozen=True)
class CallForm:
    """Conditions for all arguments of a call: their pytree structure, and a :class:`LeafForm` for each leaf."""

    spec: pytree.TreeSpec
    leaves: tuple[LeafForm, ...]

    def match(self, args: Any, kwargs: Any) -> list[Any] | None:
        """Returns the arguments as a flat list of leaves; None if they do not satisfy the conditions."""
        if self.positional:  # a tree costs a hundred calls
            leaves, same = args, not kwargs and len(args) == len(self.leaves)
        else:
            leaves, spec = flatten_leaves((args, kwargs))
            same = spec == self.spec
        return list(leaves) if same and all(map(_fits, leaves, self.leaves)) else None

    @cached_property
    def positional(self) -> bool:
        """True if all arguments are positional and none is nested."""
        return bool(self.spec == flatten_leaves(((None,) * len(self.leaves), {}))[1])

    def call(self, function: Callable[..., Any], leaves: Iterable[Any]) -> Any:
        """Calls ``function`` with arguments rebuilt from ``leaves``, a result of :meth:`match`."""
        if self.positional:
            return function(*leaves)
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return function(*args, **kwargs)


def _fits(given: Any, form: LeafForm) -> bool:
    if isinstance(given, Tensor):
        return form.dims == given.ndim
    return form.dims is None and type(given) is type(form.value) and bool(given == form.value)


def flatten_leaves(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens ``tree`` as a pytree to (leaves, structure); a tensor of any subclass is a leaf."""
    return pytree.tree_flatten(tree, is_leaf=lambda leaf: isinstance(leaf, Tensor))


class CallRecorder:
    """Recorder of the calls of all modules of a model.

    Attributes:
        calls: different calls of each module, by module name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.calls: dict[str, list[SeenCall]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Adds the arguments of module calls during the block to ``calls``, by forward pre-hooks.

        Calls with arguments other than tensors, numbers, strings, dtypes, devices and None are left out.
        """
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                handle = module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, spec = flatten_leaves((args, kwargs))
        seen = [SeenTensor(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if all(isinstance(leaf, (SeenTensor, *_VALUES)) for leaf in seen):
            call = SeenCall(spec, tuple(seen))
            known = self.calls.setdefault(name, [])
            if call not in known:
                known.append(call)


class SequenceSize(NamedTuple):
    """Number of rows and of positions of a batch of sequences."""

    rows: int
    length: int

    def dim_of(self, shape: Sequence[int]) -> int | None:
        """Returns the dim of positions in a tensor of ``shape``: 1 for [rows or 1, positions, ..], 0 for [rows *
        positions, ..].

        Returns None for any other shape.
        """
        if len(shape) > 1 and shape[0] in (self.rows, 1) and shape[1] == self.length:
            return 1
        return 0 if len(shape) > 0 and shape[0] == self.rows * self.length else None

    def form_of(self, call: SeenCall) -> CallForm | None:
        """Returns conditions for calls with the argument structure, numbers of tensor dims and non-tensor values of the
        recorded ``call``.

        Sizes and dtypes of tensors may differ. Returns None if no floating-point argument has positions.
        """
        forms = [
            LeafForm(len(leaf.shape), self.dim_of(leaf.shape))
            if isinstance(leaf, SeenTensor)
            else LeafForm(None, None, leaf)
            for leaf in call.leaves
        ]
        found = (
            isinstance(leaf, SeenTensor) and leaf.dtype.is_floating_point and form.dim is not None
            for leaf, form in zip(call.leaves, forms, strict=True)
        )
        return CallForm(call.spec, tuple(forms)) if any(found) else None


def sequences_of(batch: Iterable[Tensor], calls: Iterable[Sequence[SeenCall]]) -> tuple["SequenceSize", ...]:
    """Returns the different sizes (rows, positions) of a forward's sequences of at least four positions, longest first.

    A size is the first two dims of a batch tensor, or of a recorded floating-point argument with three dims and as many
    rows as a batch tensor.
    """
    given = [tuple(tensor.shape) for tensor in batch if tensor.ndim]
    rows = {shape[0] for shape in given}
    found = {shape[:2] for shape in given if len(shape) > 1}
    for known in calls:
        for leaf in (leaf for call in known for leaf in call.leaves):
            streams = isinstance(leaf, SeenTensor) and len(leaf.shape) == 3 and leaf.dtype.is_floating_point
            if streams and leaf.shape[0] in rows:
                found.add(leaf.shape[:2])
    return tuple(SequenceSize(*pair) for pair in sorted(found, key=lambda pair: -pair[1]) if pair[1] >= _LEAST)


_LEAST = 4
"""Positions from which on a dim may be a sequence."""
