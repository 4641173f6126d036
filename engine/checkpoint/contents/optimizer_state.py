"""State of a torch optimizer as tensors of its parameters and plain numbers.

moments    state tensors in their parameter's shape; sharded, saved and loaded like the parameter
numbers    scalars ("step" of torch's Adam), by parameter group, and by parameter if they differ in a group
fresh      parameters without state, because they had no gradient in any step
options    settings of the groups (lr, betas, the step count of the built-in optimizers)
missed     number of updates without a gradient, by parameter

State of a one-element parameter is saved as a moment, unless it is a number for others of its group (``arranged``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.format.host_image import torch_dtype
from engine.checkpoint.format.manifest import StoredTensor
from engine.checkpoint.format.safetensors_file import TensorKind, code_of
from engine.checkpoint.format.strict_json import as_finite, from_finite, natural
from engine.errors import CheckpointError
from engine.parallel.shard_table import ShardTable
from engine.zero.optim.averaged_weights import FAMILY
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.optimizer_tensors import OptimizerTensor
from engine.zero.optim.rules.element_state import element_state, kept_encoded
from engine.zero.optim.rules.schedule_free import ITERATE
from engine.zero.optim.sharded_optimizer import ShardedOptimizer

Moments = dict[nn.Parameter, dict[str, Tensor]]
Numbers = dict[str, dict[str, list[Any]]]
"""Scalars of optimizer state: parameter -> name -> [value, tensor dtype or None], plus the number of dims of a tensor
with dims.
"""

_NO_MOMENTS = frozenset({"param", "buffer", "master", FAMILY})
"""Families of tensors outside the optimizer's state."""

_SCHEDULED = frozenset({"lr", "betas", "momentum"})
"""Optimizer options that schedulers change."""


def moments_by_bucket(optimizer: ShardedOptimizer) -> Moments:
    """Returns the optimizer's moments as flat parameter -> moment name -> tensor; {} before the first step.

    Encoded moments, such as 8-bit codes, are decoded into host memory.
    """
    return element_state(optimizer, torch.device("cpu"))


def parameter_scalars(optimizer: ShardedOptimizer, table: ShardTable) -> Numbers:
    """Returns optimizer scalars, such as "step", as parameter name -> scalar name -> [value, dtype] (dtype None:
    not a tensor).

    The dict contains the parameters that this rank updates. All state of a one-element parameter counts as scalars.
    Returns {} for built-in optimizers.

    Raises:
        CheckpointError: a state is neither a moment nor a number.
    """
    if isinstance(optimizer.inner, FlatOptimizer):  # its numbers are group options
        return {}
    single = {row.name for row in table if row.elements == 1}
    found: Numbers = {}
    for place in optimizer.places:
        for parameter in place.names():  # one, or none for padding
            for name, value in optimizer.inner.state.get(place.parameter, {}).items():
                if parameter in single or not _is_moment(name, value, place):
                    found.setdefault(parameter, {})[name] = _number(name, value, optimizer)
    return found


