"""What a torch optimizer remembers, as tensors of parameters and plain numbers.

moments    state tensors of their parameter's shape: cut, stored and loaded like the parameter
numbers    single values ("step" of torch's Adam), by optimizer group
options    what the groups say (lr, betas, the step count of the built-in optimizers)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.image import torch_dtype
from engine.checkpoint.json_text import natural
from engine.checkpoint.tensor_file import Kind, code_of
from engine.errors import CheckpointError
from engine.parallel.shards import ShardTable
from engine.zero.inner import FlatOptimizer
from engine.zero.optimizer import Place, ShardedOptimizer

Moments = dict[nn.Parameter, dict[str, Tensor]]
Numbers = dict[str, dict[str, list[Any]]]
"""Group -> name -> [value, dtype of a tensor or None]."""


def moments(optimizer: ShardedOptimizer) -> Moments:
    """By what the optimizer updates, and name; nothing before the first step."""
    state = optimizer.inner.state
    return {
        place.parameter: {
            name: value for name, value in state[place.parameter].items() if _is_moment(name, value, place)
        }
        for place in optimizer.places
        if place.parameter in state
    }


def numbers(optimizer: ShardedOptimizer) -> Numbers:
    """Single values, which all parameters of a group have to share.

    Raises:
        CheckpointError: they do not, or the state is neither a moment nor a number.
    """
    found: Numbers = {}
    for group, place in _grouped(optimizer):
        values = found.setdefault(str(group), {})
        for name, value in optimizer.inner.state.get(place.parameter, {}).items():
            if _is_moment(name, value, place):
                continue
            number = _number(name, value, optimizer)
            if values.setdefault(name, number) != number:
                raise CheckpointError(
                    f"optimizer {type(optimizer.inner).__name__}: {name!r} is {number[0]} for some parameters of group "
                    f"{group} and {values[name][0]} for others; a checkpoint holds one for the group."
                )
    return found


def merge_numbers(ranks: Sequence[Numbers]) -> Numbers:
    """Those of all ranks; a rank that has no parameter of a group says nothing about it."""
    merged: Numbers = {}
    for given in ranks:
        for group, values in given.items():
            for name, number in values.items():
                if merged.setdefault(group, {}).setdefault(name, number) != number:
                    raise CheckpointError(
                        f"ranks disagree on {name!r} of optimizer group {group}; look for a skipped step."
                    )
    return merged


def describe(optimizer: ShardedOptimizer, table: ShardTable) -> dict[str, Any]:
    """Type and groups, for the manifest."""
    groups = [
        {"params": names, "options": {key: value for key, value in group.items() if _is_plain(key, value)}}
        for group, names in zip(optimizer.inner.param_groups, _names(optimizer, table), strict=True)
    ]
    return {"type": _type(optimizer), "groups": groups}


def check_type(optimizer: ShardedOptimizer, stored: Mapping[str, Any], step: object) -> None:
    """Refuse the state of another optimizer."""
    own = _type(optimizer)
    if stored.get("type") != own:
        raise CheckpointError(
            f"{step} has the optimizer state of {stored.get('type')}, and this run's optimizer is {own}; load it with "
            "load_optimizer_states=False, or configure the same optimizer."
        )


def make_moments(optimizer: ShardedOptimizer, stored: Mapping[str, Kind]) -> Moments:
    """Zeros for the moments that are stored ("exp_avg" -> a parameter's), in place of all state."""
    inner = optimizer.inner
    made: Moments = {}
    for place in optimizer.places:
        inner.state[place.parameter] = made[place.parameter] = {
            name: torch.zeros_like(place.parameter.detach(), dtype=_dtype(inner, place.parameter, kind))
            for name, kind in stored.items()
        }
    return made


def restore(optimizer: ShardedOptimizer, table: ShardTable, stored: Mapping[str, Any], scheduled: bool) -> None:
    """Numbers and options.

    The built-in optimizers take the step count only, the configuration has the say; unless they are ``scheduled`` by
    a torch scheduler, which computes the next rates from those that the groups have.
    """
    inner = optimizer.inner
    by_name = {name: index for index, group in enumerate(stored["groups"]) for name in group["params"]}
    sources = [next((by_name[name] for name in names if name in by_name), None) for names in _names(optimizer, table)]
    for group, source in zip(inner.param_groups, sources, strict=True):
        options = stored["groups"][source]["options"] if source is not None else {}
        for key, value in options.items():
            if key == "step" and isinstance(inner, FlatOptimizer):
                group[key] = natural(value, "the optimizer's step")
            elif key != "params" and (scheduled or not isinstance(inner, FlatOptimizer)):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    for index, place in _grouped(optimizer):
        values = stored.get("numbers", {}).get(str(sources[index]), {})
        for name, (value, dtype) in values.items():
            if dtype is not None:
                value = torch.tensor(value, dtype=torch_dtype(Kind(code_of(dtype), ())))
            inner.state[place.parameter][name] = value


def _type(optimizer: ShardedOptimizer) -> str:
    return type(optimizer.inner).__name__.removeprefix("Flat")


def _grouped(optimizer: ShardedOptimizer) -> Iterator[tuple[int, Place]]:
    groups = {id(p): index for index, group in enumerate(optimizer.inner.param_groups) for p in group["params"]}
    for place in optimizer.places:
        if id(place.parameter) in groups:
            yield groups[id(place.parameter)], place


def _names(optimizer: ShardedOptimizer, table: ShardTable) -> list[list[str]]:
    """The parameters of every group, on all ranks."""
    names: list[list[str]] = [[] for _ in optimizer.inner.param_groups]
    for row in table:
        if row.trainable and row.group < len(names):
            names[row.group].append(row.name)
    return names


def _is_moment(name: str, value: Any, place: Place) -> bool:
    return isinstance(value, Tensor) and name != "step" and value.shape == place.parameter.shape


def _number(name: str, value: Any, optimizer: ShardedOptimizer) -> list[Any]:
    if isinstance(value, Tensor) and value.numel() == 1:
        return [value.item(), str(value.dtype).removeprefix("torch.")]
    if value is None or isinstance(value, bool | int | float | str):
        return [value, None]
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"optimizer {type(optimizer.inner).__name__} keeps {name!r}, {what}; a checkpoint takes state of the "
        "parameter's shape and single numbers."
    )


def _is_plain(key: str, value: Any) -> bool:
    """What JSON gives back as it was, but for tuples."""
    if isinstance(value, list | tuple):
        return key != "params" and all(_is_plain("", item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _dtype(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, stored: Kind) -> torch.dtype:
    rounding = getattr(optimizer, "rounding", None)
    if rounding is not None and parameter.dtype == torch.bfloat16:
        moments: torch.dtype = rounding.moments
        return moments
    kept = torch_dtype(stored)
    return parameter.dtype if kept.is_floating_point else kept
