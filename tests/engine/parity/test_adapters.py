"""Adapters of PEFT and their frozen base, shared by tensor ranks: equal to one process, and each holds half."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.parallel.comm.threads.thread_backend import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, train_alone
from tests.engine.parity.adapted_models import ADAPTED, RANK, adapted
from tests.engine.parity.launches import compare, settings
from tests.engine.parity.tensor_models import FOUR, HEADS
from tests.models import take_rows

RunRanks = Callable[..., list[Any]]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]


def shares(model: nn.Module) -> dict[str, int]:
    """Elements of the weights of base layers, and of the halves of the pairs beside them, on this rank; without
    routers of experts, which every rank holds."""
    found = {".base_layer.weight": 0, ".lora_A.": 0, ".lora_B.": 0}
    for name, parameter in model.named_parameters():
        for part in found:
            if part in name and ".mlp.gate." not in name:
                found[part] += parameter.numel()
    return found


def rank(name: str, config: Mapping[str, Any], folder: str, world: World) -> tuple[TrainingRecord, dict[str, int]]:
    """Body of a rank: train, and save the adapters."""
    model = ADAPTED[name]
    batches = model.batches(config["train_batch_size"])
    example = take_rows(batches[0], 0, config["train_micro_batch_size_per_gpu"])
    with engine.initialize(model.build, dict(config), example_batch=example, world=world) as eng:
        reports = [eng.train_batch(batch) for batch in batches]
        eng.save_pretrained(folder)
        held = shares(eng.module)
        record = TrainingRecord(
            tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), eng.full_state_dict()
        )
    return record, held


def test_a_base_is_shared_with_its_adapters_and_peft_loads_what_was_saved(tmp_path: Path) -> None:
    from peft import PeftModel

    name, config = "Llama with LoRA", settings(1, parallel={"tensor": 2})
    ranks = run_thread_ranks(2, lambda world: rank(name, config, str(tmp_path / "adapters"), world))
    model = ADAPTED[name]
    whole = shares(model.build())
    batches = model.batches(config["train_batch_size"])
    parity = Parity(ranks[0][0], train_alone(model.build, config | {"parallel": {"data": 1}}, batches))
    assert parity.holds() and min(parity.reference.norms) > config["gradient_clipping"], str(parity)
    for _, held in ranks:
        assert 2 * held[".base_layer.weight"] == whole[".base_layer.weight"]
    # seven layers in a block of width 32 with a perceptron of 48: inputs of o and down are shared, and outputs of q, k,
    # v, gate and up
    assert [held[".lora_A."] for _, held in ranks] == [2 * RANK * (5 * 32 + 32 // 2 + 48 // 2)] * 2
    assert [held[".lora_B."] for _, held in ranks] == [2 * RANK * ((32 + 2 * 16 + 2 * 48) // 2 + 2 * 32)] * 2
    base: Any = model.build()
    loaded = PeftModel.from_pretrained(base.unload(), tmp_path / "adapters").eval()
    trained: Any = model.build()
    trained.load_state_dict(ranks[0][0].weights)
    with torch.no_grad():
        assert torch.equal(loaded(**batches[0]).logits, trained.eval()(**batches[0]).logits)
    stored = {file.name for file in (tmp_path / "adapters").iterdir()}
    assert stored == {"README.md", "adapter_config.json", "adapter_model.safetensors"}


GRIDS: Mapping[str, dict[str, Any]] = {
    "tp2": {"parallel": {"tensor": 2}},
    "tp2, sequence": {"parallel": {"tensor": 2, "sequence_parallel": True}},
    "ZeRO 3 x dp2": {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}},
    "ZeRO 3 x dp2 x tp2": {"parallel": {"data": 2, "tensor": 2}, "zero_optimization": {"stage": 3}},
    "pp2": {"parallel": {"pipeline": 2}},
    "tp2 x pp2": {"parallel": {"tensor": 2, "pipeline": 2}},
}


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS)
def test_every_family_trains_as_in_one_process(run_ranks: RunRanks, grid: str) -> None:
    changes = dict(GRIDS[grid])
    config = settings(changes["parallel"].get("pipeline", 1), **changes)
    for name, result in compare(run_ranks, list(ADAPTED), config).items():
        assert not isinstance(result, str), f"{name}: {result}"
        assert not result.uncounted, f"{name}: {result.uncounted}"


def held(name: str, world: World) -> tuple[dict[str, int], set[str]]:
    """Body of a rank: what it holds of the model, and how its layers are shared."""
    model, config = ADAPTED[name], settings(1, parallel={"tensor": 2})
    example = take_rows(model.batches(2)[0], 0, 2)
    with engine.initialize(model.build, config, example_batch=example, world=world) as eng:
        assert eng.plan.tensor is not None
        return shares(eng.module), {reason.how for reason in eng.plan.tensor.reasons}


@pytest.mark.long
@pytest.mark.parametrize("name", ADAPTED)
def test_every_rank_holds_half_of_the_base(name: str) -> None:
    whole = shares(ADAPTED[name].build())[".base_layer.weight"]
    for mine, how in run_thread_ranks(2, lambda world: held(name, world)):
        assert 2 * mine[".base_layer.weight"] == whole and how <= {"local", "local+"}


def with_dropout(world: World) -> dict[str, torch.Tensor]:
    """Body of a rank: the halves of pairs that every rank holds, after two steps."""
    model = adapted(FOUR["Llama" + HEADS], lora_dropout=0.5)
    config = settings(1, parallel={"tensor": 2})
    batches = model.batches(config["train_batch_size"])
    with engine.initialize(model.build, config, example_batch=take_rows(batches[0], 0, 2), world=world) as eng:
        for batch in batches[:2]:
            eng.train_batch(batch)
        return {
            name: parameter.detach().clone()
            for name, parameter in eng.module.named_parameters()
            if ("q_proj.lora_A" in name or "o_proj.lora_B" in name or "down_proj.lora_B" in name)
        }


def test_dropout_before_a_pair_keeps_the_ranks_equal() -> None:
    first, second = run_thread_ranks(2, with_dropout)
    assert len(first) == 6
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
