"""Fused operators: a plain call in eager mode, one named node wherever somebody looks at operators."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.dispatch import FusedOperator, fused_operator


@fused_operator("trine_test::double")
def _double(x: Tensor, scale: float) -> Tensor:
    return x.detach() * scale


@fused_operator("trine_test::triple")
def _triple(x: Tensor) -> Tensor:
    return x.detach() * 3


@fused_operator("trine_test::fill", mutates=("x",))
def _fill(x: Tensor) -> None:
    x.data.fill_(7)


@_double.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.scale = inputs[1]


_double.register_autograd(lambda ctx, dy: (_triple(dy) / 3 * ctx.scale, None), setup_context=_keep)


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail any call that goes through torch's dispatcher by the operator's name."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("dispatched")

    for operator in (_double, _triple, _fill):
        monkeypatch.setattr(operator, "registered", refuse)


@pytest.mark.usefixtures("no_dispatch")
@pytest.mark.parametrize("wanted", [False, True])
def test_eager_calls_and_their_backward_pass_no_dispatcher(wanted: bool) -> None:
    x = torch.ones(3, requires_grad=wanted)
    y = _double(x, 5.0)
    assert y.tolist() == [5.0] * 3 and y.requires_grad == wanted
    if wanted:
        y.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None and x.grad.tolist() == [5.0] * 3


@pytest.mark.parametrize("operator", [_double, _triple])
def test_a_dispatch_mode_sees_the_name(operator: FusedOperator[Tensor]) -> None:
    with Names() as names:
        operator(torch.ones(2), *([2.0] if operator is _double else []))
    assert f"trine_test.{'double' if operator is _double else 'triple'}.default" in names.seen


def test_meta_and_fake_tensors_get_the_registered_shapes() -> None:
    assert _double(torch.empty(4, device="meta"), 2.0).shape == (4,)
    with torch._subclasses.FakeTensorMode():
        assert isinstance(_double(torch.empty(4), 2.0), torch._subclasses.FakeTensor)


def test_the_compiler_sees_one_node_and_gives_the_eager_values() -> None:
    x = torch.randn(5, requires_grad=True)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda x: _double(x, 3.0) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), _double(x, 3.0) + 1)
    assert any("trine_test" in name and "double" in name for name in graphs)


def test_a_second_derivative_is_refused_and_not_zero() -> None:
    x = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad(_double(x, 2.0).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="triple"):
        slope.sum().backward()  # type: ignore[no-untyped-call]


def test_a_write_changes_the_version_that_autograd_compares() -> None:
    weight, x = torch.ones(2, requires_grad=True), torch.ones(2)
    y = weight * x  # saves x
    _fill(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()  # type: ignore[no-untyped-call]


def test_a_tensor_that_a_transform_has_left_behind_keeps_its_gradient() -> None:
    left: list[Tensor] = []
    outer = torch.ones(2, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        left.append(outer * x.detach())
        return x.sum()

    torch.func.grad(inner)(torch.full((2,), 3.0))
    _double(left[0], 5.0).sum().backward()  # type: ignore[no-untyped-call]
    assert outer.grad is not None and outer.grad.tolist() == [15.0] * 2
