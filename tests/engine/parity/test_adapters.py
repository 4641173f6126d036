"""Adapters of PEFT and their frozen base, shared by tensor ranks: equal to one process, and each holds half."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, train_alone
from tests.engine.parity.adapted_models import ADAPTED, DORA, EXPERTS, PROMPTS, RANK, adapted
from tests.engine.parity.architectures import Architecture
from tests.engine.parity.launches import compare, differences, settings
from tests.engine.parity.tensor_models import FOUR, HEADS
from tests.models import take_rows

RunRanks = Callable[..., list[Any]]
STEPS = 2
STACKS = "stacks of experts"
UNPLANNED = "('ep', "
"""Rows of experts, which only the run knows."""
CLIPPING = 1e-4
"""Of prompts, whose gradients are small."""
MODELS: Mapping[str, Architecture] = {**ADAPTED, **EXPERTS, **DORA, **PROMPTS}
BASE = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
"""Elements of the weights of a Llama's linear layers: two blocks with q and o, k and v, gate, up and down."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft"),
]


def shares(model: nn.Module) -> dict[str, int]:
    """Elements of the weights of base layers, of stacks of experts, and of the halves of the pairs beside them, on this
    rank; without routers of experts, which every rank holds."""
    found = {".base_layer.weight": 0, STACKS: 0, ".lora_A.": 0, ".lora_B.": 0}
    for name, parameter in model.named_parameters():
        for part in found:
            if (parameter.ndim == 3 if part == STACKS else part in name) and ".mlp.gate." not in name:
                found[part] += parameter.data.numel()
    return found


@dataclass(frozen=True, slots=True)
class Rank:
    """What came out on a rank."""

    run: TrainingRecord
    held: dict[str, int]
    uncounted: tuple[str, ...]
    calls: Mapping[str, int]
    """Collectives of a step over tensor ranks, by label."""
    how: frozenset[str]
    """How groups of layers are shared."""


def rank(name: str, config: Mapping[str, Any], folder: str, world: World) -> Rank:
    """Body of a rank: train, save the adapters, and compare what was sent with the plan."""
    model = MODELS[name]
    batches = model.batches(config["train_batch_size"])[:STEPS]
    example = take_rows(batches[0], 0, config["train_micro_batch_size_per_gpu"])
    with engine.initialize(model.build, dict(config), example_batch=example, world=world) as eng:
        rows, first = eng.config.micro * eng.config.accumulation, eng.grid.coord().dp
        mine = [take_rows(batch, first * rows, rows) for batch in batches]
        reports, before = [eng.train_batch(mine[0])], eng.sent
        reports += [eng.train_batch(batch) for batch in mine[1:]]
        calls = {row.label: row.calls for row in eng.sent.since(before).rows() if row.axis == "tp"}
        uncounted = tuple(each for each in differences(eng, before, len(batches) - 1) if UNPLANNED not in each)
        eng.save_pretrained(folder)
        run = TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), eng.full_state_dict())
        reasons = eng.plan.tensor.reasons if eng.plan.tensor is not None else ()
        held = shares(eng.module) if eng.config.tp > 1 else {}  # ranks of other axes hold no part to read
        return Rank(run, held, uncounted, calls, frozenset(reason.how for reason in reasons))


