"""What a user does beside the engine, and after it: training that would move nothing is refused, or said once."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine

CONFIG: dict[str, Any] = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def start(model: nn.Module | None = None, **changes: Any) -> engine.Engine:
    torch.manual_seed(0)
    return engine.initialize(
        nn.Linear(3, 3) if model is None else model, CONFIG | changes, lambda output, batch: output.square().mean()
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_step_of_the_inner_optimizer_is_refused() -> None:
    with start() as eng:
        eng.train_batch(torch.ones(2, 3))
        before = eng.module.get_parameter("weight").clone()
        with pytest.raises(engine.EngineError, match=r"^step\(\) was called on the engine's optimizer, .* eng.step\("):
            eng.optimizer.step()
        assert torch.equal(before, eng.module.get_parameter("weight"))
        eng.train_batch(torch.ones(2, 3))
        assert eng.step_count == 2


def test_a_torch_scheduler_of_the_user_still_steps() -> None:
    def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    with engine.initialize(nn.Linear(3, 3), CONFIG, lambda y, x: y.square().mean(), lr_scheduler=decay) as eng:
        rates = [eng.train_batch(torch.ones(2, 3)).lr for _ in range(3)]
    assert rates == [0.1, 0.05, 0.025]


def test_a_backward_of_the_users_own_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with start() as eng, caplog.at_level(logging.WARNING, "trine"):
        for _ in range(3):
            loss: Tensor = eng.module(torch.ones(2, 3)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        (said,) = warnings(caplog)
        assert "has a gradient of its own" in said and "call eng.backward(loss) and eng.step()" in said
        eng.train_batch(torch.ones(2, 3))
    assert len(warnings(caplog)) == 1


def test_a_gradient_that_was_set_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with start() as eng, caplog.at_level(logging.WARNING, "trine"):
        eng.train_batch(torch.ones(2, 3))
        assert not warnings(caplog)
        eng.module.get_parameter("bias").grad = torch.ones(3)
        eng.train_batch(torch.ones(2, 3))
        eng.train_batch(torch.ones(2, 3))
    (said,) = warnings(caplog)
    assert said.startswith("parameter 'bias' has a gradient of its own")


CALLS: dict[str, Callable[[engine.Engine], object]] = {
    "train_batch": lambda eng: eng.train_batch(torch.ones(2, 3)),
    "eval_batch": lambda eng: eng.eval_batch(torch.ones(2, 3)),
    "eng(batch)": lambda eng: eng(torch.ones(2, 3)),
    "backward(loss)": lambda eng: eng.backward(torch.ones((), requires_grad=True)),
    "step()": lambda eng: eng.step(),
    "full_state_dict": lambda eng: eng.full_state_dict(),
    "full_parameters": lambda eng: eng.full_parameters().__enter__(),
    "save_checkpoint": lambda eng: eng.save_checkpoint("never"),
    "load_checkpoint": lambda eng: eng.load_checkpoint("never"),
    "save_pretrained": lambda eng: eng.save_pretrained("never"),
    "register_for_checkpointing": lambda eng: eng.register_for_checkpointing(data=None),
    "timeline": lambda eng: eng.timeline(),
}


def test_nothing_runs_after_close() -> None:
    eng = start()
    eng.train_batch(torch.ones(2, 3))
    eng.close()
    for name, call in CALLS.items():
        with pytest.raises(engine.EngineError) as caught:
            call(eng)
        assert str(caught.value).startswith(f"{name} was called after close(), which released the engine's parts;")
    eng.close()
    assert eng.step_count == 1 and eng.plan.groups, "what is only read stays readable"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_second_engine_on_a_model_is_refused_until_the_first_is_closed(stage: int) -> None:
    model, config = nn.Linear(3, 3), {"zero_optimization": {"stage": stage}}
    first = start(model, **config)
    first.train_batch(torch.ones(2, 3))
    with pytest.raises(engine.EngineError, match=r"^another engine trains the model already, .*; call close\(\) of"):
        start(model, **config)
    assert first.train_batch(torch.ones(2, 3)).step == 2, "the refusal leaves the first one as it was"
    first.close()
    with start(model, **config) as second:
        assert second.train_batch(torch.ones(2, 3)).step == 1


def data_parallel_of_compiled(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model)
    return nn.DataParallel(compiled)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, data_parallel_of_compiled])
def test_wrappers_that_rename_parameters_are_taken_off(wrap: Callable[[nn.Module], Any]) -> None:
    inner = nn.Linear(3, 3)
    with start(wrap(inner)) as eng:
        assert eng.module is inner and {row.name for row in eng.plan.table} == {"weight", "bias"}
        notes = [note for note in eng.plan.notes if "the Linear inside" in note or "inside DataParallel" in note]
        assert notes and all("is trained, without the wrapper" in note for note in notes)
        assert eng.train_batch(torch.ones(2, 3)).step == 1


def wrapped() -> tuple[list[float], list[str]]:
    """Body of a rank: the model comes in DistributedDataParallel."""
    config = CONFIG | {"train_batch_size": 4}
    engine.initialize(nn.Linear(1, 1), config).close()  # opens the process group
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    with engine.initialize(model, config, lambda output, batch: output.square().mean()) as eng:
        losses = [eng.train_batch(torch.full((2, 3), 1.0 + eng.grid.rank)).loss for _ in range(3)]
        return losses, [row.name for row in eng.plan.table]


def test_a_model_in_ddp_trains_as_without(run_ranks: Callable[..., list[Any]]) -> None:
    one, other = run_ranks(wrapped, 2)
    assert one == other and sorted(one[1]) == ["bias", "weight"]
    with start(train_batch_size=4) as eng:
        batch = torch.cat([torch.ones(2, 3), torch.full((2, 3), 2.0)])
        assert one[0] == pytest.approx([eng.train_batch(batch).loss for _ in range(3)], rel=1e-6)


def test_a_model_that_is_sharded_already_is_refused() -> None:
    wrapper = type("FullyShardedDataParallel", (nn.Linear,), {})
    with pytest.raises(
        engine.PlanError, match="sharded already, but the engine shards them itself; pass the module without FSDP"
    ):
        start(wrapper(3, 3))
