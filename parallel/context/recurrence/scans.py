"""Functions that carry a state along positions, found by trial, run by each rank on its own runs of positions.

    y, state = scan(x, initial_state=None, output_final_state=False)

A function of a model's module is proposed if an optional argument is None and a flag is False. A trial on random
content decides: with the flag it returns a state too, and its results on two parts of a sequence, with the first
part's state passed to the second, equal those on the whole sequence, gradients included. Ranks then run the function
in the order of their positions, and the state moves from rank to rank: its size does not depend on the length.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from itertools import product
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from engine.parallel.context.recurrence.placed import (
    PlacedTensor,
    mapped,
    requires_grad,
    slice_on_rank,
    state_of,
    tensor_leaves,
    with_gradient,
)
from engine.parallel.context.recurrence.placed_rules import join_pieces
from engine.parallel.context.rows.functions import follow_function, is_custom
from engine.parallel.context.rows.rowwise_proof import apart
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.method_globals import replace_in_methods
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext, TensorRule

_LENGTH, _PART = 37, 21
"""Positions of a trial, and of its first part: no multiples of a chunk."""


class Carry(NamedTuple):
    """Names of a scan function's arguments for its state, and the dim of positions in its result.

    ``state``: name of the argument for the initial state; ``flag``: name of the argument that requests the last state.
    """

    state: str
    flag: str
    dim: int


def relay_scans(model: nn.Module, patches: ForwardPatches) -> None:
    """Patches methods of ``model`` so that scan functions run on each rank's own positions.

    A scan takes and returns a state, which ranks pass on in order of position. A scan or custom autograd
    function runs unchanged if a trial run on parts gives other results than on the full tensors. ``patches``: list
    that records the changes.
    """
    relayed: dict[Any, Any] = {}

    def choose(found: Any) -> Any:
        if isinstance(found, FunctionType) and _proposed(found):
            return relayed.setdefault(found, _relay(found))
        return relayed.setdefault(found, follow_function(found)) if is_custom(found) else found

    note = "runs scans and autograd functions on the positions of each rank"
    replace_in_methods(model, patches, PatchLayer.TENSOR, note, choose)


def _proposed(function: FunctionType) -> bool:
    if function.__module__.split(".")[0] in ("torch", "builtins"):
        return False
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.default is None for one in given) and any(one.default is False for one in given)


def _relay(function: FunctionType) -> Callable[..., Any]:
    """Returns ``function``, which runs on each rank's positions if arguments are sharded and a trial permits it."""
    signature = inspect.signature(function)

    @wraps(function)
    def relayed(*args: Any, **kwargs: Any) -> Any:
        sharded = [one for one in (*args, *kwargs.values()) if type(one) is GlobalTensor and any(one.sets)]
        if not sharded:
            return function(*args, **kwargs)
        try:
            return _run(function, signature, args, kwargs, sharded)
        except NoRuleError:
            return function(*args, **kwargs)

    return relayed


def _run(
    function: FunctionType, signature: inspect.Signature, args: Any, kwargs: Any, sharded: Sequence[GlobalTensor]
) -> Any:
    """Runs ``function`` on the runs of positions in their order.

    Raises:
        NoRuleError: no trial permits it, or arguments are sharded differently.
    """
    first = sharded[0]
    context = first.views
    bound = signature.bind(*args, **kwargs)
    dims = {id(one): _dim(one) for one in sharded}
    index = first.sets[dims[id(first)]]
    assert index is not None
    if any(one.sets[dims[id(one)]] != index for one in sharded) or not index.once:
        raise NoRuleError("the arguments of the function are sharded differently.")
    if any(type(one) is PlacedTensor for one in bound.arguments.values()):
        raise NoRuleError("the function has a state already.")
    key = ("carry", function, tuple(map(_kind, bound.arguments.items())))
    carry = context.find(key, lambda: _found(function, bound, signature))
    made, state = [], None
    for start, stop, rank in _runs(index):
        cut = {name: _piece(one, dims, start, stop) for name, one in bound.arguments.items()}
        cut |= {carry.state: state, carry.flag: True}
        out, state = _split(_on(function, signature, cut, rank, first), carry, stop - start)
        made.append(out)
    joined = join_pieces(made, carry.dim)
    without = context.find((*key, "shape"), lambda: _returned(function, bound, signature))
    wanted = bool(bound.arguments.get(carry.flag, False))
    return joined if without and not wanted else (joined, state if wanted else None)


