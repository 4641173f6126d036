"""A chain of layers on the ranks of a pipeline."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine
import engine.deepspeed as deepspeed
from engine.deepspeed.pipe import LayerSpec, PipelineModule

GRID: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "parallel": {"pipeline": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "checkpoint": {"async": False},
}  # fmt: skip


def chain() -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule([LayerSpec(nn.Linear, 4, 8), nn.Tanh(), LayerSpec(nn.Linear, 8, 2)], 1, loss_fn=nn.MSELoss())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 2, generator=generator)


def loss(output: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, given[1])


def train_and_load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with engine.initialize(chain(), GRID, loss, batch(0)) as eng:
        eng.train_batch(batch(0))
        eng.save_checkpoint(folder, {}).wait()
        saved = eng.full_state_dict()
    with engine.initialize(chain(), GRID, loss) as eng:
        eng.load_checkpoint(folder)
        return saved, {name: value.clone() for name, value in eng.module.state_dict().items()}


def meet_as_the_script_says(folder: Path) -> tuple[float, int, int]:
    """Ranks that no launcher has started: the script gives the place where they meet, and their numbers."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ranks = torch.tensor(float(rank))
    dist.all_reduce(ranks)
    eng = deepspeed.initialize(model=nn.Linear(4, 2), config={"train_batch_size": 4})[0]
    return float(ranks), eng.world_size, eng.global_rank


def write_from_a_rank() -> tuple[str, list[str]]:
    """Refusal of a write by one of two tensor ranks, and the weights that then differ from a state that is loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    wanted = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    parallel = {"tensor": 2, "tensor_plan": {"0": "column", "2": "row"}}
    config = GRID | {"parallel": parallel, "gradient_accumulation_steps": 1}
    eng, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    eng.backward(eng(torch.ones(1, 4)).sum())
    eng.step()
    said = ""
    try:
        with deepspeed.zero.GatheredParameters(model[0].weight, modifier_rank=0):
            pass
    except engine.EngineError as error:
        said = str(error)
    eng.load_module_state_dict(wanted)
    return said, [name for name, value in eng.module_state_dict().items() if not torch.equal(value, wanted[name])]
