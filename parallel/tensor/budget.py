"""What the sharded layers of a model send, found from one run of the whole model on shapes.

Hooks on the layers of the plan note what goes in and out while the pipeline's probe runs the model, before
anything is cut. The rules of the layers then give the bytes:

    column      all-reduce of the input's gradient, once for all that share the input and region
    row         all-reduce of the output, again when recomputation gets that far
    embedding   all-reduce of the output
    head        all-reduce of the input's gradient; the loss then 3 fp32 scalars a token, or a gather
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from engine.parallel.pipeline.timeline import Timeline
from engine.parallel.tensor.collectives import COLUMN_INPUTS, EMBEDDING, ROW_OUTPUTS
from engine.parallel.tensor.loss_budget import find_logit_use
from engine.parallel.tensor.plan import LayerCut, TensorPlan
from engine.parallel.tensor.reads import OutsideReads
from engine.parallel.traffic import Op, Tally, Traffic, sent_bytes


@dataclass(frozen=True, slots=True)
class Sum:
    """One collective that a layer makes in a forward and its backward."""

    layer: str
    label: str
    bytes: int
    """Of the whole tensor."""
    repeated: bool = False
    """Recomputation of its block makes it once more."""


class Watch:
    """Notes what the planned layers of an uncut model are called with.

    ``recomputed``: modules whose activations are recomputed, by name. Recomputation stops when the last tensor
    that backward needs is there, so a row layer is summed again only if something after it saves one.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, recomputed: Mapping[str, nn.Module]) -> None:
        self._model = model
        self._plan = plan
        self._recomputed = recomputed
        self._sums: list[Sum] = []
        self._reads = OutsideReads(model, plan)
        self._seen: dict[str, list[Any]] = {}
        self._saved = 0
        self._pending: list[tuple[int, int]] = []
        """(index of a row's sum, tensors saved until then) inside the running recomputed module."""

    @property
    def sums(self) -> tuple[Sum, ...]:
        """Of the last run, in its order."""
        return tuple(self._sums)

    @property
    def read_outside(self) -> tuple[str, ...]:
        """Cut parameters that code outside their modules reads."""
        return tuple(self._reads.names)

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run of the model; an earlier one is forgotten."""
        self._sums.clear()
        self._seen.clear()
        handles = [self._hook(self._model.get_submodule(name), cut) for name, cut in self._plan.layers.items()]
        handles += [module.register_forward_pre_hook(self._enter) for module in self._recomputed.values()]
        handles += [module.register_forward_hook(self._exit) for module in self._recomputed.values()]
        try:
            with saved_tensors_hooks(self._pack, lambda saved: saved), self._reads.watching():
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def _hook(self, module: nn.Module, cut: LayerCut) -> RemovableHandle:
        if cut.kind in ("column", "head"):
            return module.register_forward_pre_hook(partial(self._column, cut), with_kwargs=True)
        return module.register_forward_hook(partial(self._row, cut))

    def _column(self, cut: LayerCut, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        shared = self._seen.setdefault(cut.region, []) if cut.region else []
        dtype = _dtype(x, module)
        if x.requires_grad and (dtype != x.dtype or not any(x is other for other in shared)):
            if dtype == x.dtype:  # a layer that casts its input has a tensor of its own
                shared.append(x)
            self._sums.append(Sum(cut.name, COLUMN_INPUTS, x.numel() * dtype.itemsize))

    def _row(self, cut: LayerCut, module: nn.Module, args: object, output: Tensor) -> None:
        if cut.kind == "row":
            self._seen.pop(cut.region, None)
            self._pending.append((len(self._sums), self._saved))
        size = output.numel() * _dtype(output, module).itemsize
        self._sums.append(Sum(cut.name, ROW_OUTPUTS if cut.kind == "row" else EMBEDDING, size))

    def _pack(self, saved: Tensor) -> Tensor:
        self._saved += 1
        return saved

    def _enter(self, *_: object) -> None:
        self._pending.clear()

    def _exit(self, *_: object) -> None:
        for index, saved in self._pending:
            if self._saved > saved:
                self._sums[index] = replace(self._sums[index], repeated=True)
        self._pending.clear()


def _dtype(tensor: Tensor, layer: nn.Module) -> torch.dtype:
    """In which the layer computes: wider than what it is given and gives where the layer stays in fp32."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return tensor.dtype  # narrower than the weights, and what travels
    weight: Any = layer.weight
    return torch.promote_types(tensor.dtype, weight.dtype)


def traffic_by_call(sums: tuple[Sum, ...], timeline: Timeline, tp: int) -> dict[int, Tally]:
    """What each call of the timeline makes a tensor rank send for one microbatch, forward and backward."""
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(timeline.calls):
        calls.setdefault(call.unit, []).append(index)
    by_layer: dict[str, list[Sum]] = {}
    for item in sums:
        by_layer.setdefault(item.layer, []).append(item)
    tallies: dict[int, Tally] = {}
    for layer, items in by_layer.items():
        places = next((calls[unit] for unit in calls if layer == unit or layer.startswith(f"{unit}.")), [0])
        for number, item in enumerate(items):
            tally = tallies.setdefault(places[number * len(places) // len(items)], Tally())
            for _ in range(1 + item.repeated):
                tally.add(_traffic(item.label, "all_reduce", item.bytes, tp))
    return tallies


def loss_traffic(plan: TensorPlan, timeline: Timeline, tp: int) -> Tally:
    """What becomes of the logits after the head: a vocabulary-parallel loss, or a gather by whoever needs all."""
    use = find_logit_use(plan, timeline, tp)
    return Tally([_traffic(sent.label, sent.op, sent.bytes, tp) for sent in use.sent])


def _traffic(label: str, op: Op, payload: int, tp: int) -> Traffic:
    return Traffic("tp", label, 1, sent_bytes(op, payload, tp))
