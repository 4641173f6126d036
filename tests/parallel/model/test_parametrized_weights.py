"""PEFT's adapters of stacked weights, in full and as codes: the same products, and nothing is left on the module."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.codecs.weight_format import QuantizedShape, WeightFormat, dequantize, quantize
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.parametrized_weights import keep_parameters
from engine.parallel.model.quantized_layers import read_quantized

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


class Experts(nn.Module):
    """Two stacks of matrices [E, O, I]; each row passes all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        ways = [nn.functional.linear(x, self.up[e]).relu() @ self.down[e].t() for e in range(3)]
        return torch.stack(ways).sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x)
        return out


def adapted() -> Any:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.up", "experts.down"], init_lora_weights=False
    )
    return peft.get_peft_model(Model(), config)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(model(torch.randn(5, 6, generator=generator)).square().sum())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stacks(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.ndim == 3 or p.dtype == torch.uint8}


@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
def test_a_stack_with_adapters_is_as_it_was_after_each_call(kind: Any) -> None:
    model, truth, patches = adapted(), adapted(), ForwardPatches()
    if kind is not None:
        forms = {
            n: QuantizedShape(format=WeightFormat(kind, 64), shape=tuple(p.shape)) for n, p in stacks(model).items()
        }
        for (name, form), whole in zip(forms.items(), stacks(truth).values(), strict=True):
            parameter = model.get_parameter(name)
            parameter.data = quantize(parameter.data, form)
            whole.data = dequantize(parameter.data, form, torch.float32)
        read_quantized(model, {name: (form, torch.float32) for name, form in forms.items()})
    keep_parameters(model, patches)
    before = {name: (p, p._version) for name, p in model.named_parameters()}
    found, expected = gradients(model), gradients(truth)
    assert found.keys() == expected.keys() and len(found) == 4
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(after[n] is p and p._version == v for n, (p, v) in before.items())
    patches.remove()
    assert not any("_activate_lora" in vars(module) for module in model.modules())
