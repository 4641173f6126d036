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
    """Returns a tensor of ``shape`` that needs one element of memory. Reads give NaN, or 0 for integers; in-place
    writes raise an error.
    """
    content = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    # .data: autograd would follow a view from a received value back to the base of one element
    return torch.full((), content, dtype=dtype, device=device).expand(tuple(shape)).data


class PlaceholderPool:
    """Cache of placeholders (tensors of any shape over one element of memory) on one device. Placeholders of the same
    shape and dtype share this element.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def give(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a new tensor object of ``shape`` and ``dtype`` over the shared element of memory."""
        if (shape, dtype) not in self._made:
            with torch.inference_mode(False):  # the first caller may be in inference mode, later callers may not
                self._made[shape, dtype] = placeholder(shape, dtype, self._device)
        return self._made[shape, dtype].data


def is_plain(tensor: Tensor) -> bool:
    """Returns True if the class of ``tensor`` is ``Tensor``, ``Parameter`` or ``FakeTensor``. False for other
    subclasses, which may change how torch functions run.
    """
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def is_without_content(value: object) -> bool:
    """Returns True for a fake or meta tensor, which has a shape but no data."""
    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)


def is_expanded(tensor: Tensor) -> bool:
    """Returns True if several elements of ``tensor`` share memory, as after ``expand``, so that in-place writes are
    impossible.
    """
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def replace_absent(model: nn.Module, present: Collection[str], device: torch.device | None = None) -> None:
    """Releases the memory of every parameter of ``model`` that is not in ``present``. A tied parameter stays if one of
    its names is in ``present``.

    The parameters remain the same objects, but have placeholders as data, on ``device`` (default: the parameter's
    device, or the CPU instead of meta). They require no gradient any more; :func:`trainable` returns their former flag.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    kept = {id(parameter) for name, parameter in named if name in present}
    for parameter in {id(parameter): parameter for _, parameter in named}.values():
        if id(parameter) not in kept:
            _take(parameter, device or (parameter.device if not parameter.is_meta else torch.device("cpu")))


def trainable(parameter: Tensor) -> bool:
    """Returns True if ``parameter`` requires a gradient. For a parameter marked by :func:`plan_as_trainable`, and for
    one that :func:`replace_absent` has emptied, returns the flag that it had in the plan.
    """
    return bool(getattr(parameter, PLANNED_TRAINABLE, parameter.requires_grad))


def plan_as_trainable(parameter: nn.Parameter, planned: bool) -> None:
    """Marks ``parameter`` so that :func:`trainable` returns True for it even after the user freezes it. ``planned``
    False removes the mark.

    The trace determines the messages between ranks. So every rank must trace with the ``requires_grad`` flags of the
    plan, also for parameters that only other ranks store.
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
