"""Stacks of experts that a loop computes run as grouped products, and what only looks like one stays as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.kernels.dispatch import Kernels
from engine.kernels.ops import grouped_product as products
from engine.parallel.kernel_injection.expert_stacks import find_expert_stack
from engine.parallel.kernel_injection.inject import find_replacements
from engine.parallel.model.forward_patch import ForwardPatches
from tests.engine.parity.expert_runs import assert_equal, mixture, run
from tests.kernels.interpreter import repair
from tests.selection import wide

EXPERTS, HIDDEN, INNER = 5, 16, 32


class Loop(nn.Module):
    """A stack of experts of several forms, and of forms that are none."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.experts, self.apart = how, EXPERTS, how in ("apart", "no gate")
        sizes = [(HIDDEN, INNER if self.apart else 2 * INNER), (INNER, HIDDEN)]
        shapes = [size if how == "transposed" else size[::-1] for size in sizes]
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape) / 4) for shape in shapes)
        self.gate = nn.Parameter(torch.randn(EXPERTS, *shapes[0]) / 4) if how == "apart" else None

    def product(self, rows: Tensor, stack: Tensor, expert: int) -> Tensor:
        """Returns rows times the matrix of an expert."""
        return rows @ (stack[expert] if self.how == "transposed" else stack[expert].T)

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighed sums of the experts of each row."""
        y = torch.zeros_like(x)
        for expert in range(self.experts):
            row, slot = (numbers == expert).nonzero().unbind(1)
            up = self.product(x[row], self.up, expert)
            if self.gate is not None:
                up = functional.silu(self.product(x[row], self.gate, expert)) * up
            elif self.how == "no gate":
                up = functional.relu(up)
            else:
                gate, up = up.chunk(2, -1)
                gate, up = (up, gate) if self.how == "gate last" else (gate, up)
                gate = gate.clamp(max=7) if self.how == "clamped" else gate
                up = functional.silu(gate) * (up + (self.how == "shifted"))
            out = self.product(up, self.down, expert) * weights[row, slot, None]
            y = y.index_add(0, row, out.to(torch.float32 if self.how == "widens" else x.dtype))
            if self.how == "stops" and not len(row):
                break
        return y


class Sentinel(Loop):
    """Experts that give a row without an expert on as it is."""

    def forward(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns the weighed sums, and the rows themselves for numbers behind the last expert."""
        kept = (weights * (numbers == self.experts)).sum(1, keepdim=True)
        return super().forward(x, numbers, weights) + (x * kept).to(x.dtype)


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, numbers and weights; the last expert has no row, and two slots have no expert."""
    draw = torch.Generator().manual_seed(1)
    numbers = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(9)])
    numbers[2, 1] = numbers[5, 0] = EXPERTS
    return torch.randn(9, HIDDEN, generator=draw).to(dtype), numbers, torch.rand(9, 2, generator=draw).to(dtype)


def outcome(module: nn.Module, x: Tensor, numbers: Tensor, weights: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of rows, weights and parameters."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, numbers, weights)
    wanted = [x, weights, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y) * 0.5)]


@pytest.mark.parametrize("mode", ["reference", "triton"])
@pytest.mark.parametrize("how", ["", wide("gate last"), "transposed", wide("apart"), wide("no gate")])
def test_a_loop_over_experts_runs_as_grouped_products(how: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = Loop(how), list[int]()
    before = outcome(module, *given())
    ((found, put_on),) = find_replacements(module, Kernels(mode))
    assert found.operator == "experts"
    name = "grouped_product_reference" if mode == "reference" else "_grouped_product"
    own = getattr(products, name)

    def product(*args: Any) -> Any:
        calls.append(1)
        return own(*args)

    monkeypatch.setattr(products, name, product)
    patches = ForwardPatches()
    put_on(patches)
    after = outcome(module, *given())
    assert calls, "the products are the engine's"
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not after[-1][-1].any(), "an expert without rows has a gradient of zeros"
    assert module(*(each[:0] for each in given())).shape == (0, HIDDEN)
    patches.remove()
    assert all(map(torch.equal, outcome(module, *given()), before))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["reference", "triton"])
def test_narrow_rows_are_within_the_rounding_of_the_module_itself(mode: Any) -> None:
    repair()
    exact = outcome(Loop().double(), *given(torch.float64))
    module = Loop().bfloat16()
    before = outcome(module, *given(torch.bfloat16))
    for _, put_on in find_replacements(module, Kernels(mode)):
        put_on(ForwardPatches())
    for wanted, own, ours in zip(exact, before, outcome(module, *given(torch.bfloat16)), strict=True):
        assert (ours.double() - wanted).abs().max() <= 1.5 * (own.double() - wanted).abs().max() + 1e-3
        assert ours.dtype == own.dtype


@pytest.mark.parametrize("how", ["clamped", "shifted", wide("stops"), "widens"])
def test_other_loops_stay_as_they_are(how: str) -> None:
    assert find_expert_stack(Loop(how)) is None


def test_a_module_that_answers_rows_without_an_expert_stays_as_it_is() -> None:
    assert find_expert_stack(Sentinel()) is None


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", wide("batched_mm")])
def test_models_of_transformers_are_replaced_where_a_loop_computes_their_experts(implementation: str) -> None:
    model: Any = mixture(num_hidden_layers=1)
    model.set_experts_implementation(implementation)
    found = [find_expert_stack(module) for name, module in model.named_modules() if name.endswith("experts")]
    assert [each is not None for each in found] == [implementation == "eager"]


def test_auto_leaves_the_module_alone_where_no_kernel_was_chosen() -> None:
    module = Loop()
    ((_, put_on),) = find_replacements(module, Kernels("auto"))
    before = module(*given())
    put_on(ForwardPatches())
    assert torch.equal(module(*given()), before)


def eager() -> nn.Module:
    """A mixture with experts in a loop."""
    model: Any = mixture()
    model.set_experts_implementation("eager")
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("parallel", "kernels", "stage"),
    [
        ({"data": 2, "expert": 2}, "reference", 0),
        wide({"data": 2, "expert": 2}, "triton", 0),
        wide({"data": 2, "expert": 2}, "reference", 3),
        wide({"data": 2, "expert": 2, "tensor": 2}, "reference", 1),
        wide({"data": 2, "expert": 2, "tensor": 2, "expert_tensor": "cut"}, "reference", 0),
        wide({"data": 2, "expert": 2, "pipeline": 2}, "reference", 1),
        wide({"data": 1, "tensor": 2}, "reference", 0),
    ],
)
def test_shared_experts_in_grouped_products_train_as_one_process(
    parallel: dict[str, Any], kernels: str, stage: int
) -> None:
    changes = {"kernels": kernels, "zero_optimization": {"stage": stage}}
    found = run(parallel, changes, eager, lambda eng: [each.operator for each in eng.plan.replacements])
    assert all(each.count("experts") == 2 for each in found.extra)
    assert_equal(found, run({"data": 1}, None, eager))
