"""PEFT's adapters over a base on the meta device: a folder has the base, and adapters start as PEFT starts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.model.adapters import base_name
from tests import models
from tests.engine.checkpoint.test_huggingface import settings
from tests.engine.checkpoint.test_published_keys import mixtral

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
BASES: dict[str, Callable[[], nn.Module]] = {"llama": models.llama, "mixtral": mixtral}


def adapted(name: str, **options: Any) -> Any:
    """A base on the meta device with adapters on its attention, and a trained copy of its head."""
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        base: Any = BASES[name]()
    given: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]} | options
    return get_peft_model(base, LoraConfig(**given))


def start(name: str, parallel: dict[str, int], stage: int, folder: str | None, **options: Any) -> dict[str, Tensor]:
    config = settings(parallel, stage, **({"checkpoint": {"init_from": folder}} if folder else {}))
    example = models.batches_for("llama", 2, 1)[0]
    with engine.initialize(adapted(name, **options), config, example_batch=example) as eng:
        assert eng.predict({"input_ids": example["input_ids"]}) is not None or eng.grid.pp > 1
        return eng.full_state_dict()


def pairs(state: dict[str, Tensor], half: str) -> list[Tensor]:
    found = [value for key, value in state.items() if f".lora_{half}." in key]
    assert len(found) == 4
    return found


@pytest.mark.parametrize(
    ("name", "parallel", "stage", "ranks"),
    [
        ("mixtral", {}, 0, 1),
        pytest.param("llama", {"tensor": 2}, 0, 2, marks=pytest.mark.long),
        pytest.param("mixtral", {"data": 2}, 3, 2, marks=pytest.mark.long),
        pytest.param("mixtral", {"pipeline": 2}, 0, 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_base_is_that_of_the_folder_and_adapters_change_nothing_yet(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, name: str, parallel: dict[str, int], stage: int, ranks: int
) -> None:
    base: Any = BASES[name]()
    base.save_pretrained(tmp_path)
    if ranks == 1:
        state = start(name, parallel, stage, str(tmp_path))
    else:
        state, *_ = run_ranks(start, ranks, name, parallel, stage, str(tmp_path))
    for key, value in base.state_dict().items():
        known = [own for own in state if base_name(own) == key]
        assert len(known) == 1 + (key == "lm_head.weight")
        assert all(torch.equal(state[own], value) for own in known), key
    for first, second in zip(pairs(state, "A"), pairs(state, "B"), strict=True):
        assert not second.any()
        assert 0.5 < first.abs().max() * first.shape[1] ** 0.5 <= 1


def test_without_a_folder_pairs_start_as_peft_starts_them() -> None:
    state = start("llama", {}, 0, None)
    assert not any(half.any() for half in pairs(state, "B"))
    state = start("llama", {}, 0, None, init_lora_weights="gaussian")
    assert 0.15 < torch.cat([half.flatten() for half in pairs(state, "A")]).std() < 0.35, "1 / rank"
    state = start("llama", {}, 0, None, init_lora_weights=False)
    assert all(half.abs().max() * half.shape[1] ** 0.5 <= 1 and half.any() for half in pairs(state, "B"))


def test_adapters_whose_start_is_lost_are_refused_by_name() -> None:
    from peft import IA3Config, get_peft_model

    with torch.device("meta"):
        base: Any = models.llama()
    scaled = get_peft_model(base, IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    for model in (scaled, adapted("llama", init_lora_weights="orthogonal")):
        with pytest.raises(engine.PlanError, match=r"^adapter parameter 'base_model.*is on the meta device, where"):
            engine.initialize(model, settings({}), example_batch=models.batches_for("llama", 2, 1)[0])
