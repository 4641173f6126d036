"""Sizes of a sharded model: code outside the sharded blocks reads full sizes from layers, attributes and parameters.

    model.head.weight.shape[0], model.head.out_features,      in a loss, in glue between blocks, in the user's loop
    model.embed.num_embeddings, model.blocks[0].attn.heads    the whole; inside the block of a layer its shard

Code of a block computes with shards, and the proof of its plan used the sizes of shards. An embedding or a head has no
block around it: only its own forward reads the sizes of its shard.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from engine.parallel.model.blocks import find_units
from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer
from engine.parallel.model.whole_sizes import RunningModules, answer_part, answer_whole
from engine.parallel.tensor.plan.tensor_plan import TensorPlan

_NOTHING = object()
_NO_FORWARD: Any = nn.Module.forward
_WHOLE, _RUNNING = "_whole_values", "_running_modules"


class WholeSizeAnswers:
    """Installer of patches that make sharded layers show full sizes to code outside the layers' blocks.

    The block of a layer is the element of a ModuleList or Sequential around it, such as a transformer layer. Sizes are
    shapes and integer attributes. Code inside a running block reads the sizes of shards. Construct the installer before
    sharding, and call :meth:`install` after sharding. ``plan``: None installs nothing.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan | None) -> None:
        self._modules = dict(model.named_modules()) if plan is not None else {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._changing: list[str] = []
        self._homes: list[str] = []
        if plan is not None:
            self._remember(model, plan)

    def _remember(self, model: nn.Module, plan: TensorPlan) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if name in plan.parameters}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._changing = list(dict.fromkeys([*plan.layers, *(change.module for change in plan.attributes)]))
        self._values = {name: dict(vars(self._modules[name])) for name in self._changing}
        self._homes = [name for name in dict.fromkeys(_homes(self._modules, plan)) if _has_code(self._modules[name])]

    def install(self, model: nn.Module, patches: ForwardPatches, passed: Collection[str] = ()) -> None:
        """Makes sharded layers and parameters of ``model`` show full sizes to code outside their blocks.

        Removal of ``patches`` undoes it. ``passed``: names of parameters that show the sizes of their shards to all
        code.
        """
        running, classes = RunningModules(), dict[tuple[type, tuple[str, ...]], type]()
        for name, parameter in self._parameters.items():
            if type(parameter) is nn.Parameter and name not in passed:
                answer_whole(parameter, self._shapes[name], running)
                note = f"returns the full size of {name} to code outside its blocks"
                patches.own(model, PatchLayer.TENSOR, lambda p=parameter: answer_part(p), note)  # type: ignore[misc]
        for name in self._changing:
            self._answer(self._modules[name], self._values[name], running, classes, patches)
        watch = Interception(handler=running.call, layer=PatchLayer.TENSOR, patches=patches)
        for name in self._homes:
            watch.install(name, self._modules[name], "reads sizes of shards while its forward runs")

    @staticmethod
    def _answer(
        module: nn.Module, before: Mapping[str, Any], running: RunningModules,
        classes: dict[tuple[type, tuple[str, ...]], type], patches: ForwardPatches,
    ) -> None:  # fmt: skip
        whole = {key: value for key, value in before.items() if _differs(value, vars(module).get(key, _NOTHING))}
        if not whole:
            return
        key = type(module), tuple(sorted(whole))
        with patches.changing(module, PatchLayer.TENSOR, f"returns its full {key[1][0]} to code outside its block"):
            object.__setattr__(module, _WHOLE, whole)
            object.__setattr__(module, _RUNNING, running)
            module.__class__ = classes[key] = classes.get(key) or _answering(*key)


def _differs(before: object, now: object) -> bool:
    """Returns True if ``now``, a number or the module's copy of a configuration, has replaced ``before``."""
    return now is not _NOTHING and before is not now and (now is None or isinstance(now, int) or _is_config(now))


def _is_config(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | nn.Module) and not callable(value)


def _answering(own: type, names: tuple[str, ...]) -> type:
    """Returns a subclass of the same name; its attributes ``names`` are full sizes, except for code of running
    blocks."""
    return type(own.__name__, (own,), {"__module__": own.__module__, **{name: _value(name) for name in names}})


def _value(name: str) -> property:
    def read(module: nn.Module) -> Any:
        values = vars(module)
        return values[_WHOLE][name] if values[_RUNNING].asks_for_whole() else values[name]

    def write(module: nn.Module, value: Any) -> None:
        vars(module)[name] = vars(module)[_WHOLE][name] = value

    return property(read, write)


def _homes(modules: Mapping[str, nn.Module], plan: TensorPlan) -> Iterator[str]:
    """Yields the names of the modules with a forward that computes with shards."""
    blocks = find_units(modules[""]).blocks
    for name in plan.parameters:
        yield _home(name.rpartition(".")[0], modules, blocks)
    for change in plan.attributes:
        yield _home(change.module, modules, blocks)
    for name, cut in plan.layers.items():
        around = cut.region if cut.kind in ("column", "row") else name
        yield _home(around, modules, blocks)


def _has_code(module: nn.Module) -> bool:
    """Returns True if the module's forward is not torch's own, which gets the sizes of shards in any case."""
    return not type(module).forward.__module__.startswith("torch.")


def _home(name: str, modules: Mapping[str, nn.Module], blocks: Collection[str]) -> str:
    """Returns the outermost module with a forward from the block around ``name`` down to ``name``.

    Without a block the result is ``name``. A module that only contains layers has no forward.
    """
    parts = name.split(".") if name else []
    above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    block = next((place for place, path in enumerate(above) if path in blocks), len(above))
    inside = [path for path in above[block:] if type(modules[path]).forward is not _NO_FORWARD]
    return inside[0] if inside else name
