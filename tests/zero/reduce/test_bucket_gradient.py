"""Products add weight gradients to the flat buckets: right sums, no gradient in between, told at the right moment."""

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from engine.kernels.dispatch import Kernels
from engine.kernels.ops import linear as products
from engine.kernels.ops.cross_entropy import CrossEntropy, Reduction
from engine.kernels.ops.linear import LinearForm, linear
from engine.kernels.ops.linear_cross_entropy import linear_cross_entropy
from engine.parallel.comm.backend import RecordingBackend, Wait
from engine.parallel.comm.comm import Comm
from engine.parallel.grid import Axis, Grid
from engine.zero.flat_buckets import Ownership
from engine.zero.reduce.microbatch_reducer import MicrobatchReducer
from engine.zero.reduce.reducer import Backward, ReducerSetup
from tests.kernels.interpreter import repair
from tests.zero.buckets import allocate
from tests.zero.rig import Rig, Setting, build, lay_out, plain_grads

Loss = Callable[["Products", Tensor], Tensor]
WIDTHS = (8, 28, 24, 12, 4)  # every weight has another size, so that a record names its bucket
LAYERS = len(WIDTHS) - 1


class Products(nn.Module):
    """Linear layers through the engine's operator, as the engine puts it on a model."""

    def __init__(self, kernels: Kernels, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = pairwise(WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs, bias) for inputs, outputs in sizes)
        self.kernels = kernels
        self.seen: Callable[[int, Tensor], object] = lambda number, y: None

    def product(self, number: int, x: Tensor) -> Tensor:
        layer: Any = self.layers[number]
        y = linear(x, layer.weight, layer.bias, LinearForm(), self.kernels)
        self.seen(number, y)
        return y

    def forward(self, x: Tensor) -> Tensor:
        for number in range(LAYERS):
            x = torch.tanh(self.product(number, x))
        return x


def x(seed: int) -> Tensor:
    return torch.randn(7, WIDTHS[0], generator=torch.Generator().manual_seed(seed))


def straight(model: Products, given: Tensor) -> Tensor:
    loss: Tensor = model(given).square().sum()
    return loss


def twice(model: Products, given: Tensor) -> Tensor:
    return straight(model, given) + 3 * straight(model, given + 1)


def recomputed(model: Products, given: Tensor) -> Tensor:
    out = checkpoint(model, given.clone().requires_grad_(), use_reentrant=False)
    assert isinstance(out, Tensor)
    return out.square().sum()


def read_too(model: Products, given: Tensor) -> Tensor:
    """The weights are also read as they are, as an embedding reads the weight of its head."""
    total = straight(model, given)
    for layer in model.layers:
        weight: Any = layer.weight
        total = total + weight[1].sum()
    return total


def some(model: Products, given: Tensor) -> Tensor:
    return model.product(0, given).square().sum()


def rig_for(setting: Setting = Setting(), bias: bool = False) -> tuple[Rig, Products]:  # noqa: B008
    """A model whose products add to the buckets of a reducer, and an equal one without."""
    kernels = Kernels("reference")
    model = Products(kernels, bias)
    plain = deepcopy(model)
    plain.kernels = Kernels("reference")
    setting = Setting(setting.ranks, setting.rank, setting.stage, setting.bucket_elements, main=kernels.main)
    return build(model, setting), plain


