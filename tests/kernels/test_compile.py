"""torch.compile sees each operator as one node, without breaking its graph."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import activate, gated
from engine.kernels.ops.norm import Norm, add_norm, norm
from engine.kernels.ops.rotary import Rotary, rotary
from tests.selection import wide


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _rows(x: Tensor, w: Tensor, kernels: Kernels) -> Tensor:
    h, stream = add_norm(x, 2 * x, (w, None), Norm(1e-6, offset=1.0), kernels)
    return norm(h, w, w, Norm(1e-6, centered=True), kernels) + stream


def _gate(x: Tensor, w: Tensor, kernels: Kernels) -> Tensor:
    gate, up = (x * w).chunk(2, dim=-1)
    return gated(gate, up, "silu", kernels)


def _activation(x: Tensor, w: Tensor, kernels: Kernels) -> Tensor:
    return activate(x, w, "gelu_tanh", kernels, x)


def _rotary(x: Tensor, w: Tensor, kernels: Kernels) -> Tensor:
    heads = (x * w).view(2, 3, 2, 4).transpose(1, 2)
    angles = x.detach()[:, :, :4]
    q, k = rotary(heads, heads * 2, angles.cos(), angles.sin(), Rotary(), kernels)
    return q * k


PROGRAMS: dict[str, tuple[Callable[[Tensor, Tensor, Kernels], Tensor], set[str]]] = {
    "norms": (_rows, {"norm", "add_norm"}),
    "gated": (_gate, {"gated"}),
    "activation": (_activation, {"activate"}),
    "rotary": (_rotary, {"rotary"}),
}


@pytest.mark.parametrize("dynamic", [wide(False), True])
@pytest.mark.parametrize(("program", "operators"), PROGRAMS.values(), ids=PROGRAMS)
def test_operator_is_one_node_and_gives_what_eager_gives(
    program: Callable[[Tensor, Tensor, Kernels], Tensor], operators: set[str], dynamic: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, generator=generator, requires_grad=True)
    w = torch.randn(8, generator=generator, requires_grad=True)
    kernels = Kernels("triton")
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        y = function(x, w, kernels)
        return y, *torch.autograd.grad(y.square().sum(), (x, w))

    compiled = gradients(torch.compile(program, fullgraph=True, dynamic=dynamic, backend=backend))
    for one, other in zip(compiled, gradients(program), strict=True):
        torch.testing.assert_close(one, other)
    assert {name for name in operators if any(f"trine.{name}" in target for target in seen)} == operators, seen
