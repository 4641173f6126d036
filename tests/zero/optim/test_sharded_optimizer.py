"""The sharded step, in one process: all ranks in turn give what one optimizer over the whole model gives."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion, FlatSGD
from engine.zero.optim.inner_optimizer import GroupOptions, OptimizerFactory
from engine.zero.optim.master_weights import full_weights
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from tests.zero.rig import Rig, Setting, build

STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 19), nn.Linear(19, 33, bias=False), nn.Linear(33, 2))


def gradient(name: str, like: Tensor, step: int) -> Tensor:
    """The summed gradient of a step, the same wherever the parameter lies."""
    generator = torch.Generator().manual_seed(step * 1000 + sum(map(ord, name)))
    return torch.randn(like.shape, generator=generator)


def set_gradients(rig: Rig, step: int) -> None:
    named = dict(rig.model.named_parameters())
    for flat in rig.buckets:
        for slot in flat.bucket.slots:
            flat.grads[slot.start : slot.stop] = gradient(slot.name, named[slot.name], step).flatten()


def sharded(rig: Rig, factory: OptimizerFactory, stage: int, own: bool = False) -> ShardedOptimizer:
    return ShardedOptimizer(rig.buckets, [GroupOptions()], factory, rig.comm, stage > 0, own)


def trained(factory: OptimizerFactory, setting: Setting, own: bool = False, scale: float = 0.5) -> dict[str, Tensor]:
    """Weights after all steps, each element from the rank that owns it."""
    full: dict[str, Tensor] = {}
    for rank in range(setting.ranks):
        here = Setting(setting.ranks, rank, setting.stage, setting.bucket_elements, setting.dtype)
        rig = build(model(), here)
        optimizer = sharded(rig, factory, setting.stage, own)
        for step in range(STEPS):
            set_gradients(rig, step)
            optimizer.step(scale)
        for flat in rig.buckets:
            key = str(flat.bucket.index)
            whole = full.setdefault(key, torch.zeros(flat.bucket.elements, dtype=flat.weights.dtype))
            whole[flat.owned] = flat.weights
            assert torch.equal(flat.weights.to(flat.params.dtype), flat.params[flat.owned])
    return {
        slot.name: full[str(flat.bucket.index)][slot.start : slot.stop].view(slot.shape)
        for flat in rig.buckets
        for slot in flat.bucket.slots
    }


def by_torch(factory: OptimizerFactory, scale: float = 0.5) -> dict[str, Tensor]:
    """The same without buckets."""
    plain = model()
    optimizer = factory([{"params": list(plain.parameters())}])
    for step in range(STEPS):
        for name, parameter in plain.named_parameters():
            parameter.grad = gradient(name, parameter, step) * scale
        optimizer.step()
    return {name: parameter.detach() for name, parameter in plain.named_parameters()}


FACTORIES: dict[str, OptimizerFactory] = {
    "FlatAdam": lambda groups: FlatAdam(groups, lr=0.05, weight_decay=0.1, decoupled=True),
    "FlatSGD": lambda groups: FlatSGD(groups, lr=0.05, momentum=0.9),
    "FlatLion": lambda groups: FlatLion(groups, lr=0.05),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.05, momentum=0.5, centered=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.05),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=0.05),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=0.05),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=0.05),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=0.05),
}


@pytest.mark.parametrize("bucket_elements", [1, 10**6])
@pytest.mark.parametrize("name", FACTORIES)
def test_shards_together_are_the_whole(name: str, bucket_elements: int) -> None:
    whole = by_torch(FACTORIES[name])
    for setting in (Setting(1, stage=0), Setting(3, stage=0), Setting(1, stage=1), Setting(3, stage=1)):
        case = Setting(setting.ranks, 0, setting.stage, bucket_elements)
        for key, weights in trained(FACTORIES[name], case).items():
            torch.testing.assert_close(weights, whole[key], rtol=1e-5, atol=1e-6)
            assert (weights - dict(model().named_parameters())[key].detach()).abs().max() > 1e-3


@pytest.mark.parametrize("stage", [0, 1])
def test_bf16_runs_update_the_fp32_masters(stage: int) -> None:
    whole = by_torch(FACTORIES["FlatAdam"])
    got = trained(FACTORIES["FlatAdam"], Setting(3, stage=stage, dtype="bfloat16"))
    for key, weights in got.items():
        torch.testing.assert_close(weights, whole[key], rtol=1e-5, atol=1e-6)
        assert not torch.equal(weights, weights.bfloat16().float())


@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_are_gathered_bucket_by_bucket_at_stage_1_only(stage: int) -> None:
    rig = build(model(), Setting(ranks=2, rank=1, stage=stage, bucket_elements=700, dtype="bfloat16"))
    optimizer = sharded(rig, FACTORIES["FlatAdam"], stage)
    set_gradients(rig, 0)
    optimizer.step(1.0)
    expected = [("all_gather", "dp", "parameters", size, "bfloat16") for size in rig.sizes()] if stage else []
    assert [(r.op, r.axis, r.label, r.elements, r.dtype) for r in rig.comm.records] == expected
    assert len(rig.sizes()) > 1


def test_groups_get_their_overrides_even_where_a_rank_owns_none_of_them() -> None:
    rig = build(model(), Setting(ranks=2, stage=1))
    options = [GroupOptions(), GroupOptions(lr=0.5), GroupOptions(weight_decay=0.0)]
    optimizer = ShardedOptimizer(rig.buckets, options, FACTORIES["FlatAdam"], rig.comm, sharded=True)
    groups = optimizer.inner.param_groups
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [
        (0.05, 0.1, 5),
        (0.5, 0.1, 0),
        (0.05, 0, 0),
    ]
    set_gradients(rig, 0)
    optimizer.step(1.0)


# what may be sharded


class Rowwise(torch.optim.Optimizer):
    """Divides each gradient by the norm of its whole parameter, so that a shard is updated otherwise."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.shapes: list[tuple[int, ...]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in [each for each in group["params"] if each.grad is not None]:
                self.shapes.append(tuple(parameter.shape))
                parameter -= group["lr"] * parameter.grad / parameter.norm()


