"""Copy of a model with parameters that have shapes but no content, and a backend without peers.

Parameters are FakeTensors that claim the CPU, so that torch and the model take the code paths of the run (autocast,
fused attention). Other tensors, such as masks and positions, are real: their content may choose a path.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.parallel.comm.backend import RecordingBackend, Wait
from engine.parallel.grid import Axis, Grid

CPU = torch.device("cpu")


def shape_mode() -> FakeTensorMode:
    """Returns the mode of one dry run; real tensors may be mixed with tensors without content."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def take_content(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces parameters, and buffers on the meta device, by shapes; ties stay."""
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


class MissingShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shapes of operators that run on the CPU but that torch's FakeTensor rules refuse."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return (
            False  # nothing is compiled here, and the code that hides the mode from Dynamo would run at each operation
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and any(isinstance(given, FakeTensor) for given in args[:2]):
            return _grouped(args[0], args[1], (kwargs or {}).get("offs", args[2] if len(args) > 2 else None))
        return func(*args, **(kwargs or {}))


def _grouped(left: Tensor, right: Tensor, ends: Tensor | None) -> Tensor:
    """Returns the result's shape: rows sorted by group times a matrix each, or a product per group of a sorted inner
    dim."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.ndim == right.ndim:
        groups = left.shape[0] if left.ndim == 3 or ends is None else len(ends)
        shape = (groups, *shape)
    return (left if isinstance(left, FakeTensor) else right).new_empty(shape)


class EqualRanksBackend(RecordingBackend):
    """Backend that moves nothing: every other rank seems to have and do the same as this one.

    Args:
        exchanges: reduce-scatters allocate a second tensor until they are waited for, as gloo's do.
    """

    def __init__(self, grid: Grid, exchanges: bool) -> None:
        super().__init__(grid)
        self._exchanges = exchanges

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Stores this rank's slice of ``full`` in ``shard``."""
        if not self._exchanges or axis == "tp":  # the tensor axis shares memory
            return super().reduce_scatter(shard, full, axis)
        received, ranks = torch.empty_like(full), self._grid.size(axis)

        def finish() -> None:
            first, *others = received.view(ranks, -1)
            total = first.float() if first.element_size() < 4 else first
            for other in others:
                total += other
            shard.copy_(total)

        return finish

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copies ``shard`` to every slice of ``full``."""
        super().all_gather(full, shard, axis)
        if isinstance(full, FakeTensor):
            return lambda: None  # a FakeTensor has no content
        full.view(self._grid.size(axis), -1).copy_(shard.view(-1))
        return lambda: None

    def gather_parameters(self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None) -> Wait:
        """Copies each shard to every slice of its full tensor."""
        super().gather_parameters(pairs, within)
        for full, shard in pairs:
            if not isinstance(full, FakeTensor):
                full.view(-1, shard.numel()).copy_(shard.view(-1))
        return lambda: None
