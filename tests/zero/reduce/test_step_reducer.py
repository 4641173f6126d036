"""Gradients into buckets: right values for every way a model uses its parameters, in an order all ranks share."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.parallel.comm.backend import RecordingBackend, Reduction, Wait
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis, Grid
from engine.zero.flat_buckets import Ownership
from engine.zero.layout import Item, build_layout
from engine.zero.reduce.reducer import Backward, ReducerSetup
from engine.zero.reduce.step_reducer import GradientReducer
from tests.zero.buckets import allocate
from tests.zero.rig import Rig, Setting, build, plain_grads

Loss = Callable[[nn.Module, Tensor], Tensor]
WIDTHS = (4, 30, 17, 9, 3)  # every weight has another size, so that a record names its bucket


class Stack(nn.Module):
    """Linear layers that a loss calls in whatever way it likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def x(seed: int) -> Tensor:
    return torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(seed))


def straight(model: nn.Module, given: Tensor) -> Tensor:
    loss: Tensor = model(given).square().sum()
    return loss


def assert_same(rig: Rig, plain: nn.Module, *losses: tuple[Loss, Tensor]) -> None:
    """One step of the rig gives what autograd alone gives."""
    rig.step(*(partial(loss, rig.model, given) for loss, given in losses))
    expected = plain_grads(plain, *(partial(loss, plain, given) for loss, given in losses))
    got = rig.grads()
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, msg=partial("{}: {}".format, name))
    assert all(p.grad is None for p in rig.model.parameters())


# order


def test_buckets_are_issued_in_order_although_gradients_come_the_other_way() -> None:
    class Reversed(nn.Module):
        """Registered in the opposite order of use."""

        def __init__(self) -> None:
            super().__init__()
            self.late, self.middle, self.early = nn.Linear(9, 2), nn.Linear(17, 9), nn.Linear(4, 17)

        def forward(self, given: Tensor) -> Tensor:
            out: Tensor = self.late(self.middle(self.early(given)))
            return out

    model = Reversed()
    plain, rig = deepcopy(model), build(model, Setting(bucket_elements=200))
    assert len(rig.sizes()) > 1
    for seed in range(3):
        assert_same(rig, plain, (straight, x(seed)), (straight, x(seed + 9)))
    assert rig.issued() == rig.sizes() * 3


def test_from_the_second_step_on_buckets_are_reduced_during_backward() -> None:
    rig = build(Stack(), Setting(stage=1))
    seen: list[int] = []

    def watched(model: nn.Module, given: Tensor) -> Tensor:
        out = model.layers[0](given)  # type: ignore[index, operator]
        out.register_hook(lambda grad: seen.append(len(rig.comm.records)))
        for layer in list(model.layers)[1:]:  # type: ignore[arg-type]
            out = torch.tanh(layer(out))
        return straight(nn.Identity(), out)

    losses = [partial(watched, rig.model, x(seed)) for seed in range(3)]
    rig.step(*losses)
    assert seen == [0, 0, 0] and rig.issued() == rig.sizes()
    with rig.reducer.backward(Backward(last=False)):
        torch.autograd.backward(losses[0]())
    assert len(rig.comm.records) == 4, "an earlier microbatch must not be reduced"
    with rig.reducer.backward(Backward(last=True)):
        torch.autograd.backward(losses[1]())
    assert seen[-2:] == [4, 7], "three of four buckets must be under way before the first layer's gradient"
    assert rig.issued() == rig.sizes() * 2
    rig.reducer.finish()
    assert len(rig.comm.records) == 8


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("rank", [0, 2])
def test_each_bucket_is_one_collective_a_step(stage: int, rank: int) -> None:
    rig = build(Stack(), Setting(ranks=3, rank=rank, stage=stage, bucket_elements=800))
    losses = [partial(straight, rig.model, x(seed)) for seed in range(4)]
    rig.step(*losses)
    rig.step(*losses)
    assert {record.op for record in rig.comm.records} == {"reduce_scatter" if stage else "all_reduce"}
    assert rig.issued() == rig.sizes() * 2 and len(rig.sizes()) == 2


