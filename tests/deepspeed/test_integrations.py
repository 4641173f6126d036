"""transformers' names for DeepSpeed: its own class wants the package, the door's is kept while a model is loaded."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import engine.deepspeed as deepspeed
from engine.deepspeed import HfDeepSpeedConfig

CONFIG: dict[str, Any] = {
    "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 3},
}  # fmt: skip


@pytest.mark.skipif(any(distributions(name="deepspeed")), reason="the package deepspeed is installed")
def test_the_class_of_transformers_asks_for_the_package() -> None:
    """The page about the door names the sentence."""
    with pytest.raises(PackageNotFoundError, match=r"deepspeed.* distribution was not found"):
        import_module("transformers.integrations").HfDeepSpeedConfig(CONFIG)


def test_a_model_is_loaded_whole_beside_the_configuration_and_sharded_by_initialize(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=13, n_positions=8)
    GPT2LMHeadModel(sizes).save_pretrained(tmp_path)
    kept = HfDeepSpeedConfig(CONFIG)
    assert kept.is_zero3() and not kept.is_zero2() and not kept.is_offload()
    assert kept.get_value("optimizer.params.lr") == 1e-2 and kept.get_value("a.b", 3) == 3
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert model.transformer.wte.weight.shape == (13, 8)
    eng, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    ids = torch.arange(12).view(2, 6)
    losses = []
    for _ in range(2):
        loss = eng(input_ids=ids, labels=ids).loss
        eng.backward(loss)
        eng.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    eng.destroy()
