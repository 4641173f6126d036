"""Modules of positions that run in tiles, each again in backward: less memory, the same training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import ConfigError
from engine.parallel.activation_checkpointing.tiles import plan_tiles
from engine.planning.activation_memory import LiveStorages
from engine.verify import verify
from tests.parallel.context.test_context_training import config_of
from tests.selection import wide

LENGTH = 36


def _llama(layers: int = 2, width: int = 32, inside: int = 96, dropout: float = 0.0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=width, intermediate_size=inside, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attention_dropout=dropout,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def _batches(rows: int = 4, length: int = LENGTH, steps: int = 3) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 61, (rows, length), generator=draw) for _ in range(steps)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in drawn]


def _settings(parallel: dict[str, Any], stage: int, tokens: Any, **more: Any) -> dict[str, Any]:
    return config_of(parallel, stage, activation_checkpointing={"tile_tokens": tokens, **more})


ONE = {"data": 1}
WAYS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "one rank": (ONE, 0, {}),
    "dp2, ZeRO 3": ({"data": 2}, 3, {}),
    "cp2": ({"data": 1, "context": 2}, 2, {}),
    "cp3, full": ({"data": 1, "context": 3}, 1, {"mode": "full"}),
    "pp2": ({"data": 1, "pipeline": 2}, 0, {}),
    "pp2, zero bubble": ({"data": 1, "pipeline": 2, "schedule": "zb-h1"}, 1, {}),
    "full": (ONE, 1, {"mode": "full"}),
    "full, inputs on the host": ({"data": 2}, 3, {"mode": "full", "inputs": "host"}),
    "selective": ({"data": 2}, 2, {"mode": "selective"}),
    "offload": ({"data": 2}, 3, {"mode": "offload"}),
}


@pytest.mark.parametrize("build", [_llama, wide(_mixtral)])
@pytest.mark.parametrize("way", [name if name == "dp2, ZeRO 3" else wide(name) for name in WAYS])
def test_tiles_train_as_one_process(way: str, build: Callable[[], nn.Module]) -> None:
    parallel, stage, more = WAYS[way]
    threads = parallel["data"] * parallel.get("context", 1) * parallel.get("pipeline", 1)
    result = verify(build, _settings(parallel, stage, 7, **more), _batches(), threads=threads)
    assert result is not None and result.holds(), str(result)


def _peak(tokens: Any, length: int = 512, **more: Any) -> int:
    """Most live bytes of a step above its beginning."""
    settings = _settings(ONE, 0, tokens, **more) | {"train_batch_size": 1}
    with engine.initialize(_llama(layers=3, inside=192), settings) as eng:
        batches = _batches(1, length, 2)
        eng.train_batch(batches[0])
        live = LiveStorages()
        with live:
            eng.train_batch(batches[1])
        return live.peak


def test_tiles_alone_halve_the_peak_of_a_long_step() -> None:
    assert _peak("auto") < _peak(None) / 2


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_tiles_lower_the_peak_of_recomputed_blocks(mode: str) -> None:
    assert _peak(32, mode=mode) < 0.8 * _peak(None, mode=mode)


def test_auto_chooses_by_bytes_and_the_banner_has_one_line() -> None:
    with engine.initialize(_llama(), _settings(ONE, 0, "auto"), example_batch=_batches(1)[0]) as eng:
        (note,) = (note for note in eng.plan.notes if "tile_tokens" in note)
        tiles = eng.plan.tiles
        assert tiles is not None and f"tiles of {tiles.tokens} tokens" in note and "auto" in note
        assert any(each.name == "model.layers.1.mlp" for each in tiles.modules)
        form = next(form for each in tiles.modules if each.name == "model.layers.1.mlp" for form in each.forms)
        assert 2 * tiles.tokens * form.saved <= LENGTH * form.stream
        halved = plan_tiles(tiles.modules, "auto", 2)
        assert halved is not None and halved.tokens == tiles.tokens // 2
        assert "runs in tiles" in eng.explain("model.layers.1.mlp")


def test_a_module_with_dropout_stays_whole_and_trains_as_one_process() -> None:
    class Block(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 8))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.mlp(x)
            return out

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([Block(0.5), Block(0.0)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    x, settings = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1)), _settings({"data": 2}, 0, 4)
    result = verify(Two, settings, [x, x], threads=2)
    assert result is not None and result.holds(), str(result)
    settings = _settings(ONE, 0, 4) | {"train_batch_size": 4}
    with engine.initialize(Two(), settings, example_batch=x) as eng:
        assert eng.plan.tiles is not None and [each.name for each in eng.plan.tiles.modules] == ["layers.1"]
        assert any("no tiles for 1 module, layers.0, with dropout" in note for note in eng.plan.notes)


@pytest.mark.parametrize("other", [{"parallel": {"tensor": 2}}, {"compile": True}])
def test_tiles_with_tensor_ranks_or_compilation_are_refused(other: dict[str, Any]) -> None:
    settings = {"train_batch_size": 4, "activation_checkpointing": {"tile_tokens": 8}, **other}
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.tile_tokens: 8 with .*; leave one of them out"):
        engine.load_config(settings)


def test_a_model_without_such_modules_has_a_note() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x).cumsum(1)
            return out.square().mean()

    x = torch.randn(1, 12, 8)
    with engine.initialize(Mixing(), _settings(ONE, 0, 4) | {"train_batch_size": 1}, example_batch=x) as eng:
        assert any("so none has tiles" in note for note in eng.plan.notes)
