"""Methods of PEFT that spread a budget over adapters, called in the loop as PEFT documents (AdaLoRA, AdaMSS)."""

from collections.abc import Mapping
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

STEPS, ROWS, CLIPPING, LR = 4, 4, 1e-2, 1e-2
LAYERS: Mapping[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "o_proj"]}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "AdaLoRA": ("AdaLoraConfig", {
        "init_r": 4, "target_r": 2, "total_step": 10, "tinit": 0, "tfinal": 6, "deltaT": 1,
    }),
    "AdaMSS": ("AdamssConfig", {
        "r": 8, "num_subspaces": 2, "subspace_rank": 2, "use_asa": True, "asa_target_subspaces": 3, "init_warmup": 0,
        "final_warmup": 4, "mask_interval": 2,
    }),
}  # fmt: skip
GRIDS: Mapping[str, dict[str, Any]] = {
    "dp2": {"parallel": {"data": 2}},
    "ZeRO 3": {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}},
    "tp2": {"parallel": {"data": 1, "tensor": 2}},
    "pp2": {"parallel": {"data": 1, "pipeline": 2}},
}
WHOLE = ("dp2", "ZeRO 3")
"""Grids on which PEFT can be lent whole adapters with their gradients."""
OFTEN = {("AdaLoRA", "ZeRO 3")}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def build(kind: str) -> nn.Module:
    """The model, whose adapters have a gradient from the first step on."""
    import peft

    name, given = KINDS[kind]
    model: Any = BASE.build()
    torch.manual_seed(11)
    made: nn.Module = peft.get_peft_model(model, getattr(peft, name)(**LAYERS, **given))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def config_of(grid: str) -> dict[str, Any]:
    """One microbatch a step on each data rank."""
    changes = GRIDS[grid]
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": 1e-5, "weight_decay": 0.0}},
        **changes,
    }


def allocate(eng: engine.Engine, step: int) -> None:
    """Lend PEFT the gradients that the step has used, as a script with PEFT's AdaLoRA does."""
    model: Any = eng.module
    with eng.full_parameters() as parameters, eng.gradients() as gradients:
        for name, gradient in gradients.items():
            parameters[name].grad = gradient
        model.base_model.update_and_allocate(step)
        for name in gradients:
            parameters[name].grad = None


def trained(kind: str, grid: str, world: World) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Body of a rank: losses and weights."""
    given = [take_rows(batch, 0, ROWS) for batch in batches(kind, ROWS)]
    losses = []
    with engine.initialize(build(kind), config_of(grid), example_batch=given[0], world=world) as eng:
        rows = eng.config.micro
        for step in range(STEPS):
            batch = take_rows(given[step % len(given)], eng.grid.coord().dp * rows, rows)
            eng.backward(eng(**batch).loss)
            report = eng.step()
            assert report is not None
            losses.append(report.loss)
            allocate(eng, step)
        return losses, eng.full_state_dict()


def reference(kind: str) -> tuple[list[float], nn.Module]:
    """The loop that PEFT documents, in plain torch."""
    model: Any = build(kind).train()
    given = [take_rows(batch, 0, ROWS) for batch in batches(kind, ROWS)]
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=LR, eps=1e-5, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = model(**given[step % len(given)]).loss
        loss.backward()
        assert float(nn.utils.clip_grad_norm_(own, CLIPPING)) > CLIPPING
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, model


@pytest.mark.parametrize(
    ("kind", "grid"),
    [(kind, grid) if (kind, grid) in OFTEN else wide(kind, grid) for kind in KINDS for grid in WHOLE],
)
def test_a_budget_is_spread_as_in_one_process(kind: str, grid: str) -> None:
    losses, model = reference(kind)
    spread = [n for n, p in model.named_parameters() if not p.requires_grad or (p == 0).all(-1).any()]
    assert any("adamss_A" in name or "lora_E" in name for name in spread)
    found, weights = run_thread_ranks(2, partial(trained, kind, grid))[0]
    assert found == pytest.approx(losses, rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=name)


def looked(kind: str, grid: str, world: World) -> str:
    """Body of a rank: what a call without the gradients is told."""
    batch = take_rows(batches(kind, ROWS)[0], 0, ROWS)
    with engine.initialize(build(kind), config_of(grid), example_batch=batch, world=world) as eng:
        rows = eng.config.micro
        eng.open_pipeline()
        eng.backward(eng(**take_rows(batch, eng.grid.coord().dp * rows, rows)).loss)
        model: Any = eng.module
        with pytest.raises(engine.EngineError) as error:
            model.base_model.update_and_allocate(1)
        eng.step()
        return str(error.value)


@pytest.mark.parametrize("grid", [wide(grid) for grid in GRIDS])
def test_a_budget_without_gradients_is_refused(grid: str) -> None:
    for kind in KINDS:
        for said in run_thread_ranks(2, partial(looked, kind, grid)):
            assert said.startswith(("param.grad was read or written", "parameter 'base_model.")) and "eng." in said
