"""``deepspeed.runtime.pipe.module``: a sequence of layers. The engine's pipeline partitions any module."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.deepspeed.runtime.pipe.topology import ProcessTopology
from engine.errors import EngineError

Layer = nn.Module | Callable[..., Any]
PipelineError = EngineError


class LayerSpec:
    """Class and arguments of a layer to build later, such as ``LayerSpec(nn.Linear, 4, 8)``."""

    def __init__(self, typename: Callable[..., Layer], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> Layer:
        """Returns a new layer of the stored class and arguments; ``log`` has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Class and arguments of a layer that shares weights with all other layers with the same ``key``.

    Args:
        forward_fn: callback ``(layer, input) -> output``, called in place of the layer's forward.
        tied_weight_attr: name of the shared parameter, or a list of names.
    """

    def __init__(
        self, key: str, typename: Callable[..., Layer], *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None, tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class PipelineModule(nn.Sequential):
    """Sequence of layers, which the engine partitions into pipeline stages by measured cost.

    Args:
        layers: modules, functions or ``LayerSpec`` objects; each is called with the output of the one before.
        num_stages: number of pipeline ranks; no effect with ``topology``.
        topology: grid with the axes "pipe" and "model" (tensor ranks).
        loss_fn: callback (output, label) -> 0-dim loss.
        seed_layers: True: calls ``seed_fn(base_seed + i)`` before layer i is built.
        seed_fn: callback that seeds random generators; None: ``torch.manual_seed``.
        activation_checkpoint_interval: any number above 0 sets ``activation_checkpointing.mode`` to "full", unless it
            is configured.

    ``partition_method``, ``activation_checkpoint_func``, ``checkpointable_layers`` and ``dynamic_shape`` have no
    effect.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None, seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None, base_seed: int = 1234, partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0, activation_checkpoint_func: Any = None,
        checkpointable_layers: list[str] | None = None, dynamic_shape: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_stages is None and topology is None:
            raise ValueError("PipelineModule got neither num_stages nor topology; pass one of them.")
        self.num_stages = num_stages if topology is None else topology.get_dim("pipe")
        self.tensor_ranks = 1 if topology is None else max(1, topology.get_dim("model"))
        self.loss_fn, self.activation_checkpoint_interval = loss_fn, activation_checkpoint_interval
        self.tied_modules = nn.ModuleDict()
        self._calls: list[Callable[[Any], Any]] = []
        for index, spec in enumerate(layers):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + index)
            self._add(index, spec)

    def _add(self, index: int, spec: Any) -> None:
        """Adds a layer under its name in DeepSpeed's checkpoints: its index, or ``tied_modules.KEY``."""
        layer: Any = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(spec, TiedLayerSpec) and spec.key not in self.tied_modules:
            self.tied_modules[spec.key] = layer
        elif isinstance(spec, TiedLayerSpec):
            for name in spec.tied_weight_attr:
                _tie(layer, self.tied_modules[spec.key], name)
        if isinstance(layer, nn.Module) and layer not in self.tied_modules.values():
            self.add_module(str(index), layer)
        forward = getattr(spec, "forward_fn", None)
        self._calls.append(partial(forward, layer) if forward is not None else layer)

    def forward(self, x: Any) -> Any:
        """Runs all layers on ``x``, and returns the output of the last one."""
        for call in self._calls:
            x = call(x)
        return x


def _tie(layer: nn.Module, first: nn.Module, name: str) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(layer.get_submodule(path), leaf, first.get_parameter(name))
