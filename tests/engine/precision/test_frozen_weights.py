"""Frozen weights in fewer bits, also those of bitsandbytes, and one sentence for each mistake."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import QuantizeFrozenConfig, load_config
from engine.errors import ConfigError, EngineError, PlanError
from engine.precision.frozen_weights import find_quantized, refuse_foreign_codes

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "checkpoint": {"frozen": False}}


class Block(nn.Module):
    def __init__(self, adapter: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.lora_A = nn.Linear(8, 2, bias=False) if adapter else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(self.norm(x)).relu())
        more: torch.Tensor = self.lora_A(x).sum()
        return x + y + more


class Model(nn.Module):
    """Two blocks beside which nothing but a scale is trained."""

    def __init__(self, adapter: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(adapter), Block(adapter)])
        self.head = nn.Linear(8, 20, bias=False)
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        loss: torch.Tensor = self.head(x).logsumexp(-1).mean()
        return loss


def config(skip: Sequence[str] = (), **changes: Any) -> dict[str, Any]:
    return BASE | {"quantize_frozen": {"skip": list(skip)}} | changes


def names(model: nn.Module, **changes: Any) -> list[str]:
    return list(find_quantized(model, load_config(config(**changes))))


def test_linear_layers_of_the_base_are_and_nothing_else() -> None:
    assert names(Model()) == [f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("up", "down")]
    assert names(Model(), skip=["blocks.0.*"]) == ["blocks.1.up.weight", "blocks.1.down.weight"]


def test_trained_and_tied_weights_stay_as_they_are() -> None:
    model: Any = Model()
    model.blocks[0].up.weight.requires_grad_(True)
    model.other = nn.Embedding(8, 16)
    model.other.weight = model.blocks[1].down.weight
    assert names(model) == ["blocks.0.down.weight", "blocks.1.up.weight"]


def test_keys_and_other_spellings() -> None:
    assert load_config(BASE).quantize_frozen is None
    given = load_config(BASE | {"quantize_frozen": {}}).quantize_frozen
    assert given == QuantizeFrozenConfig(dtype="nf4", block_size=64, skip=())
    read = load_config(BASE | {"quantize_frozen": {"dtype": "8bit", "block_size": 128}}).quantize_frozen
    assert read is not None and (read.dtype, read.block_size) == ("int8", 128)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"quantize_frozen": {"dtype": "fp4"}},
            'quantize_frozen.dtype: "fp4" is not a format of frozen weights; give "i',
        ),
        ({"quantize_frozen": {"block_size": 48}}, "quantize_frozen.block_size: 48 is not a block size; give 64, 128"),
        (config(skip=["blocks.2.*"]), r"quantize_frozen.skip[0]: 'blocks.2.*' matches no frozen parameter; similar"),
        (config(checkpoint={}), "quantize_frozen with checkpoint.frozen true, but a checkpoint has no exact copy"),
    ],
)
def test_mistakes_in_the_configuration(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.initialize(Model(), BASE | given)
    assert sentence in str(caught.value)


def test_a_model_without_a_frozen_base_is_refused() -> None:
    model = Model().requires_grad_(True)
    with pytest.raises(PlanError, match="but the model has no frozen weight of a linear layer except heads, embedd"):
        engine.initialize(model, config())


IDS = torch.arange(10).view(2, 5)


def test_what_codes_cannot_do_is_said() -> None:
    model: Any = Model(adapter=False)
    with engine.initialize(model, config()) as eng:
        eng.train_batch(IDS)
        with pytest.raises(
            EngineError, match=r"full_parameters\('blocks.0.up.weight'\) names weights that are stored only as"
        ):
            eng.full_parameters("blocks.0.up.weight").__enter__()
        with eng.full_parameters("blocks.0.*") as parameters:
            assert "blocks.0.up.bias" in parameters and "blocks.0.up.weight" not in parameters
        with pytest.raises(EngineError, match=r"the frozen weight 'blocks.0.up.weight' is stored in nf4"):
            eng.save_pretrained("nowhere")
        with pytest.raises(EngineError, match=r"part of its parameters .* or codes \(quantize_frozen\)"):
            model.load_state_dict({})
        with pytest.raises(EngineError, match=r"aten::add_.*quantize_frozen has stored it in nf4"):
            model.blocks[0].up.weight.add_(1.0)
        other = engine.initialize(Model(adapter=False), BASE)
        other.train_batch(IDS)
        with pytest.raises(EngineError, match="copy_weights_from: the other engine stores frozen weights in 8 or"):
            other.copy_weights_from(eng)
    assert type(model.blocks[0].up).__name__ == "QuantizedLinear"
    with pytest.raises(PlanError, match=r"weight of 'blocks.0.up' was quantized by an earlier engine of this model"):
        engine.initialize(model, config())


def test_the_banner_says_how_many_bytes_are_saved() -> None:
    with engine.initialize(Model(), config()) as eng:
        eng.train_batch(IDS)
        (note,) = [note for note in eng.plan.notes if note.startswith("quantize_frozen")]
    assert note.startswith(
        "quantize_frozen: 4 frozen weights in nf4, blocks of 64 columns: 448 bytes in place of 2,048"
    )


FOREIGN_BASE: Mapping[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW"},
    "checkpoint": {"frozen": False},
}


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
        ({"parallel": {"expert": 2}}, 2, "parallel.expert is 2"),
        ({"zero_optimization": {"stage": 3}}, 2, "zero_optimization.stage is 3"),
        ({"quantize_frozen": {}}, 1, "quantize_frozen is given"),
    ],
)
def test_what_needs_more_than_whole_weights_is_refused(changes: dict[str, Any], ranks: int, asked: str) -> None:
    config = load_config({**FOREIGN_BASE, **changes}, ranks)
    for weight, format in (
        (None, "nf4"),
        (Int8Params(torch.ones(4, 4, dtype=torch.int8), requires_grad=False), "int8"),
    ):
        with pytest.raises(engine.ConfigError) as caught:
            refuse_foreign_codes(model(weight), config)
        assert str(caught.value) == (
            f"{asked}, but bitsandbytes has quantized the weight '0.weight', and such a weight cannot be sharded; "
            "load the model without quantization_config or call model.dequantize() before adapters are added, and in "
            f'both cases set "quantize_frozen": {{"dtype": "{format}"}}.'
        )


def test_a_checkpoint_of_codes_without_scales_is_refused() -> None:
    with pytest.raises(engine.ConfigError, match=r"checkpoint.frozen is true, but the weight '0.weight' is stored as"):
        engine.initialize(model(), {**FOREIGN_BASE, "checkpoint": {}})


def test_codes_in_a_dtype_of_values_are_refused() -> None:
    weight = Params4bit(torch.ones(4, 4, dtype=torch.bfloat16), requires_grad=False)
    with pytest.raises(engine.PlanError, match=r"^the bitsandbytes weight '0.weight' has dtype bfloat16, so"):
        refuse_foreign_codes(model(weight), load_config(FOREIGN_BASE, 1))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_ranks_are_not_refused(stage: int) -> None:
    refuse_foreign_codes(model(), load_config({**FOREIGN_BASE, "zero_optimization": {"stage": stage}}, 2))
    trained = nn.Sequential(nn.Linear(4, 4))
    trained[0].weight = Int8Params(torch.ones(4, 4))
    refuse_foreign_codes(trained, load_config({**FOREIGN_BASE, "parallel": {"tensor": 2}}, 2))


def test_codes_keep_their_bits_in_narrow_precision() -> None:
    given = model()
    codes = given.get_parameter("0.weight").detach().clone()
    config = {**FOREIGN_BASE, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    with engine.initialize(given, config, lambda output, batch: output.float().square().mean()) as eng:
        eng.train_batch(torch.randn(4, 4))
        held: Any = given.get_parameter("0.weight")
    assert torch.equal(held, codes) and held.quant_state == 0.1