def assert_same(rig: Rig, plain: Products, *losses: tuple[Loss, Tensor]) -> None:
    model: Any = rig.model
    for _, given in losses:
        assert not given.requires_grad
    for index, (loss, given) in enumerate(losses):
        value = loss(model, given)
        with rig.reducer.backward(Backward(last=index == len(losses) - 1)):
            torch.autograd.backward(value)
    rig.reducer.finish()
    expected = plain_grads(plain, *(partial(loss, plain, given) for loss, given in losses))
    got = rig.grads()
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, msg=partial("{}: {}".format, name))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bucket_elements", [1, 600])
@pytest.mark.parametrize("loss", [straight, twice, recomputed, read_too])
@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_those_of_autograd(loss: Loss, bucket_elements: int, bias: bool) -> None:
    rig, plain = rig_for(Setting(bucket_elements=bucket_elements), bias)
    for seed in range(3):
        assert_same(rig, plain, (loss, x(seed)), (loss, x(seed + 7)))
    assert rig.issued() == rig.sizes() * 3
    assert_same(rig, plain, (some, x(1)))
    assert_same(rig, plain, (some, x(1)), (loss, x(2)))


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensors of the given sizes that operations make in memory outside ``known`` storages."""

    def __init__(self, sizes: set[int], known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes, self.known, self.made = sizes, known, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() in self.sizes and not _lies_in(out, self.known):
            self.made += 1
        return out


def _lies_in(tensor: Tensor, known: set[int]) -> bool:
    return tensor.untyped_storage().data_ptr() in known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_no_weight_gradient_is_made(stage: int, dtype: str) -> None:
    kernels = Kernels("reference")
    model = Products(kernels)
    rig = build(model, Setting(stage=stage, dtype=dtype, bucket_elements=10**6, main=kernels.main))
    known = {t.untyped_storage().data_ptr() for flat in rig.buckets for t in (flat.grads, flat.params)}
    sizes = {p.numel() for p in model.parameters()}
    assert len(sizes) == LAYERS
    for step in range(2):
        for index in range(3):
            loss = straight(model, x(step + index).to(getattr(torch, dtype)))
            with rig.reducer.backward(Backward(last=index == 2)), Made(sizes, known) as made:
                torch.autograd.backward(loss)
            assert made.made == 0
        rig.reducer.finish()
    assert all(bool(grad.any()) for grad in rig.grads().values())
    rig.reducer.watch(True)
    for value, expected in ((1.0, False), (float("inf"), True)):
        loss = straight(model, x(9).to(getattr(torch, dtype)) * value)
        with rig.reducer.backward(Backward(last=True)):
            torch.autograd.backward(loss)
        rig.reducer.finish()
        assert rig.reducer.found_nonfinite() is expected


def test_an_observer_is_shown_gradients() -> None:
    rig, plain = rig_for()
    assert_same(rig, plain, (straight, x(0)))
    seen: dict[str, Tensor] = {}
    rig.reducer.observe(lambda name, grad: seen.update({name: grad.clone()}))
    assert_same(rig, plain, (straight, x(1)))
    expected = plain_grads(plain, partial(straight, plain, x(1)))
    assert seen.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(seen[name], grad)


def test_a_backward_of_the_users_own_may_go_through_several_forwards() -> None:
    rig, plain = rig_for()
    assert_same(rig, plain, (straight, x(0)))
    values = []
    for seed in (1, 2):
        values.append(straight(rig.model, x(seed)))  # type: ignore[arg-type]
    with rig.reducer.backward(Backward(last=True)):
        torch.autograd.backward(values[0] + values[1])
    rig.reducer.finish()
    expected = plain_grads(plain, *(partial(straight, plain, x(seed)) for seed in (1, 2)))
    for name, grad in rig.grads().items():
        torch.testing.assert_close(grad, expected[name])


class Events(RecordingBackend):
    """Notes when a bucket is sent."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.noted: list[tuple[str, int]] = []
        self.layers: dict[int, int] = {}

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        self.noted.append(("reduce", self.layers[full.numel()]))
        return super().reduce_scatter(shard, full, axis)

    def watch(self, number: int, y: Tensor) -> None:
        """Note when the backward of the layer that has made ``y`` begins, and when its node ends."""
        product: Any = y.grad_fn
        product.register_prehook(lambda *_: self.noted.append(("begin", number)))
        product.register_hook(lambda *_: self.noted.append(("end", number)))


def events_of(loss: Loss) -> list[tuple[str, int]]:
    """What happens in the backward of the second step, with a bucket for each layer."""
    kernels, backends = Kernels("reference"), list[Events]()
    model = Products(kernels)

    def backend(grid: Grid) -> Events:
        backends.append(Events(grid))
        return backends[0]

    rig = build(model, Setting(stage=1, main=kernels.main), backend)
    (noted,) = backends
    noted.layers = {size: LAYERS - 1 - index for index, size in enumerate(rig.sizes())}
    assert len(noted.layers) == LAYERS
    for _ in range(2):
        noted.noted.clear()
        model.seen = noted.watch
        value = loss(model, x(1))
        with rig.reducer.backward(Backward(last=True)):
            torch.autograd.backward(value)
        found = list(noted.noted)
        rig.reducer.finish()
    return found


