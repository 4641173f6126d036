"""PEFT's switches in the loop: adapters off, merged into the base and out of it, one of two alone."""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests.engine.parity.peft_kinds import BASE, batches
from tests.models import take_rows
from tests.selection import wide

ROWS, CLIPPING, LR = 4, 1e-2, 1e-2
GRIDS: Mapping[str, dict[str, Any]] = {
    "dp2": {"parallel": {"data": 2}},
    "ZeRO 3": {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}},
    "tp2": {"parallel": {"data": 1, "tensor": 2}},
    "pp2": {"parallel": {"data": 1, "pipeline": 2}},
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def build() -> nn.Module:
    """A model with two adapters that are both on."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    plain: Any = BASE.build()
    torch.manual_seed(11)
    model: Any = get_peft_model(plain, config)
    model.add_adapter("late", config)
    model.base_model.set_adapter(["default", "late"])
    made: nn.Module = model
    return made


Whole = Callable[[], AbstractContextManager[Any]]


def switched(model: Any, train: Callable[[], float], evaluate: Callable[[], float], _: Whole) -> list[float]:
    """The losses of a loop that uses every switch."""
    found = [train()]
    with model.disable_adapter():
        found.append(evaluate())
    found.append(train())
    model.base_model.set_adapter("default")
    found += [evaluate(), train()]
    model.base_model.set_adapter(["default", "late"])
    return [*found, train()]


def merged(model: Any, train: Callable[[], float], evaluate: Callable[[], float], whole: Whole) -> list[float]:
    """The losses of a loop that evaluates the merged model."""
    found = [train()]
    with whole():
        model.merge_adapter()
    found.append(evaluate())
    with whole():
        model.unmerge_adapter()
    return [*found, evaluate(), train()]


LOOPS: Mapping[str, Callable[..., list[float]]] = {"switched": switched, "merged": merged}


def rank(loop: str, config: Mapping[str, Any], world: World) -> list[float] | str:
    """Body of a rank."""
    batch = take_rows(batches("LoRA", ROWS)[0], 0, ROWS)
    with engine.initialize(build, dict(config), example_batch=batch, world=world) as eng:
        rows = eng.config.micro
        mine = take_rows(batch, eng.grid.coord().dp * rows, rows)
        try:
            return LOOPS[loop](
                eng.module, lambda: eng.train_batch(mine).loss, lambda: eng.eval_batch(mine).loss, eng.full_parameters
            )
        except engine.EngineError as error:
            return str(error)


def alone(loop: str) -> list[float]:
    """The loop in plain torch."""
    model: Any = build().train()
    batch = take_rows(batches("LoRA", ROWS)[0], 0, ROWS)
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=LR, eps=1e-5, weight_decay=0.0)

    def train() -> float:
        loss = model(**batch).loss
        loss.backward()
        assert float(nn.utils.clip_grad_norm_(own, CLIPPING)) > CLIPPING
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            loss = float(model(**batch).loss)
        model.train()
        return loss

    return LOOPS[loop](model, train, evaluate, nullcontext)


@pytest.mark.parametrize("grid", [wide(grid) for grid in GRIDS])
@pytest.mark.parametrize("loop", LOOPS)
def test_switches_of_adapters_act_as_in_one_process(loop: str, grid: str) -> None:
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": 1e-5, "weight_decay": 0.0}},
        **GRIDS[grid],
    }
    found = run_thread_ranks(2, partial(rank, loop, config))
    for each in found:
        if (loop, grid) == ("merged", "pp2"):  # a stage has no values of another one's layers
            assert isinstance(each, str) and re.match("parameter .* is on pipeline rank . and has no values", each)
        else:
            assert each == pytest.approx(alone(loop), rel=1e-6)