# ways to use a parameter


def twice(model: nn.Module, given: Tensor) -> Tensor:
    return straight(model, given) + 3 * straight(model, given + 1)


def first_only(model: nn.Module, given: Tensor) -> Tensor:
    return straight(model.layers[0], given)  # type: ignore[index, arg-type]


def through_checkpoint(model: nn.Module, given: Tensor) -> Tensor:
    given = given.clone().requires_grad_()
    inner = checkpoint(model, given, use_reentrant=True)
    assert isinstance(inner, Tensor)
    return inner.square().sum()


def twice_through_checkpoint(model: nn.Module, given: Tensor) -> Tensor:
    return through_checkpoint(model, given) + through_checkpoint(model, given - 2) + straight(model, given)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket_elements", [1, 600, 10**6])
@pytest.mark.parametrize("loss", [straight, twice, through_checkpoint, twice_through_checkpoint])
def test_gradients_are_those_of_autograd(loss: Loss, bucket_elements: int, rank: int) -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting(rank=rank, bucket_elements=bucket_elements))
    for seed in range(3):
        assert_same(rig, plain, (loss, x(seed)), (loss, x(seed + 7)))


def test_a_parameter_without_gradient_gives_zero_and_nothing_stale() -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting(bucket_elements=800))
    for loss in (straight, first_only, straight, first_only):
        assert_same(rig, plain, (loss, x(1)))
    assert_same(rig, plain, (first_only, x(2)), (straight, x(3)))
    assert_same(rig, plain, (straight, x(4)), (first_only, x(5)))
    assert rig.issued() == rig.sizes() * 6


def test_a_step_without_any_backward_gives_zero_in_the_same_collectives() -> None:
    rig = build(Stack(), Setting())
    rig.step(partial(straight, rig.model, x(0)))
    rig.reducer.finish()
    assert rig.issued() == rig.sizes() * 2
    assert all(not grad.any() for grad in rig.grads().values())


def test_a_first_step_without_backward_teaches_nothing() -> None:
    """As when the first batch is refused on all ranks and the user goes on."""
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting())
    rig.reducer.finish()
    assert_same(rig, plain, (twice_through_checkpoint, x(0)))


def test_sparse_gradients_are_summed_as_dense_ones() -> None:
    model = nn.Sequential(nn.Embedding(11, 3, sparse=True), nn.Linear(3, 2))
    plain, rig = deepcopy(model), build(model, Setting())
    for seed in range(3):
        ids = torch.tensor([1, 1, 4, seed])
        assert_same(rig, plain, (straight, ids), (straight, ids + 2))


# ways to fail


def test_an_extra_use_after_the_reduction_is_refused_by_name() -> None:
    rig = build(Stack(), Setting())
    rig.step(partial(through_checkpoint, rig.model, x(0)))
    with (
        pytest.raises(EngineError, match=r"'layers\.3\.weight' got a gradient after .* use it the same number"),
        rig.reducer.backward(Backward(last=True)),
    ):
        torch.autograd.backward(twice_through_checkpoint(rig.model, x(0)))


def test_gradients_of_a_backward_of_the_users_own_are_left_alone() -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting())
    assert_same(rig, plain, (straight, x(0)))
    torch.autograd.backward(straight(rig.model, x(1)))
    expected = plain_grads(plain, partial(straight, plain, x(1)))
    for name, parameter in rig.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])
    assert rig.issued() == rig.sizes()


def test_gradients_that_the_user_left_behind_do_not_enter_the_next_step() -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting())
    torch.autograd.backward(straight(rig.model, x(1)))
    rig.step(partial(straight, rig.model, x(0)))
    for name, grad in plain_grads(plain, partial(straight, plain, x(0))).items():
        torch.testing.assert_close(rig.grads()[name], grad)
    for name, grad in plain_grads(plain, partial(straight, plain, x(1))).items():
        torch.testing.assert_close(rig.model.get_parameter(name).grad, grad)


