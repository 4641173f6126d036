"""Updates that the device decides on are those that the host decides on, in shards as in one piece."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.adamw import AdamRun, DeviceDecision, adamw_
from engine.kernels.optim.update_rules import adam_
from engine.parallel.comm.comm import Pending
from engine.parallel.grid import ShardHolder
from engine.parallel.shard_table import Range, ShardRow
from engine.zero.flat_buckets import FlatBucket, Ownership
from engine.zero.layout import Item, build_layout
from engine.zero.optim import flat_optimizers
from engine.zero.optim.bf16_updates import FullShapes, RoundedUpdates
from engine.zero.optim.flat_optimizers import Bookkeeping, FlatAdam, FlatLion
from engine.zero.optim.inner_optimizer import GroupOptions, OptimizerFactory
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from tests.kernels.interpreter import repair
from tests.selection import wide
from tests.zero.buckets import allocate
from tests.zero.rig import Setting, build

STEPS, SCALE = 3, 0.25
GROUPS = [GroupOptions(), GroupOptions(lr=0.01), GroupOptions(weight_decay=0.0)]
ADAMW: OptimizerFactory = lambda groups: FlatAdam(groups, lr=0.05, weight_decay=0.1, decoupled=True)  # noqa: E731
Step = Callable[[ShardedOptimizer], None]


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    repair()


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 19), nn.Linear(19, 33, bias=False), nn.Linear(33, 2))


def decision(go: bool = True) -> DeviceDecision:
    return DeviceDecision(torch.tensor(SCALE, dtype=torch.float64), torch.tensor(float(go), dtype=torch.float64))


def by_host(optimizer: ShardedOptimizer) -> None:
    assert not optimizer.decides_on_device
    optimizer.step(SCALE)


def by_device(optimizer: ShardedOptimizer) -> None:
    optimizer.use(Kernels("triton"))
    assert optimizer.decides_on_device
    optimizer.launch(decision())
    optimizer.settle()


def row(name: str, p: Tensor) -> ShardRow:
    held = (Range(0, len(p), (0,)),)
    return ShardRow(name, (), tuple(p.shape), torch.bfloat16, (0,), None, held, False, False, True, 0)


class Rank:
    """What one data rank holds of the model, with an optimizer over it; bf16 weights alone are rounded."""

    def __init__(self, setting: Setting, rounded: torch.dtype | None = None) -> None:
        here, named = model(), dict(model().named_parameters())
        dtype = setting.dtype if rounded is None else "bfloat16"
        items = [
            Item(name=name, shape=tuple(p.shape), dtype=dtype, group=i % 3) for i, (name, p) in enumerate(named.items())
        ]
        layout = build_layout(items, setting.ranks, setting.bucket_elements)
        who = Ownership(setting.rank, setting.ranks, setting.stage > 0, master=rounded is None)
        self.buckets = allocate(layout, dict(here.named_parameters()), who, torch.device("cpu"))
        comm = build(model(), setting).comm
        self.optimizer = ShardedOptimizer(self.buckets, GROUPS, ADAMW, comm, setting.stage > 0)
        if rounded is not None:
            rows = {
                name: ShardRow(
                    name,
                    (),
                    tuple(p.shape),
                    torch.bfloat16,
                    (0,),
                    None,
                    (Range(0, len(p), (0,)),),
                    False,
                    False,
                    True,
                    0,
                )
                for name, p in named.items()
            }
            whole = FullShapes({name: number for number, name in enumerate(named)}, rows, ShardHolder())
            self.optimizer.round(RoundedUpdates(9, whole, rounded))

    def train(self, make: Step) -> None:
        for step in range(STEPS):
            for flat in self.buckets:
                for slot in flat.bucket.slots:
                    generator = torch.Generator().manual_seed(step * 1000 + sum(map(ord, slot.name)))
                    values = torch.randn(slot.stop - slot.start, generator=generator)
                    flat.grads[slot.start : slot.stop] = values.to(flat.grads.dtype)
            make(self.optimizer)


def trained(setting: Setting, make: Step, rounded: torch.dtype | None = None) -> dict[str, Tensor]:
    """Weights by parameter, each element from the rank that owns it."""
    full: dict[int, Tensor] = {}
    flat: FlatBucket
    for number in range(setting.ranks):
        rank = Rank(Setting(setting.ranks, number, setting.stage, setting.bucket_elements, setting.dtype), rounded)
        rank.train(make)
        for flat in rank.buckets:
            whole = full.setdefault(flat.bucket.index, torch.zeros(flat.bucket.elements, dtype=flat.weights.dtype))
            whole[flat.owned] = flat.weights
            assert torch.equal(flat.weights.to(flat.params.dtype), flat.params[flat.owned])
    return {
        slot.name: full[flat.bucket.index][slot.start : slot.stop]
        for flat in rank.buckets
        for slot in flat.bucket.slots
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bucket_elements", [wide(1), 10**6])
def test_the_device_makes_the_update_of_the_host(bucket_elements: int, dtype: str) -> None:
    setting = Setting(1, 0, 1, bucket_elements, dtype)
    expected = trained(setting, by_host)
    for case in (setting, Setting(2, 0, 0, bucket_elements, dtype), Setting(3, 0, 1, bucket_elements, dtype)):
        for name, weights in trained(case, by_device).items():
            torch.testing.assert_close(weights, expected[name], rtol=2e-6, atol=2e-7)
            assert (weights - dict(model().named_parameters())[name].detach().flatten()).abs().max() > 1e-3


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_weights_too_and_shards_round_as_the_whole(moments: torch.dtype) -> None:
    setting = Setting(1, 0, 1, 10**6)
    expected, whole = (trained(setting, make, moments) for make in (by_host, by_device))
    alike = torch.cat([whole[name] == expected[name] for name in whole]).double().mean()
    assert float(alike) > 0.99, "a last bit of fp32 turns one rounding in many"
    for name, weights in trained(Setting(3, 0, 1, 10**6), by_device, moments).items():
        assert weights.dtype == torch.bfloat16 and torch.equal(weights, whole[name])


@pytest.mark.parametrize("rounded", [None, torch.bfloat16], ids=str)
def test_nothing_tells_of_an_update_that_was_not_made(rounded: torch.dtype | None) -> None:
    rank, other = (Rank(Setting(1, 0, 1, 700, "bfloat16"), rounded) for _ in range(2))
    states: list[int] = []

    def poisoned(optimizer: ShardedOptimizer) -> None:
        before = Bookkeeping.of(optimizer.inner)
        optimizer.use(Kernels("triton"))
        for flat in rank.buckets:
            for slot in flat.bucket.slots:
                flat.grads[slot.start : slot.stop] = math.nan
        for group in optimizer.inner.param_groups:
            group["lr"] *= 2
        optimizer.launch(decision(go=False))
        states.append(len(optimizer.inner.state))
        before.put_back(optimizer.inner)
        states.append(len(optimizer.inner.state))

    rank.train(poisoned)
    assert states == [len(rank.optimizer.places), 0] * STEPS
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(rank.buckets, other.buckets, strict=True))
    assert [{k: v for k, v in g.items() if k != "params"} for g in rank.optimizer.inner.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in other.optimizer.inner.param_groups
    ]
    for one in (rank, other):
        one.train(by_device)
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(rank.buckets, other.buckets, strict=True))
    assert all(torch.equal(a.params, b.params) for a, b in zip(rank.buckets, other.buckets, strict=True))


def test_parameters_are_gathered_whatever_was_decided() -> None:
    rig = build(model(), Setting(ranks=2, rank=1, stage=1, bucket_elements=700, dtype="bfloat16"))
    optimizer = ShardedOptimizer(rig.buckets, [GroupOptions()], ADAMW, rig.comm, True)
    optimizer.use(Kernels("triton"))
    for go in (False, True):
        rig.comm.records.clear()
        optimizer.launch(decision(go))
        assert [(r.op, r.axis, r.label, r.elements) for r in rig.comm.records] == [
            ("all_gather", "dp", "parameters", size) for size in rig.sizes()
        ]
    assert len(rig.sizes()) > 1


def test_only_adam_with_a_kernel_decides_on_the_device() -> None:
    rig = build(model(), Setting(stage=1))
    lion: OptimizerFactory = lambda groups: FlatLion(groups, lr=0.1)  # noqa: E731
    plain: OptimizerFactory = lambda groups: torch.optim.AdamW(groups, lr=0.1)  # noqa: E731
    for factory, kernels, expected in (
        (ADAMW, Kernels("triton"), True),
        (ADAMW, Kernels("reference"), False),
        (ADAMW, Kernels("auto"), False),
        (lion, Kernels("triton"), False),
        (plain, Kernels("triton"), False),
    ):
        optimizer = ShardedOptimizer(rig.buckets, [GroupOptions()], factory, rig.comm, True)
        optimizer.use(kernels)
        assert optimizer.decides_on_device == expected
    wide = build(model().double(), Setting(stage=1, dtype="float64"))
    optimizer = ShardedOptimizer(wide.buckets, [GroupOptions()], ADAMW, wide.comm, True)
    optimizer.use(Kernels("triton"))
    assert not optimizer.decides_on_device


@pytest.mark.parametrize("make", [by_host, by_device])
def test_a_bucket_is_gathered_before_the_next_one_is_updated(make: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = build(model(), Setting(ranks=2, rank=1, stage=1, bucket_elements=700, dtype="bfloat16"))
    optimizer = ShardedOptimizer(rig.buckets, GROUPS, ADAMW, rig.comm, True)
    of_bucket = {flat.weights.untyped_storage().data_ptr(): flat.bucket.index for flat in rig.buckets}
    events: list[tuple[str, int]] = []

    def updated(weights: Tensor) -> None:
        events.append(("update", of_bucket[weights.untyped_storage().data_ptr()]))

    def by_kernel(run: AdamRun, *more: Any) -> None:
        updated(run.weights)
        adamw_(run, *more)

    def by_torch(weights: list[Tensor], *more: Any) -> None:
        for one in weights:
            updated(one)
        adam_(weights, *more)

    gather = rig.comm.all_gather
    monkeypatch.setattr(flat_optimizers, "adamw_", by_kernel)
    monkeypatch.setattr(flat_optimizers, "update_adam_", by_torch)

    def gathered(into: Tensor, part: Tensor, *more: Any) -> Pending:
        index = next(flat.bucket.index for flat in rig.buckets if flat.params is into)
        assert torch.equal(part, rig.buckets[index].weights.to(part.dtype)), "what is sent is the updated weights"
        events.append(("gather", index))
        return gather(into, part, *more)

    monkeypatch.setattr(rig.comm, "all_gather", gathered)
    make(optimizer)
    assert len(rig.buckets) > 1
    assert list(dict.fromkeys(events)) == [
        (what, flat.bucket.index) for flat in rig.buckets for what in ("update", "gather")
    ]
    assert sum(what == "gather" for what, _ in events) == len(rig.buckets)


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that give or write bf16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        casts = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default) and out.dtype == torch.bfloat16
        if casts and out.data_ptr() != args[-1].data_ptr():  # the backend of this test copies a shard to where it lies
            self.made.append(str(func))
        return out


def test_the_kernel_writes_narrow_weights_where_they_are_gathered_from(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = build(model(), Setting(ranks=2, rank=1, stage=1, bucket_elements=700, dtype="bfloat16"))
    optimizer = ShardedOptimizer(rig.buckets, [GroupOptions()], ADAMW, rig.comm, True)
    optimizer.use(Kernels("triton"))
    written: list[tuple[int, int]] = []

    def noted(run: AdamRun, *more: Any) -> None:
        assert run.narrow is not None and run.narrow.numel() == run.weights.numel()
        written.append((run.narrow.data_ptr(), run.narrow.nbytes))
        with _disable_current_modes():  # the interpreter copies what it gives to a kernel
            adamw_(run, *more)

    monkeypatch.setattr(flat_optimizers, "adamw_", noted)
    before = [flat.params.clone() for flat in rig.buckets]
    with Casts() as casts:
        optimizer.launch(decision())
    shards = [flat.params[flat.shard] for flat in rig.buckets]
    assert written == [(shard.data_ptr(), shard.nbytes) for shard in shards]
    assert casts.made == [], "one launch for each bucket updates, rounds and writes"
    for flat, old, shard in zip(rig.buckets, before, shards, strict=True):
        assert torch.equal(shard, flat.weights.bfloat16()) and not torch.equal(shard, old[flat.shard])


def test_a_skipped_step_writes_no_narrow_weight() -> None:
    """Nor over weights that the user has written since the last update, which reach the masters with the next one."""
    rig = build(model(), Setting(ranks=2, rank=1, stage=1, bucket_elements=700, dtype="bfloat16"))
    optimizer = ShardedOptimizer(rig.buckets, [GroupOptions()], ADAMW, rig.comm, True)
    optimizer.use(Kernels("triton"))
    for flat in rig.buckets:
        flat.kept.fill_(0.5)
        flat.grads.fill_(math.nan)
    masters = [flat.weights.clone() for flat in rig.buckets]
    optimizer.launch(decision(go=False))
    for flat, master in zip(rig.buckets, masters, strict=True):
        assert torch.equal(flat.params[flat.shard], torch.full_like(flat.kept, 0.5))
        assert torch.equal(flat.weights, master)
