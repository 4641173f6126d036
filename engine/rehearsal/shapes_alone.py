"""A copy of a model whose parameters have shapes and no content, and the backend of a rank that is alone.

Parameters are FakeTensors that claim the CPU, so that torch and the model take the paths of the run (autocast, fused
attention). What code makes without a parameter, such as masks and positions, is real: its content may choose a path.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from engine.parallel.comm.backend import RecordingBackend, Wait
from engine.parallel.grid import Axis

CPU = torch.device("cpu")


def shape_mode() -> FakeTensorMode:
    """The mode of one rehearsal; real tensors may meet those without content."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def take_content(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put shapes in the place of parameters, and of buffers on the meta device; ties stay."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made.setdefault(id(parameter), _parameter(parameter, mode))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _shape_of(buffer, mode)


def _parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    made: Any = nn.Parameter(_shape_of(parameter, mode), requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made  # type: ignore[no-any-return]


def _shape_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    return FakeTensor(mode, torch.empty_like(tensor.detach(), device="meta"), CPU)


class AlikeRanks(RecordingBackend):
    """Moves nothing: every other rank seems to hold and do what this one does."""

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copy ``shard`` to every slice of ``full``."""
        full.view(self._grid.size(axis), -1).copy_(shard.reshape(1, -1))
        return lambda: None