def _dim(x: GlobalTensor) -> int:
    found = [dim for dim, one in enumerate(x.sets) if one is not None]
    if len(found) != 1:
        raise NoRuleError("a scan needs one sharded dim.")
    return found[0]


def _kind(item: tuple[str, Any]) -> Any:
    name, value = item
    if isinstance(value, Tensor):
        sets = value.sets if type(value) is GlobalTensor else ()
        return name, tuple(value.shape), value.dtype, sets
    return name, value if isinstance(value, bool | int | float | str | None) else repr(value)


def _runs(index: Index) -> list[tuple[int, int, int]]:
    """Returns the runs of positions (start, stop, rank) in their order."""
    return sorted((start, stop, rank) for rank, held in enumerate(index.runs) for start, stop in held.tolist())


def _piece(value: Any, dims: dict[int, int], start: int, stop: int) -> Any:
    if type(value) is GlobalTensor:
        return slice_on_rank(value, dims[id(value)], start, stop) if id(value) in dims else value.local
    return value


def _on(function: Function, signature: inspect.Signature, given: dict[str, Any], rank: int, like: GlobalTensor) -> Any:
    """Returns the results of ``function`` on ``rank``, with shapes only on other ranks."""
    context = like.views
    given = mapped(lambda one: one.on(rank) if type(one) is PlacedTensor else one, given)
    graded = torch.is_grad_enabled() and any(map(requires_grad, tensor_leaves(given)))
    if context.axis.index == rank:
        out = _call(function, signature, mapped(lambda one: one.local if type(one) is PlacedTensor else one, given))
    else:
        key = ("scan on meta", function, tuple(map(_kind, given.items())))
        out = context.find(key, lambda: _call_on_meta(function, signature, given))
    age = state_of(like).next_age()

    def place(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        local = with_gradient(one.detach() if context.axis.index != rank else one, graded)
        return PlacedTensor.place(local, context, (rank, age), like.device, True)

    return mapped(place, out)


def _call(function: Function, signature: inspect.Signature, given: dict[str, Any]) -> Any:
    bound = inspect.BoundArguments(signature, given)
    return function(*bound.args, **bound.kwargs)


def _call_on_meta(function: Function, signature: inspect.Signature, given: dict[str, Any]) -> Any:
    def twin(one: Any) -> Any:
        return torch.empty(tuple(one.shape), dtype=one.dtype, device="meta") if isinstance(one, Tensor) else one

    with apart(), torch.no_grad():
        return _call(function, signature, mapped(twin, given))


def _split(out: Any, carry: Carry, length: int) -> tuple[Any, Any]:
    """Returns the result along positions, and the state."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise NoRuleError("the function does not return a result and a state.")
    first = out[0]
    if not isinstance(first, Tensor) or first.shape[carry.dim] != length:
        raise NoRuleError("the first result is not along positions.")
    return first, out[1]


def recurrent_layer(
    context: "GlobalTensorContext", func: Function, input: Any, hx: Any, params: Any, *options: Any
) -> Any:
    """Computes torch's own recurrences (``nn.GRU``, ``nn.LSTM``, ``nn.RNN``) over a sharded sequence.

    Ranks run one after the other and send the state to the next. Returns the output, sharded along positions, and the
    last state.

    Raises:
        NoRuleError: the recurrence runs in both directions, or draws dropout between its layers.
    """
    dropout, train, bidirectional, batch_first = options[2:]
    dim = 1 if batch_first else 0
    if type(input) is not GlobalTensor or input.sets[dim] is None or bidirectional or (dropout and train):
        raise NoRuleError("a recurrence has a rule for one direction, along a sharded dim, without dropout.")
    index, state, made = input.sets[dim], hx, []
    assert index is not None
    for start, stop, _ in _runs(index):
        out, *last = func(slice_on_rank(input, dim, start, stop), state, params, *options)
        state = last if isinstance(hx, tuple | list) else last[0]
        made.append(out)
    return (join_pieces(made, dim), *(state if isinstance(hx, tuple | list) else (state,)))


LAYER_RULES: Mapping[Any, "TensorRule"] = MappingProxyType(
    dict.fromkeys((torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu), recurrent_layer)
)
"""Rules of torch's own recurrences."""


# ---- trial


def _found(function: FunctionType, bound: inspect.BoundArguments, signature: inspect.Signature) -> Carry:
    """Returns the arguments of the state for which a trial holds.

    Raises:
        NoRuleError: there are none.
    """
    given = {
        name: bound.arguments.get(name, one.default)
        for name, one in signature.parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and (name in bound.arguments or one.default is not one.empty)
    }
    states = [name for name, one in signature.parameters.items() if one.default is None and given.get(name) is None]
    flags = [name for name, one in signature.parameters.items() if one.default is False]
    states.sort(key=lambda name: "state" not in name)
    flags.sort(key=lambda name: "state" not in name)
    with apart():
        whole = _random(given, _LENGTH)
        for state, flag in product(states, flags):
            with suppress(NoRuleError):
                if (dim := _holds(function, signature, whole, (state, flag))) is not None:
                    return Carry(state, flag, dim)
    raise NoRuleError("no trial shows that the function carries a state along positions.")


def _random(given: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns arguments with random content, of ``length`` positions, and the dims of positions by name."""
    draw = torch.Generator().manual_seed(0)

    def content(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        if type(value) is GlobalTensor and any(value.sets):
            shape[_dim(value)] = length
        if not value.dtype.is_floating_point:
            return torch.ones(shape, dtype=value.dtype)
        return (-0.1 - 0.8 * torch.rand(shape, generator=draw)).to(value.dtype).requires_grad_()

    made = {name: content(value) for name, value in given.items()}
    dims = {name: _dim(value) for name, value in given.items() if type(value) is GlobalTensor and any(value.sets)}
    return made | {"": dims}


def _holds(
    function: FunctionType, signature: inspect.Signature, whole: dict[str, Any], names: tuple[str, str]
) -> int | None:
    """Returns the dim of positions of the result if two parts with a state in between equal the whole; else None."""
    state, flag = names
    dims = whole[""]
    plain = {name: value for name, value in whole.items() if name}

    def cut(start: int, stop: int) -> dict[str, Any]:
        return {
            name: value.narrow(dims[name], start, stop - start) if name in dims else value
            for name, value in plain.items()
        }

    def run(start: int, stop: int, before: Any) -> tuple[Tensor, Any]:
        out = _call(function, signature, cut(start, stop) | {state: before, flag: True})
        if not isinstance(out, tuple | list) or len(out) != 2 or not isinstance(out[0], Tensor):
            raise NoRuleError("the function does not return a result and a state.")
        return out[0], out[1]

    try:
        with torch.enable_grad():
            full, last = run(0, _LENGTH, None)
            along = [dim for dim, size in enumerate(full.shape) if size == _LENGTH]
            if len(along) != 1 or not _tensors(last):
                return None
            first, between = run(0, _PART, None)
            second, end = run(_PART, _LENGTH, between)
            parts = torch.cat([first, second], along[0])
            pairs = [(full, parts), *zip(_tensors(last), _tensors(end), strict=True)]
            inputs = [one for one in plain.values() if isinstance(one, Tensor) and one.requires_grad]
            grads = (_gradients(one, inputs) for one in (full, parts))
            pairs += zip(*grads, strict=True)
    except Exception as error:
        raise NoRuleError(f"the function does not take these arguments: {error}") from None
    alone = run(_PART, _LENGTH, None)[0]
    needed = not torch.allclose(alone.float(), second.float(), rtol=1e-4, atol=1e-5)
    close = all(a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4) for a, b in pairs)
    return along[0] if close and needed else None


def _tensors(state: Any) -> list[Tensor]:
    return [one for one in tree_flatten(state)[0] if isinstance(one, Tensor)]


def _gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, found, strict=True)]


def _returned(function: FunctionType, bound: inspect.BoundArguments, signature: inspect.Signature) -> bool:
    """Returns True if the function without a state returns its result alone."""
    given = dict(bound.arguments)
    for name, one in signature.parameters.items():
        if one.default is False and name in given and "state" in name:
            given[name] = False
    return isinstance(_call_on_meta(function, signature, given), Tensor)
