"""Our own operators on parts: the kernel runs on each rank's part where it can, the reference's steps elsewhere."""

from importlib import import_module
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import activate, gated
from engine.kernels.ops.norm import Norm, add_norm, norm
from engine.kernels.ops.rotary import Rotary, rotary
from tests.kernels.interpreter import repair
from tests.parallel.tensor.global_tensor.rig import KINDS, Given, compare, normal

REFERENCE = Kernels("reference")
RMS, LAYER = Norm(1e-5, offset=1.0), Norm(1e-5, centered=True)


@pytest.fixture(autouse=True)
def interpreter() -> None:
    repair()


def x(kind: str = "blocks", dim: int = 1, seed: int = 0) -> Given:
    """[2, 24, 12], cut."""
    return Given(normal(2, 24, 12, seed=seed), {dim: kind})


def parameter(size: int, kind: str | None = None, seed: int = 3) -> Given:
    return Given(normal(size, seed=seed), {0: kind} if kind else None, parameter=True)


def norms(x: Any, w: Any, b: Any) -> list[Tensor]:
    return [norm(x, w, None, RMS, REFERENCE), norm(x, w, b, LAYER, REFERENCE)]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_over_a_whole_width_stay_with_their_rank(kind: str) -> None:
    found = compare(norms, {"x": x(kind), "w": parameter(12), "b": parameter(12)}, 2)
    assert not found[0].called and not found[0].gathers and found[0].partial == {"w", "b"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [True, False])
def test_norms_over_a_cut_width_sum_their_statistics(kind: str, cut: bool) -> None:
    given = {"x": Given(normal(2, 5, 24), {2: kind})}
    given |= {name: parameter(24, kind if cut else None) for name in ("w", "b")}
    found = compare(norms, given, 2, bound=1e-8)
    assert all(call.shape == (2, 5, 1) for call in found[0].called)
    assert not found[0].gathers and found[0].partial == (set() if cut else {"w", "b"})


@pytest.mark.parametrize("residual", ["alike", "plain", "cut otherwise", "broadcast"])
def test_sum_and_norm(residual: str) -> None:
    other = {
        "alike": x(seed=1),
        "plain": Given(normal(2, 24, 12, seed=1)),
        "cut otherwise": x(dim=2, seed=1),
        "broadcast": Given(normal(12, seed=1)),
    }[residual]

    def program(x: Any, r: Any, w: Any, b: Any) -> list[Tensor]:
        return [*add_norm(x, r, (w, None), RMS, REFERENCE), *add_norm(r, x, (w, b), LAYER, REFERENCE)]

    found = compare(program, {"x": x(), "r": other, "w": parameter(12), "b": parameter(12)}, 2, bound=1e-8)
    if residual != "cut otherwise":
        assert not found[0].gathers and found[0].partial == {"w", "b"}
    if residual == "alike":
        assert not found[0].called


def test_sum_and_norm_over_a_cut_width() -> None:
    given = {"x": x(dim=2), "r": x(dim=2, seed=1), "w": parameter(12, "blocks")}
    found = compare(lambda x, r, w: add_norm(x, r, (w, None), RMS, REFERENCE), given, 2, bound=1e-8)
    assert all(call.shape == (2, 24, 1) for call in found[0].called) and not found[0].gathers


@pytest.mark.parametrize("kind", KINDS)
def test_gated_and_activated_by_element(kind: str) -> None:
    def program(x: Any, up: Any, bias: Any, residual: Any) -> list[Tensor]:
        return [
            gated(x, up, "silu", REFERENCE),
            activate(x, bias, "gelu", REFERENCE, residual),
            activate(x, None, "relu2", REFERENCE),
        ]

    given = {"x": x(kind, 2), "up": x(kind, 2, seed=1), "bias": parameter(12, kind), "residual": x(kind, 2, seed=2)}
    found = compare(program, given, 2)
    assert not found[0].called and not found[0].gathers and not found[0].partial


