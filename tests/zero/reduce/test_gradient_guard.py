"""Code that looks for a gradient on its parameter is told where it is; hooks see it in a backward, or are refused."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.engine import Engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models

TOLD = r"param.grad was read or written \(shape \[.*\]\), but the engine stores, sums and clips the gradient; read"


def start(stage: int, model: nn.Module | None = None, world: World | None = None, **changes: Any) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
    example = models.batches_for("decoder", 2, 1)[0]["input_ids"]
    return engine.initialize(model or models.decoder(), config | changes, example_batch=example, world=world)


def loss_of(model: Any) -> Tensor:
    batch = models.batches_for("decoder", 2, 1)[0]
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def weights(eng: Engine) -> list[nn.Parameter]:
    return list(eng.module.parameters())


def write(eng: Engine) -> None:
    weights(eng)[1].grad = None


def delete(eng: Engine) -> None:
    del weights(eng)[1].grad


LOOKS: dict[str, Callable[[Engine], Any]] = {
    "read": lambda eng: weights(eng)[0].grad,
    "write": write,
    "delete": delete,
    "clip": lambda eng: nn.utils.clip_grad_norm_(weights(eng), 1.0),
    "optimizer": lambda eng: torch.optim.SGD(weights(eng)).step(),
}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_between_backward_and_step_a_look_is_refused(stage: int) -> None:
    with start(stage) as eng:
        assert weights(eng)[0].grad is None
        for _ in range(2):
            torch.autograd.backward(loss_of(eng))
            for name, look in LOOKS.items():
                with pytest.raises(engine.EngineError, match=TOLD):
                    look(eng)
                    raise AssertionError(name)
            with eng.gradients() as gradients:
                assert all(bool(value.any()) for value in gradients.values())
            eng.step()
            assert weights(eng)[0].grad is None and {type(p) for p in weights(eng)} == {nn.Parameter}


GRIDS: dict[str, tuple[dict[str, int], int]] = {
    "zero3": ({"data": 2}, 3), "tp2": ({"tensor": 2}, 0), "pp2": ({"pipeline": 2}, 0),
}  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS)
def test_a_look_is_refused_on_every_rank_whoever_holds_the_parameter(grid: str) -> None:
    """Also a parameter that is a shard, or of another stage."""
    parallel, stage = GRIDS[grid]

    def body(world: World) -> None:
        model = models.decoder()
        with start(stage, model, world=world, parallel=parallel) as eng:
            eng.open_pipeline()
            before = [type(p) for p in weights(eng)]
            for _ in range(2):
                eng.backward(loss_of(eng))
                for parameter in weights(eng):
                    with pytest.raises(engine.EngineError, match=TOLD):
                        _ = parameter.grad
                with eng.full_parameters("head.weight"), eng.gradients() as gradients:
                    for value in gradients.values():
                        value.mul_(0.5)
                eng.step()
                assert [type(p) for p in weights(eng)] == before and weights(eng)[0].grad is None

    run_thread_ranks(2, body)


@pytest.mark.parametrize("end", [lambda eng: eng.zero_grad(), lambda eng: eng(torch.ones(2, 4, dtype=torch.long))])
def test_what_ends_the_wait_ends_the_guard(end: Callable[[Engine], Any]) -> None:
    with start(1) as eng:
        eng.backward(loss_of(eng))
        end(eng)
        assert {type(p) for p in weights(eng)} == {nn.Parameter}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zero_grad_of_the_model_is_that_of_the_engine(stage: int) -> None:
    found = []
    drops: list[Callable[[Engine], None]] = [lambda eng: eng.module.zero_grad(), Engine.zero_grad]
    for drop in drops:
        with start(stage) as eng:
            torch.autograd.backward(loss_of(eng) * 3)
            drop(eng)
            eng.backward(loss_of(eng))
            report = eng.step()
            assert report is not None
            found.append(report.grad_norm)
        assert "zero_grad" not in vars(eng.module)
    assert found[0] == found[1]


def test_close_takes_the_guard_off() -> None:
    model = models.decoder()
    with start(0, model) as eng:
        eng.backward(loss_of(eng))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_a_guarded_parameter_is_any_parameter_but_for_its_gradient() -> None:
    with start(0) as eng:
        eng.backward(loss_of(eng))
        weight, copied = weights(eng)[0], deepcopy(eng.module)
        assert {type(p) for p in copied.parameters()} == {nn.Parameter}
        assert torch.equal(next(copied.parameters()), weight) and next(copied.parameters()).grad is None
        assert torch.equal(loss_of(copied), loss_of(eng.module))
        assert isinstance(weight, nn.Parameter) and type(weight * 2) is Tensor and type(weight.detach()) is Tensor
        assert torch.isfinite(loss_of(eng.module))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_hook_sees_and_changes_what_it_does_in_one_process(stage: int) -> None:
    model, seen = models.decoder(), list[Tensor]()
    alone = deepcopy(model)

    def halve(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad / 2

    for each in (model, alone):
        each.get_parameter("blocks.0.up.weight").register_hook(halve)  # type: ignore[no-untyped-call]
    torch.autograd.backward(loss_of(alone))
    with start(stage, model, optimizer={"type": "SGD", "params": {"lr": 0.5}}) as eng:
        torch.autograd.backward(loss_of(eng))
        eng.step()
        found = eng.full_state_dict()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])
    for name, value in alone.named_parameters():
        assert float((found[name] - value.detach()).abs().max()) <= 1e-6, name


def test_hooks_for_the_accumulated_gradient_are_refused() -> None:
    told = (
        r"parameter 'blocks.0.up.weight' has a hook for its accumulated gradient \(register_post_accumulate_grad_hook"
    )
    model = models.decoder()
    weight: Any = model.get_parameter("blocks.0.up.weight")
    handle = weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(engine.EngineError, match=told):
        start(0, model)
    handle.remove()
    with start(0, model) as eng:
        weight.register_post_accumulate_grad_hook(lambda p: None)
        loss = loss_of(eng)
        with pytest.raises(engine.EngineError, match=told):
            eng.backward(loss)