def raising(model: nn.Module, given: Tensor) -> Tensor:
    """Fails in backward when the first layer is reached; the others have given their gradients."""
    out = model.layers[0](given)  # type: ignore[index, operator]

    def fail(grad: Tensor) -> Tensor:
        raise ZeroDivisionError

    out.register_hook(fail)
    for layer in list(model.layers)[1:]:  # type: ignore[arg-type]
        out = torch.tanh(layer(out))
    return straight(nn.Identity(), out)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_step_after_a_failed_one_is_clean(steps_before: int) -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting())
    for seed in range(steps_before):
        assert_same(rig, plain, (straight, x(seed)))
    with rig.reducer.backward(Backward(last=False)):
        torch.autograd.backward(straight(rig.model, x(5)))
    with pytest.raises(ZeroDivisionError), rig.reducer.backward(Backward(last=True)):
        torch.autograd.backward(raising(rig.model, x(6)))
    rig.reducer.reset()
    for seed in range(2):
        assert_same(rig, plain, (straight, x(seed)), (first_only, x(seed)))


class Late(RecordingBackend):
    """A slow network: an all-reduce takes effect when the third after it is issued, or when one is waited for."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._under_way: list[Callable[[], object]] = []

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """The sum is that of the values at the time of issue."""
        self._arrive(2)
        self._under_way.append(partial(tensor.copy_, tensor.clone()))
        return self._arrive

    def _arrive(self, keep: int = 0) -> None:
        while len(self._under_way) > keep:
            self._under_way.pop(0)()


def test_what_a_failed_step_left_under_way_does_not_reach_the_next_one() -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting(), Late)
    assert_same(rig, plain, (straight, x(0)))
    with pytest.raises(ZeroDivisionError), rig.reducer.backward(Backward(last=True)):
        torch.autograd.backward(raising(rig.model, x(1)))
    rig.reducer.reset()
    assert_same(rig, plain, (straight, x(2)))


def test_removed_hooks_take_no_gradient() -> None:
    rig = build(Stack(), Setting())
    rig.reducer.remove()
    with rig.reducer.backward(Backward(last=True)):
        torch.autograd.backward(straight(rig.model, x(0)))
    assert all(p.grad is not None for p in rig.model.parameters())


def spoiled(model: nn.Module, given: Tensor) -> Tensor:
    return straight(model, given) * float("nan")


@pytest.mark.parametrize("deferred", [False, True])
def test_watched_gradients_are_looked_at_whoever_computes_them(deferred: bool) -> None:
    """The second half of a split backward delivers weight gradients itself."""
    rig = build(Stack(), Setting())

    def step(loss: Loss) -> bool:
        if not deferred:
            rig.step(partial(loss, rig.model, x(0)))
            return rig.reducer.found_nonfinite()
        grads = torch.autograd.grad(loss(rig.model, x(0)), list(rig.model.parameters()))
        with rig.reducer.backward(Backward(last=True, part="weight")):
            for (name, _), grad in zip(rig.model.named_parameters(), grads, strict=True):
                rig.reducer.take(name, grad)
        rig.reducer.finish()
        return rig.reducer.found_nonfinite()

    assert not step(spoiled), "nobody looks unless asked"
    rig.reducer.watch(True)
    assert [step(loss) for loss in (spoiled, straight, spoiled)] == [True, False, True]
    rig.reducer.watch(False)
    assert not step(spoiled)


# precision


def test_gradients_travel_in_the_dtype_of_the_wire_and_are_kept_in_fp32() -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting(wire=torch.bfloat16))
    for seed in range(2):
        losses = [(straight, x(seed)), (straight, x(seed + 3))]
        rig.step(*(partial(loss, rig.model, given) for loss, given in losses))
        expected = plain_grads(plain, *(partial(loss, plain, given) for loss, given in losses))
        for name, grad in rig.grads().items():
            torch.testing.assert_close(grad, expected[name].bfloat16().float(), rtol=0, atol=0)
            assert not torch.equal(grad, expected[name])
    assert {(record.dtype, record.op) for record in rig.comm.records} == {("bfloat16", "all_reduce")}
    assert all(flat.grads.dtype == torch.float32 for flat in rig.buckets)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_shard_gets_what_came_over_a_narrow_wire(rank: int) -> None:
    model = Stack()
    plain, rig = deepcopy(model), build(model, Setting(rank=rank, stage=1, wire=torch.bfloat16))
    rig.step(partial(straight, rig.model, x(0)))
    expected = build(plain, Setting(rank=rank))
    expected.step(partial(straight, plain, x(0)))
    for ours, theirs in zip(rig.buckets, expected.buckets, strict=True):
        assert torch.equal(ours.grads[ours.shard], theirs.grads[theirs.shard].bfloat16().float())


def test_bf16_gradients_are_summed_in_fp32() -> None:
    rig = build(Stack(), Setting(dtype="bfloat16"))
    losses = [partial(straight, rig.model, x(seed).bfloat16()) for seed in range(4)]
    singles = []
    for loss in losses:
        rig.step(loss)
        singles.append(rig.grads())
    rig.step(*losses)
    for name, grad in rig.grads().items():
        total = singles[0][name] + singles[1][name] + singles[2][name] + singles[3][name]
        assert grad.dtype == torch.float32 and torch.equal(grad, total)
        assert not torch.equal(grad, grad.bfloat16().float()), "the sum must keep more bits than bf16 has"


# what other ranks have a part in


class Sums(RecordingBackend):
    """Remembers the sums over stages; adds 1 to each, as a peer that owns the parameter too would."""

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        tensor.add_(1)
        return lambda: None


@pytest.mark.parametrize("stage", [0, 1])
def test_late_buckets_wait_for_finish_and_are_summed_around_their_reduction(stage: int) -> None:
    plain, model = Stack(), Stack()
    names = [name for name, _ in model.named_parameters()]
    marks: dict[str, dict[str, Any]] = {names[-1]: {"partial": True}, names[1]: {"ties": (0, 2)}}
    setting = Setting(ranks=1, stage=stage)
    items = [
        Item(name=name, shape=tuple(p.shape), dtype="float32", **marks.get(name, {}))
        for name, p in model.named_parameters()
    ]
    layout = build_layout(items, 1, 1)
    parameters = dict(model.named_parameters())
    buckets = allocate(layout, parameters, Ownership(0, 1, stage > 0), torch.device("cpu"))
    grid = Grid(pp=3)
    comm, seen = Comm(grid, Sums(grid)), []

    def double(grads: Mapping[str, Tensor]) -> None:
        seen.append(sorted(grads))
        for grad in grads.values():
            grad.mul_(2)

    reducer = GradientReducer(ReducerSetup(buckets, parameters, comm, setting.wire, double), scatter=stage > 0)
    rig = Rig(model, comm, layout, buckets, reducer)
    for number in range(2):  # the second step reduces while backward runs
        rig.step(partial(straight, model, x(number)), partial(straight, model, x(number + 5)))
        expected = plain_grads(plain, partial(straight, plain, x(number)), partial(straight, plain, x(number + 5)))
        got = rig.grads()
        for name, grad in expected.items():
            wanted = 2 * grad if "partial" in marks.get(name, {}) else grad + ("ties" in marks.get(name, {}))
            torch.testing.assert_close(got[name], wanted)
    assert seen == [[names[-1]]] * 2
    assert [(row.axis, row.label, row.calls) for row in comm.tally.rows()] == [("pp", "ties", 2)]
