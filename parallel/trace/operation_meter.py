"""Dispatch mode of a traced forward: counts FLOPs, finds random operations, and reuses known results.

A model repeats its blocks, and torch computes most shapes of meta tensors in Python, at a hundred times the price of an
empty tensor. So a functional operation runs once for each form of its arguments: it has no memory to share and nothing
to write, and its result on meta tensors has no content.

    operation --> form of its arguments --- new ----> torch runs it; sizes, strides and FLOPs of the result are kept
                                         \\- known --> an empty tensor of the same sizes and strides
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

META = torch.device("meta")

_KNOWN = frozenset(("aten", "prims", "profiler", "c10d", "_c10d_functional"))
"""Namespaces with tagged random operations; operations of others count as random."""
_DECLARED = frozenset(("aten", "prims", "trine"))
"""Namespaces with schemas that declare truly the memory an operation shares and writes."""
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


class _Form(NamedTuple):
    """Form of a dense meta tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Returns a new meta tensor of this form."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=META)


class _Outcome(NamedTuple):
    """Outcome of an operation on arguments of one form."""

    made: tuple[_Form, ...]
    single: bool
    """One tensor, not a tuple of tensors."""
    flops: int
    draws: bool


class _NoFormError(Exception):
    """An argument that is more than its form."""


def is_metered() -> bool:
    """Returns True while an :class:`OperationMeter` is active. A forward then runs on meta tensors."""
    return any(isinstance(mode, OperationMeter) for mode in _get_current_dispatch_mode_stack())


class OperationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode that counts the FLOPs of matrix products, convolutions and attention. It sets ``draws`` to
    True if a random operation runs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # imports triton, which a rank without a trace does not need

        self._formulas = flop_registry
        self.flops = 0
        self.draws = False
        self._outcomes: dict[object, _Outcome] = {}
        self._functional: dict[object, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and hiding the mode from Dynamo costs time at each operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = self._form(func, args, kwargs)
        known = self._outcomes.get(form) if form is not None else None
        if known is not None:
            self._count(known.flops, known.draws)
            made = [entry.tensor() for entry in known.made]
            return made[0] if known.single else tuple(made)
        out = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "_overloadpacket", None))
        flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        draws = _draws(func, args, kwargs)
        self._count(flops, draws)
        single = type(out) is Tensor
        outs = [out] if single else out
        if form is not None and all(map(_is_its_form, outs)):
            self._outcomes[form] = _Outcome(tuple(map(_form_of, outs)), single, flops, draws)
        return out

    def _count(self, flops: int, draws: bool) -> None:
        self.flops += flops
        self.draws = self.draws or draws

    def _form(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
        """Returns the key that determines the form of the result; None if it is unknown."""
        functional = self._functional.get(func)
        if functional is None:
            functional = self._functional[func] = _is_functional(func)
        if not functional:
            return None
        try:
            named = [(name, _described(value)) for name, value in kwargs.items()]
            return func, torch.get_default_dtype(), _described(args), tuple(named)
        except _NoFormError:
            return None


def _is_functional(func: Any) -> bool:
    """Arguments are only read, and every result is a new tensor."""
    schema = func._schema
    if func.namespace not in _DECLARED or not schema.returns:
        return False
    shares = any(entry.alias_info is not None for entry in (*schema.arguments, *schema.returns))
    return not shares and all(str(entry.type) == "Tensor" for entry in schema.returns)


def _described(value: Any) -> object:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if not value.is_meta or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise _NoFormError
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if kind is tuple or kind is list:
        return tuple(map(_described, value))
    if kind not in _CONSTANTS:
        raise _NoFormError
    return kind, value  # 1, 1.0 and True are equal, but give other dtypes


def _form_of(tensor: Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _is_its_form(tensor: Any) -> bool:
    """Returns True for a plain meta tensor with a memory of just its size."""
    if type(tensor) is not Tensor or not tensor.is_meta or tensor.layout != torch.strided or tensor.storage_offset():
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    return _form_of(tensor).tensor().untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    marked = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _KNOWN
    return marked and not _drops_nothing(func, args, kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True for attention with dropout 0: its kernels are tagged as random for their dropout."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