def test_a_bucket_is_sent_behind_its_last_product_and_before_the_layer_below() -> None:
    expected = [(what, layer) for layer in reversed(range(LAYERS)) for what in ("begin", "end", "reduce")]
    assert events_of(straight) == expected


@pytest.mark.parametrize("loss", [twice, read_too])
def test_a_weight_of_several_uses_is_told_after_all_of_them(loss: Loss) -> None:
    found = events_of(loss)
    for layer in range(LAYERS):
        sent = found.index(("reduce", layer))
        assert found.count(("reduce", layer)) == 1
        assert all(index < sent for index, event in enumerate(found) if event == ("end", layer))
        if layer and loss is read_too:
            assert sent < found.index(("begin", layer - 1)), "before the layer below"


def test_a_second_use_that_comes_later_is_waited_for() -> None:
    rig, plain = rig_for()
    for loss in (straight, straight, twice, straight, twice):
        assert_same(rig, plain, (loss, x(1)), (loss, x(2)))


def test_a_weight_that_was_not_multiplied_before_is_not_told_early() -> None:
    """As of tasks that take turns: the first steps read the weights without a product, or do not use them at all."""

    def read(model: Products, given: Tensor) -> Tensor:
        total = some(model, given)
        for layer in list(model.layers)[1:]:
            weight: Any = layer.weight
            total = total + weight[1].sum()
        return total

    def both(model: Products, given: Tensor) -> Tensor:
        return straight(model, given) + read(model, given)

    rig, plain = rig_for()
    for loss in (some, read, both, read, straight):
        assert_same(rig, plain, (loss, x(1)), (loss, x(2)))


def test_another_use_that_no_product_has_may_come_later() -> None:
    """As of a penalty on the weights that sets in after some steps, or comes in every tenth."""
    rig, plain = rig_for()
    for loss in (straight, read_too, straight, read_too):
        assert_same(rig, plain, (loss, x(0)))


def test_hooks_of_the_users_see_their_gradient_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    rig, plain = rig_for()
    seen: list[Tensor] = []
    hooked: Any = rig.model.layers[1].weight  # type: ignore[index, union-attr]
    hooked.register_hook(lambda grad: seen.append(grad.clone()))
    with caplog.at_level(logging.WARNING, logger="trine"):
        assert_same(rig, plain, (straight, x(0)), (straight, x(1)))
        assert_same(rig, plain, (straight, x(2)))
    expected = plain_grads(plain, partial(straight, plain, x(2)))["layers.1.weight"]
    assert len(seen) == 3
    torch.testing.assert_close(seen[2], expected)
    told = [record.getMessage() for record in caplog.records if "register_hook" in record.getMessage()]
    assert len(told) == 1 and "'layers.1.weight' has a hook" in told[0]


def test_gradients_outside_a_step_are_made() -> None:
    rig, plain = rig_for()
    assert_same(rig, plain, (straight, x(0)))
    loss = straight(rig.model, x(1))  # type: ignore[arg-type]
    weights = list(rig.model.parameters())
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    expected = plain_grads(plain, partial(straight, plain, x(1)))
    for grad, name in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.detach(), expected[name])
    second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), weights)  # type: ignore[arg-type]
    assert all(bool(grad.any()) for grad in second)
    torch.autograd.backward(straight(rig.model, x(1)))  # type: ignore[arg-type]
    for name, parameter in rig.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])
    assert rig.issued() == rig.sizes()


def test_a_frozen_weight_gets_nothing_and_its_layer_still_passes_gradients_on() -> None:
    rig, plain = rig_for()
    for model in (rig.model, plain):
        model.layers[2].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    rig.step(partial(straight, rig.model, x(0)))  # type: ignore[arg-type]
    expected = plain_grads(plain, partial(straight, plain, x(0)))
    got = rig.grads()
    assert not got["layers.2.weight"].any()
    assert "layers.2.weight" in rig.reducer.unused
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad)


