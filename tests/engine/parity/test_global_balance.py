"""Balance losses over the global batch: router logits of all data ranks, gathered in the user's loss function."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord
from tests.engine.parity.expert_families import small_mixture
from tests.engine.parity.test_expert_families import named
from tests.engine.parity.transformers_types import text
from tests.resumed_runs import own_rows
from tests.selection import wide

ROWS, COEFFICIENT, CLIPPING = 8, 0.5, 0.5
CONFIG: Mapping[str, Any] = {
    "train_batch_size": ROWS, "gradient_accumulation_steps": 1, "gradient_clipping": CLIPPING,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}},
}  # fmt: skip


def made(own: bool) -> nn.Module:
    """Mixtral that returns router logits; ``own``: its loss has the balance loss of its rows."""
    torch.manual_seed(0)
    model: Any = small_mixture(named("mixtral"))
    model.config.output_router_logits = True
    model.router_aux_loss_coef = COEFFICIENT if own else 0.0
    return model  # type: ignore[no-any-return]


def in_plain_torch() -> TrainingRecord:
    """Trains one process on the global batch with the model's own balance loss."""
    model = made(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    losses, norms = [], []
    for batch in text(ROWS):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return TrainingRecord(tuple(losses), tuple(norms), model.state_dict())


def balance(logits: Sequence[Tensor]) -> Tensor:
    """Returns the balance loss of router logits [positions, experts] of each layer."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    formula: Callable[..., Any] = load_balancing_loss_func
    found = formula(tuple(logits), 4, 2)
    assert isinstance(found, Tensor)
    return COEFFICIENT * found


def balanced(output: Any, batch: Any, gather_rows: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the loss with the balance loss of the rows of all data ranks."""
    loss: Tensor = output.loss
    return loss + balance([gather_rows(layer) for layer in output.router_logits])


def whole_step(eng: engine.Engine, batch: dict[str, Tensor]) -> Any:
    """Makes a step with one microbatch."""
    return eng.train_batch(batch)


def two_forwards(eng: engine.Engine, batch: dict[str, Tensor]) -> Any:
    """Makes a step with two microbatches and one backward through both."""
    half = len(batch["input_ids"]) // 2
    outputs = [eng({key: value[part] for key, value in batch.items()}) for part in (slice(half), slice(half, None))]
    logits = [
        eng.gather_rows(torch.cat(layer)) for layer in zip(*(each.router_logits for each in outputs), strict=True)
    ]
    eng.backward(sum(each.loss for each in outputs) / 2 + balance(logits))
    return eng.step()


Step = Callable[[engine.Engine, dict[str, Tensor]], Any]


def trained(parallel: Mapping[str, int], step: Step, own: bool, world: World) -> TrainingRecord:
    """Trains three steps; ``own``: with the balance loss of each rank's rows."""
    looped = step is two_forwards
    settings = {**CONFIG, "parallel": dict(parallel), "managed_gradient_accumulation": not looped}
    config = engine.load_config(settings, world.size)
    example = {key: value[: ROWS // config.row_ranks] for key, value in text(ROWS, 1)[0].items()}
    loss: Any = None if own or looped else balanced
    with engine.initialize(partial(made, own), config, loss, example, world=world) as eng:
        reports = [step(eng, own_rows(eng, batch)) for batch in text(ROWS)]
        losses, norms = zip(*((report.loss, report.grad_norm) for report in reports), strict=True)
        return TrainingRecord(losses, norms, eng.full_state_dict())


@pytest.mark.parametrize(
    ("parallel", "step"),
    [
        ({"data": 2, "expert": 2}, whole_step),
        ({"data": 2, "expert": 2}, two_forwards),
        wide({"data": 2, "pipeline": 2}, whole_step),
        wide({"data": 2, "tensor": 2}, whole_step),
        wide({"data": 2, "tensor": 2}, two_forwards),
    ],
)
def test_gathered_router_logits_give_the_balance_loss_of_the_global_batch(parallel: dict[str, int], step: Step) -> None:
    ranks = 2 if "expert" in parallel else 4
    parity = Parity(run_thread_ranks(ranks, partial(trained, parallel, step, False))[0], in_plain_torch())
    assert parity.holds() and min(parity.reference.norms) > CLIPPING, str(parity)


def test_the_balance_loss_of_a_ranks_own_rows_is_another_one() -> None:
    found = run_thread_ranks(2, partial(trained, {"data": 2}, whole_step, True))[0]
    assert found.norms[0] != pytest.approx(in_plain_torch().norms[0], rel=1e-4)
