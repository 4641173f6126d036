"""A model in flat buckets with a reducer, in one process: the other data ranks seem to send zeros."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.kernels.dispatch import MainGradients
from engine.parallel.comm.backend import Backend, RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Grid
from engine.zero.flat_buckets import FlatBucket, Ownership
from engine.zero.layout import FlatLayout, Item, build_layout
from engine.zero.reduce.reducer import Backward, ReducerSetup
from engine.zero.reduce.step_reducer import GradientReducer
from tests.zero.buckets import allocate


@dataclass(frozen=True)
class Setting:
    """Which data rank of how many, at which ZeRO stage, with what on the wire."""

    ranks: int = 2
    rank: int = 0
    stage: int = 0
    bucket_elements: int = 1
    """1: each parameter has a bucket of its own."""
    dtype: str = "float32"
    wire: torch.dtype | None = None
    main: MainGradients | None = None


@dataclass(frozen=True)
class Rig:
    """What ``build`` has made."""

    model: nn.Module
    comm: Comm
    layout: FlatLayout
    buckets: tuple[FlatBucket, ...]
    reducer: GradientReducer

    def step(self, *losses: Callable[[], Tensor]) -> None:
        """Backward of every microbatch, then finish."""
        for index, loss in enumerate(losses):
            with self.reducer.backward(Backward(last=index == len(losses) - 1)):
                torch.autograd.backward(loss())
        self.reducer.finish()

    def grads(self) -> dict[str, Tensor]:
        """The gradient buckets cut into parameters; at stage 1 only the owned shard is right."""
        return {
            slot.name: flat.grads[slot.start : slot.stop].view(slot.shape).clone()
            for flat in self.buckets
            for slot in flat.bucket.slots
        }

    def issued(self) -> list[int]:
        """Elements of every collective so far; with distinct bucket sizes this names the buckets."""
        return [record.elements for record in self.comm.records]

    def sizes(self) -> list[int]:
        """Elements of the buckets, in order."""
        return [bucket.elements for bucket in self.layout.buckets]


def lay_out(model: nn.Module, setting: Setting) -> FlatLayout:
    """Layout of all trainable parameters, in one dtype."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    items = [Item(name=name, shape=tuple(p.shape), dtype=setting.dtype) for name, p in named]
    return build_layout(items, setting.ranks, setting.bucket_elements)


def build(model: nn.Module, setting: Setting, backend: Callable[[Grid], Backend] = RecordingBackend) -> Rig:
    """Move ``model`` into buckets and hook its gradients."""
    layout = lay_out(model, setting)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    who = Ownership(setting.rank, setting.ranks, setting.stage > 0)
    buckets = allocate(layout, parameters, who, torch.device("cpu"))
    grid = Grid(dp=setting.ranks, rank=setting.rank)
    comm = Comm(grid, backend(grid))
    setup = ReducerSetup(buckets, parameters, comm, setting.wire, main=setting.main)
    reducer = GradientReducer(setup, scatter=setting.stage > 0)
    return Rig(model, comm, layout, buckets, reducer)


def plain_grads(model: nn.Module, *losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """What autograd alone gives for the same losses; the model must not be hooked."""
    model.zero_grad(set_to_none=True)
    for loss in losses:
        torch.autograd.backward(loss())
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {
        name: torch.zeros_like(p)
        if (grad := found[name]) is None
        else grad.to_dense()
        if grad.is_sparse
        else grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