class Elementwise(torch.optim.Optimizer):
    """Plain descent that says what it is."""

    elementwise = True

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in [each for each in group["params"] if each.grad is not None]:
                parameter -= group["lr"] * parameter.grad


class AdamW(torch.optim.Optimizer):
    """A name from torch's list on something else."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize("kind", [Rowwise, AdamW, torch.optim.Adafactor])
def test_an_optimizer_that_looks_at_whole_parameters_is_not_sharded(kind: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ConfigError) as caught:
        sharded(build(model(), Setting(stage=1)), kind, 1)
    assert str(caught.value) == (
        f"optimizer {kind.__name__} is given shards of parameters by zero_optimization.stage 1 or more, which needs "
        "an optimizer that updates element by element; choose such an optimizer, set `elementwise = True` on its class "
        "if it does, or `whole_parameters = True` if it updates each parameter as a whole."
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_stage_0_it_gets_whole_parameters_in_their_shapes(dtype: str) -> None:
    rig = build(model(), Setting(dtype=dtype))
    optimizer = sharded(rig, Rowwise, 0, own=True)
    set_gradients(rig, 0)
    optimizer.step(1.0)
    assert isinstance(optimizer.inner, Rowwise)
    assert sorted(optimizer.inner.shapes) == sorted(tuple(p.shape) for p in model().parameters())
    for key, weights in trained(Rowwise, Setting(2, dtype=dtype), own=True).items():
        torch.testing.assert_close(weights, by_torch(Rowwise)[key], rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_says_it_works_element_by_element_is_sharded() -> None:
    whole = by_torch(Elementwise)
    for key, weights in trained(Elementwise, Setting(3, stage=1)).items():
        torch.testing.assert_close(weights, whole[key])


# whole weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_weights_are_the_widest_there_are(dtype: str) -> None:
    rig = build(model(), Setting(ranks=1, stage=1, dtype=dtype))
    full = dict(full_weights(rig.buckets, rig.comm))
    given = dict(model().named_parameters())
    assert len(full) == len(given)
    for name in given:
        assert torch.equal(full[name], given[name].detach())


@pytest.mark.parametrize("stage", [0, 1])
def test_zero_grad_on_the_optimizer_does_not_stop_training(stage: int) -> None:
    rig = build(model(), Setting(ranks=2, stage=stage))
    optimizer = sharded(rig, FACTORIES["FlatAdam"], stage)
    optimizer.inner.zero_grad()  # a habit from plain loops; engine.optimizer hands this object out
    before: Sequence[Tensor] = [flat.weights.clone() for flat in rig.buckets]
    set_gradients(rig, 0)
    optimizer.step(1.0)
    moved = [not torch.equal(flat.weights, old) for flat, old in zip(rig.buckets, before, strict=True)]
    assert all(moved)
