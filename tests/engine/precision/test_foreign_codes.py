"""A base that bitsandbytes holds as codes: on data ranks its layers compute, elsewhere it is refused in a sentence.

The classes here have the names and attributes of bitsandbytes'; tests/engine/parity/test_bitsandbytes.py has its own.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.precision.frozen_weights import refuse_foreign_codes

BASE: Mapping[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "checkpoint": {"frozen": False}}


class Params4bit(nn.Parameter):
    """Codes whose scales lie beside them."""

    quant_state: float


class Int8Params(nn.Parameter):
    """Codes, or values with ``has_fp16_weights``."""


class Linear4bit(nn.Linear):
    """A layer that reads codes."""

    def __init__(self, codes: Tensor, scale: float) -> None:
        super().__init__(4, 4, bias=False, device="meta")
        weight = Params4bit(codes, requires_grad=False)
        weight.quant_state = scale
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        values: Tensor = weight.to(x.dtype) * weight.quant_state
        return x @ values.t()


def model(weight: nn.Parameter | None = None) -> nn.Module:
    """A frozen base of codes under a trained layer."""
    torch.manual_seed(0)
    base = Linear4bit(torch.randint(0, 16, (4, 4)).to(torch.uint8), 0.1)
    if weight is not None:
        base.weight = weight
    return nn.Sequential(base, nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("changes", "ranks", "asked"),
    [
        ({"parallel": {"tensor": 2}}, 2, "parallel.tensor is 2"),
        ({"parallel": {"pipeline": 2}}, 2, "parallel.pipeline is 2"),
        ({"zero_optimization": {"stage": 3}}, 2, "zero_optimization.stage is 3"),
        ({"quantize_frozen": {}}, 1, "quantize_frozen is given"),
    ],
)
def test_what_needs_more_than_whole_weights_is_refused(changes: dict[str, Any], ranks: int, asked: str) -> None:
    config = load_config({**BASE, **changes}, ranks)
    for weight, format in (
        (None, "nf4"),
        (Int8Params(torch.ones(4, 4, dtype=torch.int8), requires_grad=False), "int8"),
    ):
        with pytest.raises(engine.ConfigError) as caught:
            refuse_foreign_codes(model(weight), config)
        assert str(caught.value) == (
            f"{asked}, and the weight '0.weight' is held as codes of bitsandbytes, which only its own layers read, "
            "whole; load the model without quantization_config, or call model.dequantize() before adapters are added, "
            f'and give "quantize_frozen": {{"dtype": "{format}"}}.'
        )


def test_a_checkpoint_of_codes_without_scales_is_refused() -> None:
    with pytest.raises(engine.ConfigError, match=r"checkpoint.frozen is true, and the weight '0.weight' is held as"):
        engine.initialize(model(), {**BASE, "checkpoint": {}})


def test_codes_in_a_dtype_of_values_are_refused() -> None:
    weight = Params4bit(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(engine.PlanError, match=r"^the weight '0.weight' of bitsandbytes is bfloat16, which may be"):
        refuse_foreign_codes(model(weight), load_config(BASE, 1))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_ranks_are_not_refused(stage: int) -> None:
    refuse_foreign_codes(model(), load_config({**BASE, "zero_optimization": {"stage": stage}}, 2))
    trained = nn.Sequential(nn.Linear(4, 4))
    trained[0].weight = Int8Params(torch.ones(4, 4))
    refuse_foreign_codes(trained, load_config({**BASE, "parallel": {"tensor": 2}}, 2))


def test_codes_keep_their_bits_in_narrow_precision() -> None:
    given = model()
    codes = given.get_parameter("0.weight").detach().clone()
    config = {**BASE, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    with engine.initialize(given, config, lambda output, batch: output.float().square().mean()) as eng:
        eng.train_batch(torch.randn(4, 4))
        held: Any = given.get_parameter("0.weight")
    assert torch.equal(held, codes) and held.quant_state == 0.1
