"""Cut parameters that are read by code outside their modules, which would compute with a part as if it were whole.

A planned layer knows that its weight is a part and sums or gathers accordingly. ``functional.linear(x,
self.embed.weight)`` in a block or in the code around the blocks does not, and its result would be wrong in silence.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from engine.parallel.pipeline.operation import Operation
from engine.parallel.tensor.cuts import TensorPlan
from engine.parallel.tensor.views.view import has_views


class OutsideReads(TorchFunctionMode):
    """Watches one run of the uncut model; ``names`` are the parameters found, in the order of their reading.

    Questions about shape, dtype and device are no reading: Hugging Face models ask weights for those.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self.plain: set[int] = set()
        """Ids of the parameters that were read beside plain tensors alone."""
        self._layers = [model.get_submodule(name) for name, cut in plan.layers.items() if cut.kind != "experts"]
        of_layers = {id(p) for layer in self._layers for p in layer.parameters(recurse=False)}
        # others are shown as views, or read by code that was proven to compute with a part
        self._cut = {
            id(p): name for name, p in model.named_parameters() if name in plan.parameters and id(p) in of_layers
        }
        self._running: list[frozenset[int]] = []
        """The parameters of the planned layers that run, the innermost last."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the run."""
        handles: list[RemovableHandle] = []
        for layer in self._layers:
            own = frozenset(id(parameter) for parameter in layer.parameters())
            handles.append(layer.register_forward_pre_hook(lambda *_, own=own: self._running.append(own)))
            handles.append(layer.register_forward_hook(lambda *_: self._leave()))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def _leave(self) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = Operation(func, args, kwargs or {})
        if not operation.is_metadata:
            if not has_views(args, kwargs):
                self.plain.update(id(tensor) for tensor in operation.tensors if isinstance(tensor, nn.Parameter))
            for tensor in operation.tensors:
                if id(tensor) in self._cut and not any(id(tensor) in own for own in self._running):
                    self.names[self._cut[id(tensor)]] = None
        return operation.run()


class PlainReads(TorchFunctionMode):
    """Watches a forward of the cut model for those ``parameters`` that are used beside plain tensors alone."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._wanted = {id(parameter): name for name, parameter in parameters.items()}
        self.names: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = Operation(func, args, kwargs or {})
        if not has_views(args, kwargs) and not operation.is_metadata:
            found = (self._wanted.get(id(tensor)) for tensor in operation.tensors)
            self.names.update((name, None) for name in found if name is not None)
        return operation.run()