def trains_and_is_saved(name: str, folder: Path, **changes: Any) -> tuple[list[Rank], dict[str, int]]:
    """Two ranks of a model, and what the whole holds; it trains as in one process, and PEFT loads it."""
    from peft import PeftModel

    parallel = changes.pop("parallel", {"tensor": 2})
    model, config = MODELS[name], settings(1, parallel=parallel, train_batch_size=4, **changes)
    config["gradient_clipping"] = CLIPPING if name in PROMPTS else 0.05
    ranks = run_thread_ranks(2, lambda world: rank(name, config, str(folder), world))
    batches = model.batches(config["train_batch_size"])[:STEPS]
    alone = config | {"parallel": {"data": 1}, "zero_optimization": {"stage": 0}}
    parity = Parity(ranks[0].run, train_alone(model.build, alone, batches))
    assert parity.holds() and min(parity.reference.norms) > config["gradient_clipping"], str(parity)
    assert not any(found.uncounted for found in ranks), ranks[0].uncounted
    given: Any = model.build()
    whole = shares(given)
    base = given.get_base_model() if name in PROMPTS else given.unload()
    loaded: Any = PeftModel.from_pretrained(base, folder)
    trained: Any = model.build()
    trained.load_state_dict(ranks[0].run.weights)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batches[0]).logits, trained.eval()(**batches[0]).logits)
    assert {file.name for file in folder.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "others may read the weights too"
    assert name in PROMPTS or all(found.how <= {"local", "local+", "view"} for found in ranks)
    return ranks, whole


def test_a_base_is_shared_with_its_adapters_and_peft_loads_what_was_saved(tmp_path: Path) -> None:
    ranks, whole = trains_and_is_saved("Llama with LoRA", tmp_path / "adapters")
    # seven layers in a block of width 32 with a perceptron of 48: inputs of o and down are shared, and outputs of q, k,
    # v, gate and up
    first, second = 2 * RANK * (5 * 32 + 32 // 2 + 48 // 2), 2 * RANK * ((32 + 2 * 16 + 2 * 48) // 2 + 2 * 32)
    assert whole[".base_layer.weight"] == BASE
    microbatches, calls = 2, ranks[0].calls
    # sums of four row layers, and of the inputs of their regions but the first, whose input is frozen, and of the head
    assert (calls["row outputs"], calls["column inputs"]) == (4 * microbatches, 4 * microbatches)
    assert calls["replicated gradients"] == 1
    for rank in ranks:
        assert rank.held == {".base_layer.weight": BASE // 2, STACKS: 0, ".lora_A.": first, ".lora_B.": second}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [next(iter(EXPERTS)), *(pytest.param(n, marks=pytest.mark.long) for n in [*EXPERTS][1:])]
)
def test_experts_are_shared_with_the_pairs_that_peft_writes_into_them(name: str, tmp_path: Path) -> None:
    ranks, whole = trains_and_is_saved(name, tmp_path / "adapters")
    for held in (rank.held for rank in ranks):
        assert 2 * held[STACKS] == whole[STACKS] > 0
        assert 2 * held[".base_layer.weight"] == whole[".base_layer.weight"]
        assert held[".lora_A."] < whole[".lora_A."] and held[".lora_B."] < whole[".lora_B."]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}}, {"parallel": {"pipeline": 2}},
        {"parallel": {"data": 2, "expert": 2}},
        {"parallel": {"data": 2, "expert": 2}, "zero_optimization": {"stage": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_pairs_of_experts_are_saved_on_other_axes(changes: dict[str, Any], tmp_path: Path) -> None:
    for number, name in enumerate(EXPERTS):
        trains_and_is_saved(name, tmp_path / str(number), **changes)


@pytest.mark.long
@pytest.mark.parametrize("name", [*DORA, *PROMPTS])
def test_other_adapters_train_over_tensor_ranks_and_are_saved(name: str, tmp_path: Path) -> None:
    ranks, _ = trains_and_is_saved(name, tmp_path / "adapters")
    assert [rank.held[".base_layer.weight"] for rank in ranks] == [BASE // 2 if name in DORA else 0] * 2


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
def test_prompts_train_on_other_axes(run_ranks: RunRanks, parallel: dict[str, int]) -> None:
    config = settings(parallel.get("pipeline", 1), parallel=parallel, gradient_clipping=CLIPPING)
    for name, result in compare(run_ranks, [*PROMPTS], config).items():
        assert not isinstance(result, str) and not result.uncounted, f"{name}: {result}"


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
    for name, result in compare(run_ranks, [*ADAPTED, *EXPERTS], config).items():
        assert not isinstance(result, str), f"{name}: {result}"
        assert not result.uncounted, f"{name}: {result.uncounted}"


EXPERT_WAYS: Mapping[str, dict[str, Any]] = {
    "recomputed": {"parallel": {"tensor": 2}, "activation_checkpointing": {"mode": "full"}},
    "ZeRO 3, recomputed": {
        "parallel": {"data": 2}, "zero_optimization": {"stage": 3}, "activation_checkpointing": {"mode": "full"},
    },
    "ZeRO 3 x pp2": {"parallel": {"data": 2, "pipeline": 2}, "zero_optimization": {"stage": 3}},
    "zb-h1": {"parallel": {"pipeline": 2, "schedule": "zb-h1"}},
    "tp4": {"parallel": {"tensor": 4}},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way", EXPERT_WAYS)
def test_pairs_written_into_experts_run_in_other_ways(run_ranks: RunRanks, way: str) -> None:
    changes = dict(EXPERT_WAYS[way])
    config = settings(changes["parallel"].get("pipeline", 1), **changes)
    for name, result in compare(run_ranks, [*EXPERTS], config).items():
        assert not isinstance(result, str) and not result.uncounted, f"{name}: {result}"


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
        assert 2 * mine[".base_layer.weight"] == whole and "replicate" not in how


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


@pytest.mark.long
def test_dropout_before_a_pair_keeps_the_ranks_equal() -> None:
    first, second = run_thread_ranks(2, with_dropout)
    assert len(first) == 6
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