def test_after_the_end_products_make_their_gradients_again() -> None:
    rig, plain = rig_for()
    assert_same(rig, plain, (straight, x(0)))
    rig.reducer.remove()
    torch.autograd.backward(straight(rig.model, x(1)))  # type: ignore[arg-type]
    expected = plain_grads(plain, partial(straight, plain, x(1)))
    for name, parameter in rig.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("loss", [straight, twice, recomputed, read_too])
def test_shards_of_each_microbatch_too(loss: Loss) -> None:
    kernels = Kernels("reference")
    model = Products(kernels, bias=True)
    plain = deepcopy(model)
    plain.kernels = Kernels("reference")
    layout, named = lay_out(model, Setting()), dict(model.named_parameters())
    buckets = allocate(layout, named, Ownership(0, 2, True, True), torch.device("cpu"))
    comm = Comm(Grid(dp=2), RecordingBackend(Grid(dp=2)))
    reducer = MicrobatchReducer(ReducerSetup(buckets, named, comm, main=kernels.main), 2)
    for step in range(3):
        before = comm.tally.copy()
        for index in range(2):
            value = loss(model, x(2 * step + index))
            with reducer.backward(Backward(last=index == 1)):
                torch.autograd.backward(value)
        reducer.finish()
        (row,) = comm.tally.since(before).rows()
        assert (row.axis, row.label, row.calls) == ("dp", "gradients", 2 * len(buckets))
        expected = plain_grads(plain, *(partial(loss, plain, x(2 * step + index)) for index in range(2)))
        for flat in buckets:
            (slot,) = flat.bucket.slots
            whole = torch.zeros(flat.bucket.elements)
            whole[slot.start : slot.stop] = expected[slot.name].flatten()
            torch.testing.assert_close(flat.grads, whole[flat.shard])


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_the_chunks_of_a_loss_are_added_too(reduction: Reduction) -> None:
    """Scaled after the forward, or product by product where the backward recomputes them; a tied weight is summed."""

    def loss(model: Products, given: Tensor) -> Tensor:
        weight: Any = model.layers[0].weight
        target = torch.arange(7) % WIDTHS[1]
        losses = linear_cross_entropy(given, weight, None, target, CrossEntropy(reduction=reduction), model.kernels)
        return 3 * losses.sum() + 0.1 * straight(model, given)

    rig, plain = rig_for(Setting(bucket_elements=10**6))
    model: Any = rig.model
    known = {t.untyped_storage().data_ptr() for flat in rig.buckets for t in (flat.grads, flat.params)}
    for step in range(2):
        for index in range(2):
            value = loss(model, x(2 * step + index))
            with rig.reducer.backward(Backward(last=index == 1)), Made({WIDTHS[0] * WIDTHS[1]}, known) as made:
                torch.autograd.backward(value)
            assert made.made == 0
        rig.reducer.finish()
        expected = plain_grads(plain, *(partial(loss, plain, x(2 * step + index)) for index in range(2)))
        for name, grad in rig.grads().items():
            torch.testing.assert_close(grad, expected[name])


def test_kernels_add_in_their_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: one launch for each weight and microbatch, the first of a step without reading the bucket."""
    repair()
    kernels = Kernels("triton")
    model = Products(kernels, bias=True)
    rig, calls = build(model, Setting(stage=1, dtype="bfloat16", main=kernels.main)), list[tuple[torch.dtype, bool]]()
    plain = products._add_product

    def counted(into: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
        calls.append((into.dtype, fresh))
        plain(into, a, b, fresh)

    monkeypatch.setattr(products, "_add_product", counted)
    given = [x(seed).bfloat16() for seed in range(2)]
    aligned = [number for number in range(LAYERS) if not WIDTHS[number] * 2 % 16 and not WIDTHS[number + 1] * 2 % 16]
    model.layers = nn.ModuleList(layer for layer in model.layers)
    rig.step(*(partial(straight, model, one) for one in given))
    assert calls == [(torch.float32, True)] * len(aligned) + [(torch.float32, False)] * len(aligned)