def test_a_plain_bias_meets_cut_positions_and_its_gradient_is_partial() -> None:
    given = {"x": x(), "bias": parameter(12), "residual": Given(normal(2, 24, 12, seed=2))}
    found = compare(lambda x, bias, residual: activate(x, bias, "none", REFERENCE, residual), given, 2)
    assert found[0].partial == {"bias"} and not found[0].gathers


def angles(batch: int, positions: int, features: int, grad: bool = False) -> dict[str, Given]:
    turned = normal(batch, positions, features, seed=5)
    return {"cos": Given(turned.cos(), grad=grad), "sin": Given(turned.sin(), grad=grad)}


def turn(form: Rotary) -> Any:
    return lambda q, k, cos, sin: list(rotary(q, k, cos, sin, form, REFERENCE))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("form", [Rotary(), Rotary(interleaved=True, heads_dim=2)], ids=str)
@pytest.mark.parametrize("dim", ["heads", "positions", "sequences"])
def test_rotary_turns_what_a_rank_holds(dim: str, form: Rotary, batch: int) -> None:
    sizes = {"sequences": 6 if batch > 1 else 2, "heads": 6, "positions": 6, "features": 8}
    order = ("sequences", "heads", "positions", "features")
    if form.heads_dim == 2:
        order = ("sequences", "positions", "heads", "features")
    given = {
        name: Given(normal(*(sizes[one] for one in order), seed=seed), {order.index(dim): "blocks"})
        for seed, name in enumerate("qk")
    }
    found = compare(turn(form), given | angles(sizes["sequences"] if batch > 1 else 1, 6, 4), 2)
    assert not found[0].called and not found[0].gathers


def test_rotary_of_plain_keys_beside_cut_queries() -> None:
    given = {"q": Given(normal(2, 6, 5, 8), {1: "blocks"}), "k": Given(normal(2, 1, 5, 8))}
    found = compare(turn(Rotary()), given | angles(1, 5, 8), 2)
    assert found[0].sets[1] is None and not found[0].called


def test_rotary_of_what_is_cut_otherwise_takes_the_steps_of_the_reference() -> None:
    alone = {"q": Given(normal(2, 6, 6, 8), {2: "blocks"}), "k": Given(normal(2, 6, 6, 8, seed=1), {1: "blocks"})}
    assert not compare(turn(Rotary()), alone | angles(1, 6, 8), 2)[0].gathers
    learned = {name: Given(normal(2, 6, 6, 8, seed=2), {1: "blocks"}) for name in "qk"}
    assert not compare(turn(Rotary()), learned | angles(1, 6, 8, grad=True), 2)[0].gathers


@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_kernels_run_on_parts(mode: Literal["reference", "triton"], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, launched = Kernels(mode), set()
    for name in ("norm.norm_forward", "activations.gated_forward", "activations.activation_forward", "rotary.turn"):
        path = f"engine.kernels.gpu.{name}"
        own = import_module(path.rpartition(".")[0]).__dict__[path.rpartition(".")[2]]

        def spy(*given: Any, name: str = name, own: Any = own) -> Any:
            launched.add(name)
            return own(*given)

        monkeypatch.setattr(path, spy)

    def program(x: Any, w: Any) -> Tensor:
        h, stream = add_norm(x, x, (w, None), RMS, kernels)
        h = gated(h, activate(stream, w, "gelu", kernels), "silu", kernels)
        heads = norm(h, w, None, RMS, kernels).view(2, 6, 3, 4).transpose(1, 2)
        turned = torch.ones(1, 6, 4)
        q, k = rotary(heads, heads, turned, turned, Rotary(), kernels)
        return q * k

    given = {"x": Given(normal(2, 6, 12).float(), {1: "blocks"}), "w": Given(normal(12).float(), parameter=True)}
    found = compare(program, given, 2, bound=1e-5)
    assert found[0].partial == {"w"} and not found[0].gathers
    assert len(launched) == (4 if mode == "triton" else 0)
