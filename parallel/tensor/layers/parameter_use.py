"""Checks of a tensor plan: the parameters that a forward uses, and the tensors they meet in an operation.

    OutsideReads  in the trace     a sharded parameter that code outside its layer reads: ``functional.linear(x,
                                   self.embed.weight)`` would compute with a shard as if it were the full parameter
    ParameterUseCheck      in training      the first forward of each kind of inputs, under sequence parallelism
                  in any forward   an adapter that was off when the plan was made, so that its layers were not planned
                  in the first     a sharded layer inside a transform of torch.func, where no trace has looked for one

A parameter applied to activations sharded along the sequence has partial gradients, which are summed over tensor ranks
once a step. If other inputs (an image with the text) apply it to full activations, the gradient is complete on every
rank, and the sum would be too large.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from engine.errors import PlanError
from engine.parallel.model.placeholders import trainable
from engine.parallel.tensor.global_tensor.global_tensor import has_views
from engine.parallel.tensor.plan.low_rank_pairs import BASE
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.trace.torch_function import Operation, inside_transform, user_place

_KINDS = 1024
"""The number of kinds of inputs that are remembered; with more kinds the check starts over."""


class ParameterUseCheck:
    """Check that a forward uses parameters, adapters and sharded layers as the tensor plan assumes.

    ``plan``: None without tensor parallelism. ``followed``: True if a trace has already checked the sharded layers.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan | None, followed: bool) -> None:
        names = plan.beside if plan is not None else frozenset[str]()
        self._parameters = {name: p for name, p in model.named_parameters() if name in names and trainable(p)}
        self._seen: set[object] = set()
        self._adapted = [m for m in model.modules() if _is_adapted(type(m))] if plan is not None else []
        """Layers with adapters, which the user may switch (PEFT)."""
        self._planned = self._adapters_in_use()
        shared = plan.layers if plan is not None and not followed else ()
        self._unseen = {name: model.get_submodule(name) for name in shared}
        """Sharded layers of a model that no trace has followed, until its first forward is over."""
        self.needed = bool(self._parameters or self._adapted or self._unseen)
        """True while later forwards must pass :meth:`watch`."""

    def _adapters_in_use(self) -> frozenset[str]:
        used: set[str] = set()
        for layer in self._adapted:
            if not layer.disable_adapters:
                used.update(layer.active_adapters)  # type: ignore[arg-type]
        return frozenset(used)

    def _check_adapters(self) -> None:
        if new := self._adapters_in_use() - self._planned:
            raise PlanError(
                f"adapter {min(new)!r} was switched on after the tensor plan was made, so its layers are not sharded "
                "over tensor ranks; switch the adapter on before engine.initialize, or make a new engine."
            )

    def watch(self, microbatch: Any, run: Callable[[], Any]) -> Any:
        """Calls ``run`` under the check and returns its result. All tensor ranks raise the same error.

        ``microbatch``: inputs of the forward; for known shapes and dtypes, only adapters are checked again.

        Raises:
            PlanError: an adapter was switched on after the plan was made, a sharded layer runs in a transform of
                torch.func, or a parameter is used on full activations against the plan.
        """
        if self._adapted:
            self._check_adapters()
        if self._unseen:
            return self._watch_layers(run)
        if not self._parameters or not torch.is_grad_enabled():
            return run()
        kind = _kind(microbatch)
        if kind in self._seen:
            return run()
        reads = PlainReads(self._parameters)
        with reads:
            result = run()
        for name in reads.names:
            raise PlanError(
                f"parameter {name!r} is used on full activations with these inputs, but the example used it only on "
                "activations sharded along the sequence, so its gradient would be wrong; pass an example_batch with "
                "both uses, or set parallel.sequence_parallel to false."
            )
        if len(self._seen) >= _KINDS:
            self._seen.clear()
        self._seen.add(kind)
        return result

    def _watch_layers(self, run: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            for name, layer in self._unseen.items():
                handle = layer.register_forward_pre_hook(partial(_refuse_transform, name))
                stack.callback(handle.remove)
            result = run()
        self._unseen, self.needed = {}, bool(self._parameters or self._adapted)
        return result


def _refuse_transform(name: str, *_: object) -> None:
    if inside_transform():
        raise PlanError(
            f"{user_place()} calls layer {name!r} inside a transform of torch.func (vmap, grad, vjp, jvp, jacrev), "
            "but the layer is sharded over tensor ranks, and a transform cannot follow their collectives; call it "
            'outside of the transform, or give it the style "replicate" in parallel.tensor_plan.'
        )


def _is_adapted(kind: type) -> bool:
    return hasattr(kind, "active_adapters") and hasattr(kind, "disable_adapters")


def _kind(microbatch: Any) -> object:
    leaves, spec = pytree.tree_flatten(microbatch)
    return str(spec), tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)


class OutsideReads(TorchFunctionMode):
    """Recorder of sharded parameters that code outside their module reads, in one run of the unsharded model.

    ``names``: names of these parameters, in the order of first reads. Reads of shape, dtype and device do not count.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan) -> None:
        super().__init__()
        self.names: dict[str, None] = {}
        self.plain: set[int] = set()
        """Ids of the parameters that were read together with plain tensors only."""
        self._layers = [model.get_submodule(name) for name, cut in plan.layers.items() if cut.kind != "experts"]
        of_layers = {id(p) for layer in self._layers for p in layer.parameters(recurse=False)}
        # other sharded parameters are shown as global tensors, or their code is proven to compute with a shard
        self._cut = {
            id(p): name for name, p in model.named_parameters() if name in plan.parameters and id(p) in of_layers
        }
        # the module around a wrapped layer may read the weight (DoRA's norm of weights): the block's proof covers this
        self._layers += [model.get_submodule(name.removesuffix(BASE)) for name in plan.layers if name.endswith(BASE)]
        self._running: list[frozenset[int]] = []
        """The parameters of each running planned layer, the innermost layer last."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the torch functions of this thread inside the context.

        Adds to ``names`` the sharded parameters that code outside their module reads. Adds to ``plain`` the ``id`` of
        each parameter that some operation reads together with plain tensors only.
        """
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
        if operation.reads_values:
            if not has_views(args, kwargs):
                self.plain.update(id(tensor) for tensor in operation.tensors if isinstance(tensor, nn.Parameter))
            for tensor in operation.tensors:
                if id(tensor) in self._cut and not any(id(tensor) in own for own in self._running):
                    self.names[self._cut[id(tensor)]] = None
        return operation.run()


class PlainReads(TorchFunctionMode):
    """Recorder of the ``parameters`` that some operation of a forward reads without any global tensor as operand.

    ``names``: their names, in the order of first reads.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._wanted = {id(parameter): name for name, parameter in parameters.items()}
        self.names: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = Operation(func, args, kwargs or {})
        if not has_views(args, kwargs) and operation.reads_values:
            found = (self._wanted.get(id(tensor)) for tensor in operation.tensors)
            self.names.update((name, None) for name in found if name is not None)
        return operation.run()
