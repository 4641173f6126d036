"""Tensors that are not here: shape, dtype and device without memory, full of NaN.

Whatever is computed from one by mistake is NaN too, and loud. Integers and booleans know no NaN and are 0.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

_TRAINABLE = "_absent_but_trainable"


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``shape`` that takes the memory of one element; reading is safe, writing in place is refused."""
    content = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    # .data: a view would lead autograd back to its base of one element when a received value is put into it
    return torch.full((), content, dtype=dtype, device=device).expand(tuple(shape)).data


class PlaceholderPool:
    """Absent tensors of one device, of which there are many alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def give(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor over the same element."""
        if (shape, dtype) not in self._made:
            self._made[shape, dtype] = placeholder(shape, dtype, self._device)
        return self._made[shape, dtype].data


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, so that nothing can be written in place."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def replace_absent(model: nn.Module, present: Collection[str], device: torch.device | None = None) -> None:
    """Take the memory of every parameter of ``model`` that ``present`` does not name; ties count by identity.

    The parameters stay the objects they are, on ``device`` (default: their own, or the CPU if that is meta).
    They no longer require a gradient; a probe still knows which of them did.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    kept = {id(parameter) for name, parameter in named if name in present}
    for parameter in {id(parameter): parameter for _, parameter in named}.values():
        if id(parameter) not in kept:
            _take(parameter, device or (parameter.device if not parameter.is_meta else torch.device("cpu")))


def trainable(parameter: Tensor) -> bool:
    """Whether a parameter requires a gradient, or did before it became absent."""
    return bool(getattr(parameter, _TRAINABLE, parameter.requires_grad))


def _take(parameter: nn.Parameter, device: torch.device) -> None:
    setattr(parameter, _TRAINABLE, trainable(parameter))
    parameter.requires_grad_(False)
    parameter.grad = None
    stand_in = placeholder(parameter.shape, parameter.dtype, device)
    if parameter.is_meta:
        # .data refuses another kind of device; the object has to stay, for ties and for whoever holds it
        other = nn.Parameter(stand_in, requires_grad=False)
        vars(other).update(vars(parameter))
        torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
    else:
        parameter.data = stand_in
