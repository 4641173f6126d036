"""Flat tensors: the parameters become views and keep every bit, in the master where they get narrower."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from engine.kernels.dispatch import Kernels, Mode
from engine.kernels.ops.norm import squared_norm
from engine.zero.flat_buckets import FlatBucket, Ownership, lay_apart, norm_parts
from tests.zero.buckets import allocate
from tests.zero.rig import Setting, build, lay_out

MODES: tuple[Mode, ...] = ("reference", "triton")


class Awkward(nn.Module):
    """Not contiguous, 0-dim, empty and half-precision parameters, all random."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.short = nn.Parameter(torch.randn(9).bfloat16())
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))


def fill(model: nn.Module, setting: Setting) -> tuple[FlatBucket, ...]:
    parameters = dict(model.named_parameters())
    who = Ownership(setting.rank, setting.ranks, setting.stage > 0)
    return allocate(lay_out(model, setting), parameters, who, torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("bucket_elements", [1, 10**6])
def test_parameters_keep_their_values_and_become_views(dtype: str, bucket_elements: int) -> None:
    model = Awkward()
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    identities = {name: id(p) for name, p in model.named_parameters()}
    buckets = fill(model, Setting(bucket_elements=bucket_elements, dtype=dtype))
    places = {slot.name: (flat, slot) for flat in buckets for slot in flat.bucket.slots}
    for name, parameter in model.named_parameters():
        assert id(parameter) == identities[name] and parameter.requires_grad and parameter.is_leaf
        torch.testing.assert_close(parameter.detach(), given[name].to(parameter.dtype), rtol=0, atol=0)
        flat, slot = places[name]
        assert parameter.untyped_storage().data_ptr() == flat.params.untyped_storage().data_ptr()
        flat.params[slot.start : slot.stop] = 3
        assert parameter.shape == given[name].shape and bool((parameter == 3).all())


@given(st.integers(1, 5), st.integers(0, 1), st.sampled_from([1, 150, 10**6]), st.data())
@settings(max_examples=30, deadline=None)
def test_bf16_masters_are_the_unrounded_values(ranks: int, stage: int, limit: int, data: st.DataObject) -> None:
    model, rank = Awkward(), data.draw(st.integers(0, ranks - 1))
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    for flat in fill(model, Setting(ranks, rank, stage, limit, "bfloat16")):
        expected = torch.zeros(flat.bucket.elements)
        for slot in flat.bucket.slots:
            expected[slot.start : slot.stop] = given[slot.name].reshape(-1)
        assert flat.master is not None and flat.master.dtype == torch.float32
        assert torch.equal(flat.master, expected[flat.owned]) and flat.weights is flat.master
        assert torch.equal(flat.params, expected.bfloat16()), "padding is zero, the rest is rounded once"
        assert flat.owned == (flat.shard if stage else slice(0, flat.bucket.elements))
        assert flat.grads.dtype == torch.float32 and not flat.grads.any()


@pytest.mark.parametrize(("dtype", "wide"), [("float32", torch.float32), ("float64", torch.float64)])
def test_wide_parameters_have_no_second_copy(dtype: str, wide: torch.dtype) -> None:
    for flat in fill(Awkward(), Setting(ranks=4, rank=2, stage=1, dtype=dtype)):
        assert flat.master is None and flat.grads.dtype == wide
        assert flat.weights.untyped_storage().data_ptr() == flat.params.untyped_storage().data_ptr()
        flat.weights.fill_(5)
        assert bool((flat.params[flat.shard] == 5).all()) and int((flat.params == 5).sum()) == flat.weights.numel()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_squared_norms_of_all_ranks_count_every_element_once(ranks: int, mode: Mode) -> None:
    total, expected = 0.0, 0.0
    for rank in range(ranks):
        rig = build(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 31)), Setting(ranks, rank, bucket_elements=200))
        gradients = {name: torch.full_like(p, 1 + p.numel()) for name, p in rig.model.named_parameters()}
        for flat in rig.buckets:
            for slot in flat.bucket.slots:
                flat.grads[slot.start : slot.stop] = gradients[slot.name].flatten()
        norm = squared_norm(norm_parts(rig.buckets), Kernels(mode))
        assert norm.dtype == torch.float64 and norm.shape == ()
        total += float(norm)
        expected = sum(p.numel() * (1 + p.numel()) ** 2 for p in rig.model.parameters())
    assert math.isclose(total, expected, rel_tol=1e-12)


def flat_gradients(value: float, count: int) -> tuple[FlatBucket, ...]:
    """Buckets of one parameter whose gradient is ``value`` everywhere."""
    rig = build(nn.Linear(count, 1, bias=False), Setting(ranks=1))
    rig.buckets[0].grads[:count] = value
    return rig.buckets


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [1e-30, 1e30, 3e38, math.nan, math.inf])
def test_a_squared_norm_neither_overflows_nor_hides_what_is_not_finite(value: float, mode: Mode) -> None:
    found = float(squared_norm(norm_parts(flat_gradients(value, 64)), Kernels(mode)))
    expected = 64 * float(Tensor([value])) ** 2
    assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_memory_of_a_sharded_bucket_stays_with_what_lies_apart_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layout, parameters = lay_out(model, Setting(stage=3, bucket_elements=10**6)), dict(model.named_parameters())
    who = Ownership(0, 2, sharded=True, sharded_parameters=True)
    (flat,) = allocate(layout, parameters, who, torch.device("cpu"))
    flat.reserve()
    flat.params.fill_(2.0)
    entry, again = flat.views[0].detach(), flat.views[0].detach()
    for tensor in (entry, again):
        lay_apart(tensor, flat.apart)
    assert entry.untyped_storage()._cdata == again.untyped_storage()._cdata
    assert entry.untyped_storage().nbytes() == entry.nbytes and entry.data_ptr() == flat.views[0].data_ptr()
    shared = flat.params.untyped_storage()._cdata
    flat.release()
    freed = flat.params.untyped_storage()._cdata == shared
    values = None if freed else entry.clone()
    del entry, again, tensor  # a failed assertion would print them, and read freed memory
    assert not freed and flat.params.untyped_storage().nbytes() == 0
    assert values is not None and bool((values == 2.0).all())

    flat.reserve()
    shared = flat.params.untyped_storage()._cdata
    flat.release()
    assert flat.params.untyped_storage()._cdata == shared
