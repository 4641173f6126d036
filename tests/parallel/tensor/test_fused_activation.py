"""Cut layers with an activation of their own, and with kernels: the losses and gradients of one process."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.dispatch import Kernels, Mode
from engine.kernels.ops.activations import ACTIVATIONS, Activation
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.pipeline.runtime.split_backward import DeferredWeightGrads, SplitBackward
from engine.parallel.tensor.deferred_linear import FusedForward, fuse
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import Overlap, TensorAxis
from tests.kernels.interpreter import repair
from tests.parallel.tensor.models import build, tokens
from tests.parallel.tensor.plans import written_plan
from tests.parallel.tensor.sharded import assert_close, place

WIDTH, HIDDEN = 8, 16
LATE = Overlap(frozenset({"cpu"}), 0)
PLAN = {"up": "column", "down": "row"}


class Conv1D(nn.Module):
    """Hugging Face's linear layer."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 3), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


class Perceptron(nn.Module):
    """A pair of layers, whose activation lies between them or in the first."""

    def __init__(self, made: Callable[[int, int], nn.Module], activation: Activation) -> None:
        super().__init__()
        self.up, self.down, self.activation = made(WIDTH, HIDDEN), made(HIDDEN, WIDTH), activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(ACTIVATIONS[self.activation](self.up(x)))
        return y


@cache
def made(layer: str) -> Perceptron:
    torch.manual_seed(3)
    return Perceptron(nn.Linear if layer == "linear" else Conv1D, "none")


def make(layer: str, activation: Activation) -> Perceptron:
    """A copy: ranks are threads that share the generator."""
    model = deepcopy(made(layer))
    model.activation = activation
    return model


@pytest.fixture(autouse=True)
def prepared() -> None:
    repair()
    for layer in ("linear", "conv1d"):
        made(layer)


def given() -> Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(4)).requires_grad_()


