"""Gradients into shards after every microbatch: right values, in one order, with two whole buckets at a time."""

import gc
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.parallel.comm.backend import RecordingBackend, Wait
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis, Grid
from engine.zero.flat_buckets import FlatBucket, Ownership
from engine.zero.layout import Item, build_layout
from engine.zero.reduce.microbatch_reducer import BUFFERS, MicrobatchReducer
from engine.zero.reduce.reducer import Backward, ReducerSetup
from tests.zero.buckets import allocate
from tests.zero.reduce.test_step_reducer import Stack, straight, x
from tests.zero.rig import plain_grads

Loss = Callable[[nn.Module, Tensor], Tensor]
Marks = Mapping[str, Mapping[str, Any]]
"""What is special about a layer, by its number."""


class Watching(RecordingBackend):
    """Counts whole buckets that are alive whenever one is sent; sums over stages add 1, as a peer would."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.sizes: set[int] = set()
        self.alive: list[int] = []
        self.order: list[int] = []

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (gc.get_objects() if self.sizes else ())
            if type(t) in (Tensor, nn.Parameter) and not t.is_meta and t.is_floating_point() and t.numel()
        }
        self.alive.append(sum(size // 4 in self.sizes for size in storages.values()))
        self.order.append(full.numel())
        wait = super().reduce_scatter(shard, full, axis)
        return wait

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        tensor.add_(1)
        return lambda: None


class Rig:
    """A model in shards of gradients."""

    def __init__(
        self, model: nn.Module, ranks: int = 2, microbatches: int = 2, marks: Marks = MappingProxyType({})
    ) -> None:
        named = dict(model.named_parameters())
        items = [
            Item(name=name, shape=tuple(p.shape), dtype="float32", **marks.get(name.split(".")[1], {}))
            for name, p in named.items()
        ]  # fmt: skip
        self.layout = build_layout(items, ranks, 1)
        self.buckets = allocate(self.layout, named, Ownership(0, ranks, True, True), torch.device("cpu"))
        grid = Grid(pp=3, dp=ranks)
        self.backend = Watching(grid)
        self.comm = Comm(grid, self.backend)
        self.calls: list[list[str]] = []
        self.reducer = MicrobatchReducer(ReducerSetup(self.buckets, named, self.comm, None, self._double), microbatches)
        self.model = model

    def _double(self, grads: Mapping[str, Tensor]) -> None:
        self.calls.append(sorted(grads))
        for grad in grads.values():
            grad.mul_(2)

    def step(self, *losses: Callable[[], Tensor]) -> None:
        for index, loss in enumerate(losses):
            with self.reducer.backward(Backward(last=index == len(losses) - 1)):
                torch.autograd.backward(loss())
        self.reducer.finish()


def shards(buckets: tuple[FlatBucket, ...], grads: dict[str, Tensor]) -> list[Tensor]:
    """What rank 0 should hold: its part of each bucket."""
    expected = []
    for flat in buckets:
        full = torch.zeros(flat.bucket.elements)
        for slot in flat.bucket.slots:
            full[slot.start : slot.stop] = grads[slot.name].reshape(-1)
        expected.append(full[flat.shard])
    return expected


def assert_same(rig: Rig, plain: nn.Module, *losses: tuple[Loss, Tensor]) -> None:
    rig.step(*(partial(loss, rig.model, given) for loss, given in losses))
    wanted = plain_grads(plain, *(partial(loss, plain, given) for loss, given in losses))
    for flat, expected in zip(rig.buckets, shards(rig.buckets, wanted), strict=True):
        torch.testing.assert_close(flat.gradient(flat.shard), expected)
    assert all(p.grad is None for p in rig.model.parameters())


def skipping(model: Any, given: Tensor) -> Tensor:
    """Leaves the second layer out."""
    loss: Tensor = (model.layers[0](given) @ torch.ones(30, 17)).square().sum() + model.layers[2](torch.ones(17)).sum()
    return loss


def reentrant(model: Any, given: Tensor) -> Tensor:
    """Gives the first layer's gradient twice in one backward."""
    first: Any = partial(checkpoint, model.layers[0], use_reentrant=True)
    given = given.clone().requires_grad_(True)
    loss: Tensor = first(given).sum() * 2 + model.layers[1](first(given)).square().sum()
    return loss


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_hold_the_sum_over_microbatches(ranks: int) -> None:
    rig, plain = Rig(Stack(), ranks), Stack()
    for step in range(3):
        assert_same(rig, plain, (straight, x(step)), (straight, x(step + 10)))
    assert_same(rig, plain, (straight, x(3)), (skipping, x(4)))
    assert_same(rig, plain, (skipping, x(5)), (skipping, x(6)))


def test_a_parameter_that_gives_twice_is_reduced_whole() -> None:
    rig, plain = Rig(Stack()), Stack()
    for step in range(3):
        assert_same(rig, plain, (reentrant, x(step)), (reentrant, x(step + 10)))


def test_every_microbatch_reduces_every_bucket_in_order_while_backward_runs() -> None:
    rig = Rig(Stack(), microbatches=3)
    sizes = [bucket.elements for bucket in rig.layout.buckets]
    rig.step(*(partial(straight, rig.model, x(i)) for i in range(3)))
    assert rig.backend.order == sizes * 3
    rig.step(partial(skipping, rig.model, x(0)))
    assert rig.backend.order[len(sizes) * 3 :] == sizes * 3, "rounds that a rank did not make are made up for"


def test_two_whole_buckets_are_alive_at_most() -> None:
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(6)))
    rig = Rig(nn.ModuleDict({"layers": model}))
    rig.backend.sizes = {bucket.elements for bucket in rig.layout.buckets}
    before = rig.backend

    def loss() -> Tensor:
        total: Tensor = model(torch.ones(3, 40)).square().sum()
        return total

    rig.step(loss, loss)
    parameters = len(rig.buckets)  # their flat buffers are of the same size
    assert max(before.alive) - parameters == BUFFERS
    gc.collect()
    assert not rig.reducer._free and not rig.reducer._flights, "nothing stays between steps"


def test_partial_gradients_stay_whole_and_ties_are_summed_on_the_shard() -> None:
    rig, plain = Rig(Stack(), marks={"3": {"partial": True}, "1": {"ties": (0, 2)}}), Stack()
    for step in range(2):
        losses = (x(step), x(step + 5))
        rig.step(*(partial(straight, rig.model, given) for given in losses))
        wanted = plain_grads(plain, *(partial(straight, plain, given) for given in losses))
        wanted["layers.3.weight"] *= 2
        for flat, expected in zip(rig.buckets, shards(rig.buckets, wanted), strict=True):
            found = flat.gradient(flat.shard)
            torch.testing.assert_close(found, expected + bool(flat.bucket.ties))
    assert rig.calls == [["layers.3.weight"]] * 2


def test_a_step_that_did_not_end_leaves_nothing() -> None:
    rig, plain = Rig(Stack()), Stack()
    with rig.reducer.backward(Backward(last=False)):
        torch.autograd.backward(straight(rig.model, x(9)))
    rig.reducer.reset()
    assert_same(rig, plain, (straight, x(1)), (straight, x(2)))
