"""Which buckets go to the host, and when a copy of their gradients is valid."""

from functools import partial

import pytest
import torch
from torch import nn

from engine.parallel.comm.comm import Pending
from engine.zero.flat_buckets import FlatBucket, Ownership
from engine.zero.offload.host_copies import HostCopies, offloaded_buckets
from tests.zero.buckets import allocate
from tests.zero.rig import Setting, lay_out

BFLOAT16 = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def hosted(dtype: str = "float32", rank: int = 1) -> FlatBucket:
    """One bucket of a linear layer over two ranks, updated by the host."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(BFLOAT16[dtype])
    layout = lay_out(model, Setting(bucket_elements=10**6, dtype=dtype))
    who = Ownership(rank, 2, sharded=True, hosted=frozenset({0}))
    return allocate(layout, dict(model.named_parameters()), who, torch.device("cpu"))[0]


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.01, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_the_first_buckets_until_the_ratio_is_reached(ratio: float, count: int) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    layout = lay_out(model, Setting())
    assert offloaded_buckets(layout, ratio) == frozenset(range(count))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hosted_bucket_has_storages_of_its_own(dtype: str) -> None:
    flat = hosted(dtype)
    assert flat.master is not None and flat.host_sums is not None
    assert flat.master.dtype == flat.host_sums.dtype == torch.float32
    assert len(flat.master) == len(flat.host_sums) == len(flat.kept)
    assert torch.equal(flat.master.to(flat.kept.dtype), flat.kept)
    assert (flat.wide is None) == (dtype == "float32")
    places = {tensor.untyped_storage().data_ptr() for tensor in (flat.master, flat.host_sums, flat.params, flat.grads)}
    assert len(places) == 4


def test_what_changed_since_the_copy_is_copied_again() -> None:
    flat = hosted()
    copies = HostCopies([flat])
    sums = flat.host_sums
    assert sums is not None
    flat.grads.fill_(1.0)
    copies.follow(flat, Pending())
    assert sums.eq(1.0).all(), "complete sums are copied while backward runs"
    flat.grads.fill_(2.0)
    copies.wait(flat)
    assert sums.eq(1.0).all(), "nobody has said that they have changed"
    copies.changed(flat)
    copies.wait(flat)
    assert sums.eq(2.0).all()
    flat.grads.fill_(3.0)
    copies.forget()
    copies.wait(flat)
    assert sums.eq(3.0).all()


def test_sums_that_are_still_reduced_are_left_to_the_wait() -> None:
    flat = hosted()
    copies = HostCopies([flat])
    sums = flat.host_sums
    assert sums is not None
    reduction = Pending(partial(flat.grads.fill_, 5.0))
    copies.follow(flat, reduction)
    assert sums.eq(0.0).all() and reduction.under_way
    reduction.wait()
    copies.wait(flat)
    assert sums.eq(5.0).all()


def test_the_master_is_rounded_into_the_memory_of_used_gradients() -> None:
    flat = hosted("bfloat16")
    copies = HostCopies([flat])
    assert flat.master is not None and flat.host_sums is not None
    flat.grads.fill_(7.0)
    copies.wait(flat)
    flat.master.normal_()
    copies.give(flat)
    assert torch.equal(flat.kept, flat.master.bfloat16())
    assert not flat.host_sums.eq(7.0).all(), "the memory is used twice"
    copies.wait(flat)
    assert flat.host_sums.eq(7.0).all(), "and the gradients are copied again if they are asked for again"


def test_sums_are_left_alone_while_an_update_may_read_them() -> None:
    flat = hosted()
    copies = HostCopies([flat])
    copies.late = True
    assert flat.host_sums is not None
    flat.grads.fill_(4.0)
    copies.follow(flat, Pending())
    assert flat.host_sums.eq(0.0).all()
    copies.wait(flat)
    assert flat.host_sums.eq(4.0).all()