def trained(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    assert x.grad is not None
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


def on_rank(axis: TensorAxis, layer: str, activation: Activation, mode: Mode, way: str) -> dict[str, Tensor]:
    """What this rank computes, gradients of parts in their places."""
    axis.kernels, axis.overlap = Kernels(mode), LATE if way == "late" else Overlap()
    model = make(layer, activation)
    plan = find_tensor_plan(model, PLAN, axis.size)
    apply_plan(model, plan, axis, ForwardPatches())
    fuse(model.up, activation, axis.kernels, ForwardPatches())
    model.activation = "none"
    waiting, leftover = (
        SplitBackward(model, ForwardPatches(), axis.kernels) if way == "waiting" else None,
        DeferredWeightGrads(),
    )
    if waiting is None:
        found = trained(model, given())
    else:
        with waiting.leaving(leftover):
            found = trained(model, given())
        assert not {"up.weight", "down.weight"} & found.keys()
        leftover.compute(found.__setitem__)
    for name, cut in plan.parameters.items():
        found[name] = place(found[name], cut, max(piece.stop for piece in cut.ranges), axis.index)
    return found


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("way", ["plain", "late", "waiting"])
@pytest.mark.parametrize("layer", ["linear", "conv1d"])
def test_an_activation_in_a_column_layer_changes_nothing(layer: str, way: str, mode: Mode) -> None:
    activation: Activation = "gelu_tanh" if layer == "conv1d" else "gelu"
    ranks = run_tensor_ranks(2, partial(on_rank, layer=layer, activation=activation, mode=mode, way=way))
    alone = trained(make(layer, activation), given())
    for name, expected in alone.items():
        parts = name in ("up.weight", "up.bias", "down.weight")
        for found in (ranks[0][name] + ranks[1][name],) if parts else (rank[name] for rank in ranks):
            assert_close(found, expected, name, bound=2e-6)


@pytest.mark.parametrize("way", ["plain", "late"])
def test_kernels_that_are_the_reference_give_the_same_bits_as_the_layers_own(way: str) -> None:
    def body(axis: TensorAxis, mode: Mode) -> dict[str, Tensor]:
        axis.kernels, axis.overlap = Kernels(mode), LATE if way == "late" else Overlap()
        model = make("linear", "relu")
        apply_plan(model, find_tensor_plan(model, PLAN, axis.size), axis, ForwardPatches())
        return trained(model, given())

    reference, auto = (run_tensor_ranks(2, partial(body, mode=mode)) for mode in ("reference", "auto"))
    for one, other in zip(reference, auto, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("layer", ["linear", "conv1d"])
def test_products_of_cut_layers_are_triton_kernels(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels.gpu import matmul as launches

    launched: list[tuple[int, ...]] = []
    own = launches.launch_matmul

    def multiply(a: Tensor, b: Tensor, *more: object) -> object:
        launched.append((*a.shape, b.shape[1]))
        return own(a, b, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(launches, "launch_matmul", multiply)
    run_tensor_ranks(2, partial(on_rank, layer=layer, activation="none", mode="triton", way="late"))
    rows, part = 8, HIDDEN // 2
    forward = [(rows, WIDTH, part), (rows, part, WIDTH)]
    backward = [(rows, WIDTH, part), (rows, part, WIDTH)]
    sides = [(WIDTH, rows, part), (part, rows, WIDTH)]
    assert sorted(map(sorted, launched)) == sorted(map(sorted, 2 * (forward + backward + sides)))


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("layer", ["linear", "conv1d"])
def test_an_uncut_layer_takes_its_activation_with_it(layer: str, mode: Mode) -> None:
    expected = trained(make(layer, "silu"), given())
    model = make(layer, "none")
    patches = ForwardPatches()
    fuse(model.up, "silu", Kernels(mode), patches)
    copied = deepcopy(model)
    for name, found in trained(copied, given()).items():
        assert_close(found, expected[name], name, bound=2e-6)
    assert all(p.grad is None for p in model.parameters()), "a copy has its own weights"
    patches.remove()
    plain = make(layer, "none")
    assert torch.equal(model(given()), plain(given())) and vars(model.up).keys() == vars(plain.up).keys()


def test_the_weight_gradient_of_a_fused_layer_can_wait() -> None:
    expected = trained(make("linear", "gelu"), given())
    model, leftover = make("linear", "none"), DeferredWeightGrads()
    fuse(model.up, "gelu", Kernels("triton"), ForwardPatches())
    patches = ForwardPatches()
    waiting = SplitBackward(model, patches, Kernels("triton"))
    with waiting.leaving(leftover):
        found = trained(model, given())
    assert not {"up.weight", "up.bias"} & found.keys()
    leftover.compute(found.__setitem__)
    for name, mine in found.items():
        assert_close(mine, expected[name], name, bound=2e-6)
    patches.remove()
    assert isinstance(model.up.forward, FusedForward)


def gpt2(axis: TensorAxis, whole: nn.Module, mode: Mode, overlap: Overlap) -> dict[str, Tensor]:
    """Body of a rank: gradients of GPT-2 on a stream that is cut, its activations in the layers before them."""
    axis.kernels, axis.overlap = Kernels(mode), overlap
    model = deepcopy(whole)
    apply_plan(model, find_tensor_plan(model, written_plan(model), axis.size, sequence=True), axis, ForwardPatches())
    if mode == "triton":
        perceptrons: list[Any] = [module for module in model.modules() if hasattr(module, "c_fc")]
        for perceptron in perceptrons:
            fuse(perceptron.c_fc, "gelu_tanh", axis.kernels, ForwardPatches())
            perceptron.act = nn.Identity()
    ids = tokens()
    torch.autograd.backward(nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten()))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.long
def test_rows_that_travel_in_pieces_meet_kernels_and_activations() -> None:
    whole, overlap = build("gpt2"), Overlap(frozenset({"cpu"}), 1)
    expected = run_tensor_ranks(2, partial(gpt2, whole=whole, mode="reference", overlap=overlap))
    found = run_tensor_ranks(2, partial(gpt2, whole=whole, mode="triton", overlap=overlap))
    for theirs, ours in zip(expected, found, strict=True):
        assert theirs.keys() == ours.keys()
        for name, grad in theirs.items():
            assert_close(ours[name], grad, name, bound=2e-5, floor=1e-3)
