"""Initialisation of a model on the meta device, block by block, with only this rank's shard in memory.

During the initialisation of a block that this rank needs, all parameters of the block exist in full. The model's own
initialisation draws them (Hugging Face's ``_init_weights``, or ``reset_parameters`` of the modules, children first),
then they are cut to the rank's shard. The seed is derived from the run's seed and the block's name, so values do not
depend on the grid. Weights from a folder (``checkpoint.init_from``) are only allocated here, and filled later.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import PlanError
from engine.parallel.model.adapters import check_drawn, reset_pairs
from engine.parallel.model.blocks import find_units
from engine.parallel.model.rng_streams import keyed_generators

Keep = Callable[[str, Tensor], Tensor]
"""A function (first name, full tensor) -> this rank's shard."""


@torch.no_grad()
def materialize(
    model: nn.Module, names: Collection[str], seed: int, device: torch.device, keep: Keep
) -> tuple[str, ...]:
    """Initializes the meta parameters in ``names``, and all meta buffers, on ``device``, without communication.

    ``keep`` cuts a full parameter to this rank's shard. Values depend on ``seed`` and the name of the parameter's block
    or module. Parameters remain the same objects.

    Returns the names of parameters that the model's ``__init__`` changes after their initialization; these changes are
    lost.

    Raises:
        PlanError: a module has a meta tensor that no initialisation sets.
    """
    wanted = {id(p): name for name, p in model.named_parameters() if name in names and p.is_meta}
    check_drawn(model, wanted.values())
    lost = list[str]()
    for name, part in _groups(model):
        own = [p for _, _, p in _tensors(part) if isinstance(p, nn.Parameter)]
        buffers = any(not isinstance(t, nn.Parameter) for _, _, t in _tensors(part))
        if buffers or any(id(p) in wanted for p in own):
            with keyed_generators(device, seed, zlib.crc32(name.encode())):
                lost += _fill(_Filling(model, name, device), part, wanted, keep)
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted and parameter.is_meta:
            raise PlanError(f"parameter {name!r} is on the meta device and {_NO_WAY}")
    return tuple(lost)


_NO_WAY = (
    "its module has no reset_parameters that sets it; add one (and _init_weights in a Hugging Face model), or build "
    "the model in memory."
)
Part = list[tuple[str, nn.Module]]
"""Modules by name, each child before its parent."""


def _groups(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yields each unit with all modules inside, then every other module alone."""
    units = find_units(model).modules
    inside: set[int] = set()
    for name, unit in units.items():
        part = [(f"{name}.{path}" if path else name, module) for path, module in unit.named_modules()]
        inside.update(id(module) for _, module in part)
        yield name, part[::-1]
    for name, module in model.named_modules():
        if id(module) not in inside:
            yield name, [(name, module)]


def _tensors(part: Part) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields the meta tensors that are registered on the modules themselves."""
    for _, module in part:
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta:
                yield module, leaf, tensor


class _Filling:
    """Initialisation of one group of modules."""

    def __init__(self, model: nn.Module, name: str, device: torch.device) -> None:
        self.model, self.name, self.device = model, name, device
        self.initialise: Any = getattr(model, "_init_weights", None)

    def run(self, part: Part) -> None:
        """Runs the initialisation of every module, children first."""
        for _, module in part:
            reset: Any = getattr(module, "reset_parameters", None)
            if self.initialise is not None:
                self.initialise(module)
            elif reset is not None:
                reset()
            reset_pairs(self.model, module)


def _fill(filling: _Filling, part: Part, wanted: dict[int, str], keep: Keep) -> list[str]:
    """Replaces meta tensors by full ones, initialises these, keeps this rank's shards and restores the others.

    Returns the parameters whose later writes by ``__init__`` are lost; Hugging Face repeats its own.
    """
    lost, given = list[str](), list(_tensors(part))
    done = [(m, leaf, p) for _, m in part for leaf, p in m._parameters.items() if p is not None and not p.is_meta]
    for module, leaf, parameter in done:  # tied to an earlier block: a stand-in is initialised, and the values survive
        _set(module, leaf, nn.Parameter(torch.empty_like(parameter), parameter.requires_grad))
    made: dict[int, Tensor] = {}
    for module, leaf, tensor in given:
        if id(tensor) not in made:
            made[id(tensor)] = _unset(tensor, filling.device)
        _set(module, leaf, made[id(tensor)])
    before = {number: tensor._version for number, tensor in made.items()}
    filling.run(part)
    for module, leaf, parameter in done:
        _set(module, leaf, parameter)
    for module, leaf, tensor in given:
        full = made[id(tensor)]
        written = full._version > before[id(tensor)]
        if leaf in module._buffers:
            if module._buffers[leaf] is full:  # else the initialisation has assigned another
                _check_set(full, written, f"buffer {leaf!r} of {filling.name or 'the model'!r}")
            continue
        module._parameters[leaf] = tensor  # type: ignore[assignment]
        if id(tensor) in wanted and tensor.is_meta:
            name = wanted[id(tensor)]
            _check_set(full, written, f"parameter {name!r}")
            if filling.initialise is None and tensor._version > full._version - before[id(tensor)]:
                lost.append(name)
            _become(tensor, keep(name, full.detach()))
    return lost


def replace_meta(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Gives the meta parameters of ``model`` the tensors in ``values``, by name. Parameters remain the same objects."""
    for name, parameter in model.named_parameters():
        if name in values and parameter.is_meta:
            _become(parameter, values[name])


def _become(parameter: Tensor, values: Tensor) -> None:
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]  # the object stays, because ties refer to it


def _set(module: nn.Module, leaf: str, tensor: Any) -> None:
    (module._parameters if leaf in module._parameters else module._buffers)[leaf] = tensor


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a full tensor filled with NaN, the least integer or, for booleans, another byte: values that
    :func:`_check_set` recognises as unset.
    """
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if empty.is_floating_point() or empty.is_complex():
        empty.fill_(torch.nan)
    elif empty.dtype == torch.bool:
        empty.view(torch.uint8).fill_(_NO_BOOL)
    else:
        empty.fill_(torch.iinfo(empty.dtype).min)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


_NO_BOOL = 2
"""Byte that no operation leaves in a boolean tensor."""
_LEAST_IS_USUAL = (torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
"""Dtypes whose least integer is a usual value, such as 0."""


def _check_set(tensor: Tensor, written: bool, what: str) -> None:
    """Raises if an element of ``tensor`` is unset; ``written``: True if an operation has written into it."""
    if written and tensor.dtype in _LEAST_IS_USUAL:
        return
    if tensor.dtype == torch.bool:
        unset = tensor.view(torch.uint8) == _NO_BOOL
    elif tensor.is_floating_point() or tensor.is_complex():
        unset = tensor.isnan()
    else:
        unset = tensor == torch.iinfo(tensor.dtype).min
    if bool(unset.any()):
        raise PlanError(f"{what} is on the meta device and {_NO_WAY}")
