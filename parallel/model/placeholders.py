"""Placeholders: tensors with shape, dtype and device but without memory, filled with NaN.

A placeholder replaces a parameter or value of another stage. A result computed from it by mistake is NaN, which reveals
the mistake. Integers and booleans have no NaN and are 0.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

PLANNED_TRAINABLE = "_planned_trainable"


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of ``shape`` in the memory of one element, filled with NaN (integers: 0).

    In-place writes raise an error.
    """
    content = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    # .data: autograd would follow a view from a received value back to the base of one element
    return torch.full((), content, dtype=dtype, device=device).expand(tuple(shape)).data


class PlaceholderPool:
    """Cache of placeholders, tensors of any shape over one element of memory, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def give(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a placeholder of ``shape`` and ``dtype``, a new tensor object filled with NaN (integers: 0).

        Placeholders of equal shape and dtype share one element of memory. In-place writes raise an error.
        """
        if (shape, dtype) not in self._made:
            with torch.inference_mode(False):  # the first caller may be in inference mode, later callers may not
                self._made[shape, dtype] = placeholder(shape, dtype, self._device)
        return self._made[shape, dtype].data


def is_plain(tensor: Tensor) -> bool:
    """Returns True if the class of ``tensor`` is ``Tensor``, ``Parameter`` or ``FakeTensor``."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def is_without_content(value: object) -> bool:
    """Returns True for a fake or meta tensor, which has a shape but no data."""
    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)


def is_expanded(tensor: Tensor) -> bool:
    """Returns True if several elements of ``tensor`` share memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def replace_absent(model: nn.Module, present: Collection[str], device: torch.device | None = None) -> None:
    """Replaces the data of each parameter not in ``present`` by a placeholder of the same shape that stores one
    element.

    A tied parameter stays if one of its names is in ``present``. Replaced parameters remain the same objects and
    require no gradient. ``device`` None: the parameter's device, or the CPU for meta.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    kept = {id(parameter) for name, parameter in named if name in present}
    for parameter in {id(parameter): parameter for _, parameter in named}.values():
        if id(parameter) not in kept:
            _take(parameter, device or (parameter.device if not parameter.is_meta else torch.device("cpu")))


def trainable(parameter: Tensor) -> bool:
    """Returns True if ``parameter`` is marked as trainable; without a mark, returns ``requires_grad``."""
    return bool(getattr(parameter, PLANNED_TRAINABLE, parameter.requires_grad))


def plan_as_trainable(parameter: nn.Parameter, planned: bool) -> None:
    """Marks ``parameter`` as trainable for :func:`trainable`, even if the user freezes it.

    ``planned`` False removes the mark.
    """
    if planned:
        setattr(parameter, PLANNED_TRAINABLE, True)
    elif hasattr(parameter, PLANNED_TRAINABLE):
        delattr(parameter, PLANNED_TRAINABLE)


def _take(parameter: nn.Parameter, device: torch.device) -> None:
    setattr(parameter, PLANNED_TRAINABLE, trainable(parameter))
    parameter.requires_grad_(False)
    parameter.grad = None
    stand_in = placeholder(parameter.shape, parameter.dtype, device)
    if parameter.is_meta:
        # .data refuses another device type, but the object must stay the same for ties and references
        other = nn.Parameter(stand_in, requires_grad=False)
        vars(other).update(vars(parameter))
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    else:
        parameter.data = stand_in
