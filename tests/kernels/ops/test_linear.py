"""Fused linear layers: the reference against float64, the interpreted kernels against eager torch's error."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import dispatch
from engine.kernels.dispatch import Kernels, Mode, TunedChoice
from engine.kernels.ops import linear as linear_ops
from engine.kernels.ops.activations import ACTIVATIONS, Activation
from engine.kernels.ops.linear import LinearForm, add_product_, linear, product
from tests.kernels.error import check_error
from tests.kernels.registered import check_operator
from tests.selection import wide

DTYPES = (torch.float32, wide(torch.float16), torch.bfloat16)
TRITON = Kernels("triton")


def made(shape: tuple[int, ...], outputs: int, dtype: torch.dtype, transposed: bool = False) -> list[Tensor]:
    """x, weight, bias, residual."""
    generator = torch.Generator().manual_seed(outputs)
    weight = (shape[-1], outputs) if transposed else (outputs, shape[-1])
    sizes = (shape, weight, (outputs,), (*shape[:-1], outputs))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def eager(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, form: LinearForm) -> Tensor:
    """As models write it."""
    y = ACTIVATIONS[form.activation](functional.linear(x, weight.t() if form.transposed else weight, bias))
    return y if residual is None else residual + y


def pair(form: LinearForm, mode: Mode, names: tuple[str, ...]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Ours and eager torch's, of x, weight and what ``names`` says."""

    def ours(x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        named = dict(zip(names, more, strict=True))
        return linear(x, weight, named.get("bias"), form, Kernels(mode), named.get("residual"))

    def theirs(x: Tensor, weight: Tensor, *more: Tensor) -> Tensor:
        named = dict(zip(names, more, strict=True))
        return eager(x, weight, named.get("bias"), named.get("residual"), form)

    return ours, theirs


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_at_most_twice_eager_torchs(dtype: torch.dtype, activation: Activation, mode: Mode) -> None:
    x, weight, bias, _ = made((2, 9, 24), 40, dtype)
    check_error(*pair(LinearForm(activation), mode, ("bias",)), [x, weight, bias])


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_relu_has_the_sign_of_the_sum_before_it_is_rounded(forward: bool, residual: bool) -> None:
    """The product 257 is 256 in bf16, so with a bias of -256 the input of relu is 1, or 0 if both are rounded."""
    x, weight = torch.ones(1, 8), torch.tensor([128.0, 128.0, 1.0, *[0.0] * 5]).repeat(8, 1)
    given = [t.bfloat16().requires_grad_() for t in (x, weight, torch.full((8,), -256.0))]
    rows = (("linear", forward), ("linear_backward", forward), ("activation", True))
    kernels = Kernels("auto", tuple(TunedChoice(name, "cpu", "*", 1, triton) for name, triton in rows))
    added = torch.zeros(1, 8, dtype=torch.bfloat16) if residual else None
    y = linear(given[0], given[1], given[2], LinearForm("relu"), kernels, added)
    slopes = torch.autograd.grad(y.sum(), given)
    assert y.eq(1).all() and slopes[1].eq(1).all() and slopes[2].eq(1).all(), (y, slopes)


@pytest.mark.parametrize(("precision", "dtype", "chosen"), [
    ("highest", torch.float32, False), ("high", torch.float32, True), ("highest", torch.bfloat16, True),
])  # fmt: skip
def test_products_of_full_fp32_are_the_librarys_on_a_gpu(
    precision: str, dtype: torch.dtype, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "compiles_triton", lambda device: True)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    kernels = Kernels("triton")
    x = torch.zeros(2, 16, dtype=dtype)
    assert [kernels.triton(name, x, 16) for name in ("linear", "linear_backward", "norm")] == [chosen, chosen, True]


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("names", [(), ("residual",), ("bias", "residual")], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_residual_and_bias_may_be_left_out_and_the_weight_transposed(
    transposed: bool, names: tuple[str, ...], mode: Mode
) -> None:
    for activation, dtype in (("none", torch.bfloat16), ("relu", torch.float32)):
        x, weight, *rest = made((1, 24), 16, dtype, transposed)
        more = [given for name, given in zip(("bias", "residual"), rest, strict=True) if name in names]
        form = LinearForm(activation, transposed)  # type: ignore[arg-type]
        check_error(*pair(form, mode, names), [x, weight, *more])


def test_reference_has_the_gradients_of_finite_differences() -> None:
    given = [t.double().requires_grad_() for t in made((3, 4), 5, torch.float64)]
    for activation in get_args(Activation):

        def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, kind: Activation = activation) -> Tensor:
            return linear(x, weight, bias, LinearForm(kind), Kernels("reference"), residual)

        assert torch.autograd.gradcheck(run, given)


def gradients(form: LinearForm, kernels: Kernels, given: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in given]
    y = linear(leaves[0], leaves[1], leaves[2], form, kernels)
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, noise)]


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (False, False)])
def test_the_table_decides_forward_and_backward_apart(
    forward: bool, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.kernels.gpu import matmul as launches

    launched: list[bool] = []
    own = launches.launch_matmul

    def multiply(a: Tensor, b: Tensor, follows: Any, *more: Any) -> Any:
        launched.append(follows.bias is not None)
        return own(a, b, follows, *more)

    monkeypatch.setattr(launches, "launch_matmul", multiply)
    rows = (TunedChoice("linear", "cpu", "*", 1, forward), TunedChoice("linear_backward", "cpu", "*", 1, backward))
    given = made((5, 16), 24, torch.float32)[:3]
    found = gradients(LinearForm("gelu"), Kernels("auto", rows), given)
    assert launched == [True] * forward + [False, False] * backward
    for ours, theirs in zip(found, gradients(LinearForm("gelu"), Kernels("reference"), given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


ODD = {
    "inputs": ((3, 10), 16),
    "outputs": ((3, 16), 12 - 1),
    "no row": ((0, 16), 16),
    "no input": ((3, 0), 16),
    "no output": ((3, 16), 0),
    "double": ((3, 16), 16),
}


@pytest.mark.parametrize("what", ODD)
def test_what_fits_no_kernel_is_the_reference_to_the_bit(what: str) -> None:
    shape, outputs = ODD[what]
    given = made(shape, outputs, torch.float64 if what == "double" else torch.float16)[:3]
    form = LinearForm("silu")
    both = zip(gradients(form, TRITON, given), gradients(form, Kernels("reference"), given), strict=True)
    assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize("shapes", [((3, 16), (24, 32)), ((3, 16), (24, 16, 1)), ((16,), (24, 8))], ids=str)
def test_sizes_that_do_not_agree_are_torchs_error(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(RuntimeError):
        linear(torch.ones(shapes[0]), torch.ones(shapes[1]), None, LinearForm(), TRITON)
    with pytest.raises(RuntimeError):
        product(torch.ones(3, 16), torch.ones(24, 32), TRITON)


def test_the_reference_is_torchs_own_layer_to_the_bit() -> None:
    x, weight, bias, _ = made((2, 9, 24), 40, torch.float32)
    found = linear(x, weight, bias, LinearForm(), Kernels("reference"))
    assert torch.equal(found, functional.linear(x, weight, bias))


def test_inputs_may_lie_in_any_way() -> None:
    x, weight, bias, residual = made((6, 5, 16), 24, torch.float32)
    plain = linear(x, weight, bias, LinearForm("gelu"), TRITON, residual)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, residual)]
    shifted = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape)
    assert shifted.data_ptr() % 16
    assert torch.equal(linear(turned[0], shifted, bias, LinearForm("gelu"), TRITON, turned[1]), plain)
    lying_across = weight.t().contiguous().t()
    assert torch.equal(linear(x, lying_across, bias, LinearForm("gelu"), TRITON, residual), plain)


def test_a_residual_of_another_dtype_or_shape_is_added_as_torch_would() -> None:
    x, weight, bias, residual = made((4, 3, 16), 8, torch.bfloat16)
    for other in (residual.float(), residual[:1]):
        y = linear(x, weight, bias, LinearForm(), TRITON, other)
        expected = linear(x, weight, bias, LinearForm(), TRITON) + other
        assert torch.equal(y, expected) and y.dtype == expected.dtype


def test_under_autocast_its_dtype() -> None:
    x, weight, bias, _ = made((4, 16), 24, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(LinearForm("relu"), TRITON, [x, weight, bias])
    narrow = [t.bfloat16() for t in (x, weight, bias)]
    expected = gradients(LinearForm("relu"), TRITON, narrow)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(found, expected, strict=True))


KEPT = {("none", False): 0, ("relu", False): 1, ("relu", True): 1, ("gelu", False): 1, ("relu2", True): 1}


@pytest.mark.parametrize(("activation", "residual"), KEPT)
def test_only_what_a_slope_needs_is_kept(activation: Activation, residual: bool) -> None:
    x, weight, bias, more = made((4, 16), 24, torch.float32)
    saved: list[Tensor] = []
    x.requires_grad_()

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = linear(x, weight, bias, LinearForm(activation), TRITON, more if residual else None)
    wide = [t for t in saved if t.shape == y.shape]
    assert len(wide) == KEPT[activation, residual]
    # a ReLU without a residual keeps its result, which is there anyhow
    own = [t for t in wide if t.data_ptr() != y.data_ptr()]
    assert len(own) == (0 if (activation, residual) == ("relu", False) else len(wide))
    saved.clear()
    with torch.no_grad():
        linear(x, weight, bias, LinearForm(activation), TRITON)
    assert not saved


@pytest.mark.parametrize("activation", ["none", "gelu", "silu"])
def test_what_is_not_finite_stays_in_its_row(activation: Activation) -> None:
    x, weight, bias, _ = made((4, 16), 24, torch.float32)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    form = LinearForm(activation)
    y, expected = linear(x, weight, bias, form, TRITON), linear(x, weight, bias, form, Kernels("reference"))
    assert torch.equal(y.isfinite(), expected.isfinite())
    torch.testing.assert_close(y[[0, 3]], expected[[0, 3]])


def test_same_bits_twice() -> None:
    given = made((37, 24), 40, torch.bfloat16)[:3]
    both = zip(*(gradients(LinearForm("gelu"), TRITON, given) for _ in range(2)), strict=True)
    assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_a_backward(dtype: torch.dtype) -> None:
    x, weight, _, dy = made((3, 7, 24), 40, dtype)
    exact = dy.double() @ weight.double()
    for ours in (product(dy, weight, TRITON), product(dy, weight.t().contiguous().t(), TRITON)):
        eagers = dy @ weight
        assert ours.dtype == eagers.dtype
        allowed = max(4 * float((eagers - exact).square().mean()), 1e-13)
        assert float((ours - exact).square().mean()) <= allowed
    flat_dy, flat_x = dy.reshape(-1, 40), x.reshape(-1, 24)
    torch.testing.assert_close(product(flat_dy.t(), flat_x, TRITON), flat_dy.t() @ flat_x)
    assert torch.equal(product(dy, weight, Kernels("reference")), dy @ weight)


def test_a_weight_gradient_is_added_to_a_main_gradient_of_fp32() -> None:
    x, _, _, dy = made((21, 24), 40, torch.bfloat16)
    start = torch.randn(40, 24)
    main = start.clone()
    add_product_(main, dy.t(), x, TRITON)
    exact = start.double() + dy.double().t() @ x.double()
    assert (main - exact).abs().max() < 1e-5, "what bf16 cannot hold is kept"
    rounded = start.clone()
    add_product_(rounded, dy.t(), x, Kernels("reference"))
    assert (rounded - exact).abs().max() < 0.1
    narrow = start.bfloat16()
    add_product_(narrow, dy.t(), x, TRITON)
    expected = start.bfloat16().double() + dy.double().t() @ x.double()
    torch.testing.assert_close(narrow.double(), expected, rtol=2**-8, atol=1e-5)


def test_operators_are_registered_as_torch_wants_it() -> None:
    x, weight, bias, residual = (t.requires_grad_() for t in made((5, 16), 24, torch.float32))
    matrix = weight.detach().t().requires_grad_()
    check = partial(check_operator, atol=1e-4, rtol=1e-4)
    check(torch.ops.trine.linear.default, (x, matrix, bias, residual, "gelu", True, True))
    check(torch.ops.trine.linear.default, (x, matrix, bias, None, "none", False, False))
    check(torch.ops.trine.library_linear.default, (x, matrix, bias))
    plain = [t.detach() for t in (x, weight, residual)]
    check(torch.ops.trine.product.default, (plain[2], plain[1]))
    check(torch.ops.trine.add_product.default, (torch.zeros(24, 16), plain[2].t(), plain[0]))


class _Calls(TorchDispatchMode):
    """The operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fresh", "operator"), [(True, "aten.mm.dtype_out"), (False, "aten.addmm.dtype_out")])
def test_a_fresh_wide_sum_is_one_operator_that_reads_no_zeros(
    monkeypatch: pytest.MonkeyPatch, fresh: bool, operator: str
) -> None:
    """On shapes, as a device has it whose library multiplies 16-bit matrices into fp32."""
    monkeypatch.setattr(linear_ops, "multiplies_wide", lambda device: True)
    monkeypatch.setattr(linear_ops, "_adds_wide", lambda device, dtype: True)
    total = torch.empty(8, 4, device="meta")
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 16), (16, 4)))
    with _Calls() as calls:
        linear_ops.add_by_library_(total, a, b, fresh)
    assert calls.names == [operator]


@pytest.mark.parametrize("operator", ["linear", "linear_backward"])
def test_products_ask_nothing_more_where_the_table_has_no_width_for_triton(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kernels.dispatch.runs_triton", lambda device: True)
    x = torch.ones(2, 64)
    rows = [TunedChoice(name, "cpu", "*", 1, triton=False) for name in ("linear", "linear_backward")]
    never = Kernels("auto", tuple(rows))
    assert never.for_products(x).mode == "reference"
    wide = Kernels("auto", (*rows, TunedChoice(operator, "cpu", "float32", 4096, triton=True)))
    assert wide.for_products(x) is wide, "another layer may be as wide"
    assert wide.for_products(x.bfloat16()).mode == "reference"
