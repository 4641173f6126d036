"""Which frozen weights are held in fewer bits, and one sentence for each mistake."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.config import QuantizeFrozenConfig, load_config
from engine.errors import ConfigError, EngineError, PlanError
from engine.precision.frozen_weights import find_quantized

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
        (config(checkpoint={}), "quantize_frozen with checkpoint.frozen true, and a checkpoint has no exact copy"),
    ],
)
def test_mistakes_in_the_configuration(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine.initialize(Model(), BASE | given)
    assert sentence in str(caught.value)


def test_a_model_without_a_frozen_base_is_refused() -> None:
    model = Model().requires_grad_(True)
    with pytest.raises(
        PlanError, match="and the model has no frozen weight of a linear layer beside its heads, embedd"
    ):
        engine.initialize(model, config())


IDS = torch.arange(10).view(2, 5)


def test_what_codes_cannot_do_is_said() -> None:
    model: Any = Model(adapter=False)
    with engine.initialize(model, config()) as eng:
        eng.train_batch(IDS)
        with pytest.raises(
            EngineError, match=r"full_parameters\('blocks.0.up.weight'\) names weights that are held as"
        ):
            eng.full_parameters("blocks.0.up.weight").__enter__()
        with eng.full_parameters("blocks.0.*") as parameters:
            assert "blocks.0.up.bias" in parameters and "blocks.0.up.weight" not in parameters
        with pytest.raises(EngineError, match=r"the frozen weight 'blocks.0.up.weight' is held in nf4"):
            eng.save_pretrained("nowhere")
        with pytest.raises(EngineError, match=r"holds a part .* or codes \(quantize_frozen\), so that full tensors"):
            model.load_state_dict({})
        with pytest.raises(EngineError, match=r"held in nf4 \(quantize_frozen\) and was written by aten::add_"):
            model.blocks[0].up.weight.add_(1.0)
        other = engine.initialize(Model(adapter=False), BASE)
        other.train_batch(IDS)
        with pytest.raises(EngineError, match="copy_weights_from: the other engine holds frozen weights as codes"):
            other.copy_weights_from(eng)
    assert type(model.blocks[0].up).__name__ == "QuantizedLinear"
    with pytest.raises(PlanError, match=r"the weight of 'blocks.0.up' was quantized by an engine that had this model"):
        engine.initialize(model, config())


def test_the_banner_says_how_many_bytes_are_saved() -> None:
    with engine.initialize(Model(), config()) as eng:
        eng.train_batch(IDS)
        (note,) = [note for note in eng.plan.notes if note.startswith("quantize_frozen")]
    assert note.startswith(
        "quantize_frozen: 4 frozen weights in nf4, blocks of 64 columns: 448 bytes in place of 2,048"
    )
