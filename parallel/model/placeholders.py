"""Placeholders: tensors with shape, dtype and device but without memory, filled with NaN.

They stand for parameters and values that another stage holds. Whatever is computed from one by mistake becomes NaN, so
the mistake shows. Integers and booleans, which have no NaN, are 0.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

PLANNED_TRAINABLE = "_planned_trainable"


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of ``shape`` over one element of memory; it can be read safely and refuses writes in place."""
    content = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    # .data: with a view, autograd would trace a received value back to the base of one element
    return torch.full((), content, dtype=dtype, device=device).expand(tuple(shape)).data


class PlaceholderPool:
    """Placeholders of one device; placeholders of equal shape and dtype share their element."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def give(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a new placeholder over the shared element."""
        if (shape, dtype) not in self._made:
            with torch.inference_mode(False):  # wherever user code asks first, it serves all that follow
                self._made[shape, dtype] = placeholder(shape, dtype, self._device)
        return self._made[shape, dtype].data


def is_plain(tensor: Tensor) -> bool:
    """Returns True for torch's own tensors, with or without content; False for classes that change operations."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def is_expanded(tensor: Tensor) -> bool:
    """Returns True if elements share memory, so that the tensor cannot be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def replace_absent(model: nn.Module, present: Collection[str], device: torch.device | None = None) -> None:
    """Releases the memory of every parameter of ``model`` not named in ``present``; ties count by identity.

    The parameters remain the same objects, on ``device`` (default: their own, or the CPU if that is meta). They no
    longer require a gradient; ``trainable`` tells whether they did.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    kept = {id(parameter) for name, parameter in named if name in present}
    for parameter in {id(parameter): parameter for _, parameter in named}.values():
        if id(parameter) not in kept:
            _take(parameter, device or (parameter.device if not parameter.is_meta else torch.device("cpu")))


def trainable(parameter: Tensor) -> bool:
    """True if a parameter requires a gradient, or did when it was planned: it may be a placeholder or frozen since."""
    return bool(getattr(parameter, PLANNED_TRAINABLE, parameter.requires_grad))


def plan_as_trainable(parameter: nn.Parameter, planned: bool) -> None:
    """Makes ``trainable(parameter)`` true even if the user freezes the parameter; ``planned`` False ends that.

    Traces decide the messages of ranks, so all ranks trace with the flags of the plan, also for others' parameters.
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
        # .data refuses another device type, and the object has to stay the same for ties and references
        other = nn.Parameter(stand_in, requires_grad=False)
        vars(other).update(vars(parameter))
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    else:
        parameter.data = stand_in