def arranged(
    tensors: Mapping[str, StoredTensor], groups: Sequence[Mapping[str, Any]], numbers: Mapping[str, Any]
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Separates moments from scalars for the manifest. Returns ``tensors`` without the scalars, and a dict.

    In the dict, "numbers" has a dict of scalars for each group, by its index; "own_numbers", by name, has parameters
    with other values than their group; "fresh" lists parameters without state. A one-element tensor becomes a scalar if
    the same state is a scalar for other parameters of the group.

    Args:
        tensors: all tensors of the save by name, such as "exp_avg/NAME".
        groups: parameter groups from ``describe_optimizer``.
        numbers: scalars of all ranks, by parameter.

    Raises:
        CheckpointError: a state is a moment for some parameters of a group, and a scalar for others.
    """
    kept, common, own, fresh = dict(tensors), dict[str, Any](), dict[str, Any](), list[str]()
    for index, group in enumerate(groups):
        sent = {name: numbers.get(name, {}) for name in group["params"]}
        known = {kind for name, found in sent.items() for kind in found if f"{kind}/{name}" not in tensors}
        for key in (f"{kind}/{name}" for kind in known for name in sent):
            _check_single(key, kept.pop(key, None))
        counts = {name: {kind: found[kind] for kind in found if kind in known} for name, found in sent.items()}
        counts = {name: found for name, found in counts.items() if found}
        if counts:
            common[str(index)] = first = next(iter(counts.values()))
            own |= {name: found for name, found in counts.items() if found != first}
        fresh += _fresh(kept, counts, group["params"])
    return kept, {"numbers": common} | ({"own_numbers": own} if own else {}) | ({"fresh": fresh} if fresh else {})


def _check_single(key: str, tensor: StoredTensor | None) -> None:
    if tensor is not None and tensor.kind.elements != 1:
        kind, _, name = key.partition("/")
        raise CheckpointError(
            f"not saved: the optimizer has {kind!r} in the shape of {name!r} and as a number for other parameters of "
            "its group, but a checkpoint has one kind of state per group; put parameters that differ into separate "
            "groups."
        )


def _fresh(tensors: Iterable[str], counts: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Returns the parameters without a state in a group with some, because no step has had a gradient for them."""
    split = [key.partition("/") for key in tensors]
    having = {name for family, _, name in split if family not in _NO_MOMENTS}.intersection(names) | counts.keys()
    return [name for name in names if name not in having] if having else []


def merge_numbers(ranks: Sequence[Numbers]) -> Numbers:
    """Merges the optimizer scalars of all ranks into parameter name -> scalar name -> [value, dtype or None].

    Raises:
        CheckpointError: two ranks report different scalars for one parameter.
    """
    merged: Numbers = {}
    for given in ranks:
        for parameter, values in given.items():
            for name, number in values.items():
                if merged.setdefault(parameter, {}).setdefault(name, number) != number:
                    raise CheckpointError(
                        f"not saved: ranks disagree on {name!r} of parameter {parameter!r}, which must be equal on "
                        "all; look for a step that some ranks skipped."
                    )
    return merged


def describe_optimizer(optimizer: ShardedOptimizer, table: ShardTable, scheduled: frozenset[str]) -> dict[str, Any]:
    """Returns a JSON dict of the optimizer's type, its parameter groups, and the options that the user has changed.

    ``scheduled``: names of options that a schedule sets; changes of these options are not listed.
    """
    groups = [
        {
            "params": names,
            "options": {key: _plain(value) for key, value in group.items() if _is_plain(key, value)},
            **_by_hand(group, configured, scheduled),
        }
        for group, names, configured in zip(
            optimizer.inner.param_groups, _names(optimizer, table), optimizer.configured, strict=True
        )
    ]
    missed = {"missed": dict(sorted(optimizer.missed.items()))} if optimizer.missed else {}
    return {"type": _type(optimizer), "groups": groups, **missed}


def check_type(optimizer: ShardedOptimizer, stored: Mapping[str, Any], step: object) -> None:
    """Raises CheckpointError if the saved optimizer state ``stored`` is of another optimizer type than this run's.

    ``step`` names the checkpoint in the message. A checkpoint of another engine passes if it records no type.
    """
    own = _type(optimizer)
    known = [stored["type"]] if stored.get("type") else stored.get("types", [])
    if known and own not in known:
        raise CheckpointError(
            f"{step} has the optimizer state of {' or '.join(map(str, known))}, but this run's optimizer is {own}; "
            "configure the same optimizer, or load the weights alone with load_optimizer_states=False."
        )


def updated_parameters(stored: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the parameters that the saved run has updated at least once.

    ``stored``: the manifest's entry of a built-in optimizer.
    """
    missed = stored.get("missed", {})
    updates = {name: each.get("options", {}).get("step", 0) for each in stored["groups"] for name in each["params"]}
    return frozenset(name for name, count in updates.items() if isinstance(count, int) and count > missed.get(name, 0))


class Families:
    """Names of the optimizer moments, such as "exp_avg", that a checkpoint needs for each parameter.

    All parameters of one optimizer group need the same moments.
    """

    def __init__(
        self, kinds: Mapping[str, TensorKind], stored: Mapping[str, Any], apart: frozenset[str] = frozenset()
    ) -> None:
        """Sorts the families. ``apart``: families of tensors in shapes of their own."""
        named = [(name.partition("/")[0], name.partition("/")[2], kind) for name, kind in kinds.items()]
        others = _NO_MOMENTS | apart
        self.kinds = {family: kind for family, _, kind in named if family not in others}
        """Dtype and shape of each moment, taken from one of its parameters."""
        groups = {name: index for index, group in enumerate(stored["groups"]) for name in group["params"]}
        found: dict[int | None, set[str]] = {}
        for family, name, _ in named:
            if family in self.kinds and name in groups:
                found.setdefault(groups[name], set()).add(family)
        self._groups, self._found, self._fresh = groups, found, frozenset(stored.get("fresh", ()))

    def of(self, parameters: Iterable[str]) -> set[str]:
        """Returns the names of the moments that the checkpoint must have for at least one of ``parameters``."""
        groups = self._groups
        return {
            family
            for name in parameters
            if name not in self._fresh
            for family in (self._found.get(groups[name], ()) if name in groups else self.kinds)
        }

    def begins_anew(self, parameter: str) -> bool:
        """Returns True if the checkpoint has no optimizer state for ``parameter``."""
        return parameter in self._fresh or parameter not in self._groups


def make_moments(optimizer: ShardedOptimizer, families: Families, table: ShardTable) -> Moments:
    """Replaces the optimizer's moments by zeros, and schedule-free iterates by the weights, for a load to fill. Returns
    them.

    The result is flat parameter -> moment name -> tensor, with the moments of ``families``. Moments that the optimizer
    stores in 8 bits are returned unencoded, in host memory; a load passes them to ``keep_state`` after it has filled
    them.
    """
    inner, names = optimizer.inner, _names(optimizer, table)
    groups = {place.parameter: names[index] for index, place in _grouped(optimizer)}
    made: Moments = {}
    begun = None if isinstance(inner, FlatOptimizer) else optimizer.first_state()
    for place in optimizer.places:
        if begun is not None and any(map(families.begins_anew, place.names())):
            made[place.parameter], inner.state[place.parameter] = {}, dict(begun.get(place.parameter, {}))
            continue
        wanted = families.of(place.names() or groups.get(place.parameter, ()))
        coded = kept_encoded(optimizer, place.parameter)
        where = torch.device("cpu") if coded else place.parameter.device
        made[place.parameter] = {
            name: torch.zeros(place.parameter.shape, dtype=_dtype(inner, place.parameter, kind), device=where)
            for name, kind in families.kinds.items()
            if name in wanted
        }
        if isinstance(inner, FlatOptimizer) and ITERATE in made[place.parameter]:
            made[place.parameter][ITERATE].copy_(place.parameter.detach())
        inner.state[place.parameter] = {} if coded else made[place.parameter]
    return made


def _by_hand(group: Mapping[str, Any], configured: Mapping[str, Any], scheduled: frozenset[str]) -> dict[str, Any]:
    """Returns options that the user has changed since the optimizer was built: [value, configured value] by name."""
    names = [name for name in configured if name not in scheduled and _is_plain(name, group[name])]
    pairs = {name: [_plain(group[name]), _plain(configured[name])] for name in names}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return {"by_hand": changed} if changed else {}


def restore(
    optimizer: ShardedOptimizer, table: ShardTable, stored: Mapping[str, Any], scheduled: frozenset[str] = frozenset()
) -> None:
    """Restores the optimizer's scalars and group options from ``stored``, the optimizer entry of a checkpoint's
    manifest.

    A built-in optimizer restores its step count, and options that the user changed by hand. It does not restore options
    that a schedule sets (``scheduled``), or options with a new configured value. Other optimizers restore all saved
    options; a group with other parameters than before uses this run's learning rate and weight decay.
    """
    inner, sources = optimizer.inner, _sources(optimizer, table, stored)
    missed, known = stored.get("missed", {}), {name for each in stored["groups"] for name in each["params"]}
    optimizer.missed = {row.name: natural(missed[row.name], "missed updates") for row in table if row.name in missed}
    for group, names, source in zip(inner.param_groups, _names(optimizer, table), sources, strict=True):
        then = stored["groups"][source] if source is not None else {"params": [], "options": {}}
        if isinstance(inner, FlatOptimizer):
            for counted in inner.counted:
                group.pop(counted, None)  # a checkpoint from before the first update has none
            _put(group, {name: then["options"][name] for name in inner.counted if name in then["options"]})
            group["step"] = natural(then["options"].get("step", 0), "the optimizer's step")
            optimizer.missed.update({name: group["step"] for name in names if group["step"] and name not in known})
            for name, (value, configured) in then.get("by_hand", {}).items():
                if name in group and name not in scheduled and _plain(group[name]) == configured:
                    _put(group, {name: value})
            continue
        # rates of a group that was formed differently belong to other parameters
        kept = () if set(then["params"]) == set(names) else ("lr", "weight_decay")
        options = {key: value for key, value in then["options"].items() if key not in kept}
        _put(group, {key: value for key, value in options.items() if key != "step" or key in group})
    groups = {name: index for index, each in enumerate(stored["groups"]) for name in each["params"]}
    fresh, own = frozenset(stored.get("fresh", ())), stored.get("own_numbers", {})
    for index, place in _grouped(optimizer):
        name = next(iter(place.names()), None)  # built-in optimizers have several names a tensor, and no numbers
        if name in fresh or (name is not None and name not in groups):
            continue
        at = sources[index] if name is None else groups[name]
        values = stored.get("numbers", {}).get(str(at), {}) | own.get(name, {})
        device = _device_of_numbers(inner.param_groups[index], place.parameter)
        for name, number in values.items():
            inner.state[place.parameter][name] = _restored(number, device)


def _restored(number: Sequence[Any], device: torch.device) -> Any:
    """Inverts ``_number``."""
    value, dtype, *dims = from_finite(list(number))
    if dtype is None:
        return value
    shape = (1,) * min(natural(sum(dims), "the number of dims of an optimizer's scalar"), 64)
    return torch.tensor(value, dtype=torch_dtype(TensorKind(code_of(dtype), shape)), device=device).view(shape)


def check_schedule(optimizer: ShardedOptimizer, table: ShardTable, stored: Mapping[str, Any]) -> None:
    """Raises CheckpointError if this run groups its parameters otherwise than the run that saved the scheduler.

    ``stored``: the optimizer entry of the checkpoint's manifest.
    """
    sources, count = _sources(optimizer, table, stored), len(stored["groups"])
    if len(sources) != count or any(source not in (index, None) for index, source in enumerate(sources)):
        raise CheckpointError(
            f"the learning-rate scheduler was saved over {count} optimizer group(s), but this run's {len(sources)} "
            "have other parameters; group them as in the saved run (optimizer.no_weight_decay, optimizer.groups), or "
            "load with load_module_only=True."
        )


def restore_schedule(optimizer: ShardedOptimizer, stored: Mapping[str, Any]) -> None:
    """Restores the group options that a torch scheduler sets, such as the learning rate. ``stored``: the optimizer
    entry of the checkpoint's manifest. Call :func:`check_schedule` before.
    """
    for group, then in zip(optimizer.inner.param_groups, stored["groups"], strict=True):
        own = optimizer.inner.defaults.keys() - _SCHEDULED
        _put(group, {key: value for key, value in then["options"].items() if key in group and key not in own})


def _put(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        group[key] = _put_into(group.get(key), from_finite(value))


def _put_into(given: Any, value: Any) -> Any:
    if isinstance(given, Tensor):
        return given.fill_(value)  # compiled or captured code reads this tensor
    if isinstance(given, tuple) and isinstance(value, list):
        return tuple(map(_put_into, given, value)) if len(given) == len(value) else tuple(value)
    return value


def _sources(optimizer: ShardedOptimizer, table: ShardTable, stored: Mapping[str, Any]) -> list[int | None]:
    """Returns the index of the stored group with each group's first known parameter, or None."""
    by_name = {name: index for index, group in enumerate(stored["groups"]) for name in group["params"]}
    return [next((by_name[name] for name in names if name in by_name), None) for names in _names(optimizer, table)]


def _device_of_numbers(group: Mapping[str, Any], parameter: nn.Parameter) -> torch.device:
    """Returns the device of the step count in torch's optimizers."""
    there = group.get("capturable") or group.get("fused")
    return parameter.device if there else torch.device("cpu")


def _type(optimizer: ShardedOptimizer) -> str:
    inner = optimizer.inner
    return inner.kind if isinstance(inner, FlatOptimizer) else type(inner).__name__.removeprefix("Flat")


def _grouped(optimizer: ShardedOptimizer) -> Iterator[tuple[int, OptimizerTensor]]:
    groups = {id(p): index for index, group in enumerate(optimizer.inner.param_groups) for p in group["params"]}
    for place in optimizer.places:
        if id(place.parameter) in groups:
            yield groups[id(place.parameter)], place


def _names(optimizer: ShardedOptimizer, table: ShardTable) -> list[list[str]]:
    """Returns the names of the parameters of every group, on all ranks."""
    names: list[list[str]] = [[] for _ in optimizer.inner.param_groups]
    for row in table:
        if row.trainable and row.group < len(names):
            names[row.group].append(row.name)
    return names


def _is_moment(name: str, value: Any, place: OptimizerTensor) -> bool:
    return isinstance(value, Tensor) and name != "step" and value.shape == place.parameter.shape


def _number(name: str, value: Any, optimizer: ShardedOptimizer) -> list[Any]:
    if isinstance(value, Tensor) and value.numel() == 1:
        number = [as_finite(value.item()), str(value.dtype).removeprefix("torch.")]
        return [*number, value.dim()] if value.dim() else number
    if value is None or isinstance(value, bool | int | float | str):
        return [as_finite(value), None]
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"optimizer {type(optimizer.inner).__name__} has the state {name!r}, {what}, but a checkpoint stores state of "
        "the parameter's shape and single numbers only; use an optimizer with such state."
    )


def unsaved_state(optimizer: ShardedOptimizer) -> str | None:
    """Returns the name of an optimizer attribute with tensors that a checkpoint would miss, such as "self.muon"; else
    None.

    A checkpoint stores only ``self.state[parameter]`` and the options of the groups.
    """
    inner = optimizer.inner
    if isinstance(inner, FlatOptimizer):
        return None
    own = {id(place.parameter) for place in optimizer.places}
    elsewhere = next((key for key in inner.state if id(key) not in own), None)
    if elsewhere is not None:
        return f"self.state[{elsewhere!r:.40}]"
    known = own | {id(inner), id(inner.state), id(inner.param_groups), id(inner.defaults)}
    return next((f"self.{name}" for name, value in vars(inner).items() if _keeps_tensors(value, known, 4)), None)


def _keeps_tensors(value: Any, known: set[int], depth: int) -> bool:
    """Returns True for a tensor or an optimizer, and for an object with one up to ``depth`` references away."""
    if id(value) in known or isinstance(value, nn.Parameter | nn.Module | type):
        return False
    if isinstance(value, torch.optim.Optimizer):
        return id(value.state) not in known
    if isinstance(value, Tensor) or depth == 0:
        return isinstance(value, Tensor)
    known.add(id(value))
    inside = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
    if not isinstance(inside, list | tuple | set | frozenset):
        inside = () if callable(value) else vars(value).values() if hasattr(value, "__dict__") else ()
    return any(_keeps_tensors(item, known, depth - 1) for item in inside)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]  # as JSON returns it
    return as_finite(value.item() if isinstance(value, Tensor) else value)


def _is_plain(key: str, value: Any) -> bool:
    """Returns True for values that JSON returns unchanged, for tuples of them, and for tensors of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return key != "params" and all(_is_plain("", item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _dtype(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, stored: TensorKind) -> torch.dtype:
    rounding = getattr(optimizer, "rounding", None)
    if rounding is not None and parameter.dtype == torch.bfloat16:
        moments: torch.dtype = rounding.moments
        return moments
    kept = torch_dtype(stored)
    return parameter.dtype if kept.is_floating_point else kept
