"""What a run does that its user hardly means is said once: training in eval mode, one batch for ever, a loss of nan."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.step import batch_check, runner
from engine.step.runner import idle_in_eval_mode
from engine.verify import verify
from tests import models
from tests.engine.parity.test_parity import config_for

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), *layers, nn.Linear(3, 1), Loss())


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Rate(nn.Module):
    """Dropout as transformers' attention has it: a rate in an attribute."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention_dropout, self.scale = rate, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.attention_dropout, self.training) * self.scale


class Wrapper(nn.Module):
    """A module of the user's own, in train mode, around a model that came in eval mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def frozen_norm() -> nn.Module:
    model = net(nn.BatchNorm1d(3), nn.Dropout(0.1))
    model.get_submodule("1").eval()
    return model


def frozen_backbone() -> nn.Module:
    return nn.Sequential(net(nn.Dropout(0.1))[:2].requires_grad_(False).eval(), nn.Linear(3, 1), Loss())  # type: ignore[index]


SAID: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "dropout": (lambda: net(nn.Dropout(0.1), nn.Dropout(0.0)).eval(), ["dropout (1)"]),
    "a rate in an attribute": (lambda: net(Rate(0.1)).eval(), ["dropout (1.attention_dropout)"]),
    "running statistics": (lambda: net(nn.BatchNorm1d(3)).eval(), ["the update of running statistics (1)"]),
    "a wrapper": (lambda: Wrapper(net(nn.Dropout(0.1))), ["dropout (inner.1)"]),
    "nothing to switch off": (lambda: net(Rate(0.0), nn.Dropout(0.0)).eval(), []),
    "train mode": (lambda: net(nn.Dropout(0.1)), []),
    "a norm that is frozen on purpose": (frozen_norm, []),
    "a frozen part": (frozen_backbone, []),
}


@pytest.mark.parametrize("name", SAID)
def test_training_in_eval_mode_is_said_where_it_changes_something(name: str, caplog: pytest.LogCaptureFixture) -> None:
    build, expected = SAID[name]
    model = build()
    assert list(idle_in_eval_mode(model)) == expected
    with engine.initialize(model, CONFIG) as eng, caplog.at_level(logging.WARNING, "trine"):
        for _ in range(3):
            eng.train_batch(torch.randn(4, 3))
    said = [record.getMessage() for record in caplog.records if "trains in eval mode" in record.getMessage()]
    assert len(said) == bool(expected)
    assert not expected or (f"so {expected[0]} does nothing; call model.train()" in said[0])


def test_a_model_that_was_left_in_eval_mode_between_steps_is_found(caplog: pytest.LogCaptureFixture) -> None:
    with engine.initialize(net(nn.Dropout(0.1)), CONFIG) as eng, caplog.at_level(logging.WARNING, "trine"):
        for step in range(4):
            if step == 2:
                eng.module.eval()
            eng.backward(eng(torch.randn(4, 3)))
            eng.step()
    assert [record.getMessage()[:33] for record in caplog.records] == ["the model trains in eval mode, so"]


def loop(eng: engine.Engine, loader: Any) -> None:
    """Both loops in which each call makes the iterator anew."""
    for _ in range(12):
        eng.train_batch(iter(loader))


def own_loop(eng: engine.Engine, loader: Any) -> None:
    for _ in range(12):
        eng.backward(eng(next(iter(loader))))
        eng.step()


def right_loop(eng: engine.Engine, loader: Any) -> None:
    for _ in range(3):
        batches = iter(loader)
        for _ in range(4):
            eng.train_batch(batches)


def later_loop(eng: engine.Engine, loader: Any) -> None:
    """Good steps, in another phase the wrong loop, and the same once more."""
    for _ in range(12):
        right_loop(eng, loader)
    for _ in range(5):
        loop(eng, loader)


@pytest.mark.parametrize(("train", "count"), [(loop, 1), (own_loop, 1), (right_loop, 0), (later_loop, 1)])
def test_one_batch_for_ever_is_said_once(
    train: Callable[[engine.Engine, Any], None], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = TensorDataset(torch.randn(16, 3))
    loader = DataLoader(rows, 4, collate_fn=lambda rows: torch.stack([row[0] for row in rows]))
    with engine.initialize(net(), CONFIG) as eng, caplog.at_level(logging.WARNING, "trine"):
        train(eng, loader)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == count and all("8 steps in a row were given the same batch" in text for text in said)


def test_after_the_start_batches_are_glanced_at_twice_in_32_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, first = list[object](), list[object]()

    def counting(seen: list[object]) -> Callable[[object], int]:
        def digest(given: object) -> int:
            seen.append(given)
            return len(seen)

        return digest

    monkeypatch.setattr(runner, "small_digest", counting(whole))
    monkeypatch.setattr(runner, "glimpse", counting(first))
    with engine.initialize(net(), CONFIG) as eng:
        for _ in range(100):
            eng.train_batch(torch.randn(4, 3))
    assert len(whole) == 2 and len(first) == 2 * 3


def test_a_batch_that_is_not_on_the_host_is_not_read() -> None:
    assert batch_check.glimpse({"x": torch.ones(4), "y": torch.ones(4, device="meta")}) is None
    ones, zeros = (batch_check.glimpse({"x": torch.full((4,), value)}) for value in (1.0, 0.0))
    assert None not in (ones, zeros) and ones != zeros


GRIDS: dict[str, tuple[dict[str, int], int, int]] = {
    "dp2": ({"data": 2}, 0, 2),
    "zero 3": ({"data": 2}, 3, 2),
    "tp2": ({"data": 1, "tensor": 2}, 0, 2),
    "pp2": ({"data": 1, "pipeline": 2}, 0, 2),
    "tp2 x pp2": ({"data": 1, "tensor": 2, "pipeline": 2}, 0, 4),
}


@pytest.mark.parametrize(
    "grid", [pytest.param(grid, marks=[pytest.mark.long] * (grid not in ("dp2", "pp2"))) for grid in GRIDS]
)
def test_labels_that_are_all_ignored_train_as_in_one_process_and_are_said(
    grid: str, caplog: pytest.LogCaptureFixture
) -> None:
    parallel, stage, ranks = GRIDS[grid]
    batches = []
    for step in range(3):
        ids = torch.randint(1, models.VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(step))
        labels = ids.clone()
        labels[8:10] = labels[8:10] if step != 1 else -100  # one microbatch, of the second data rank
        batches.append({"input_ids": ids, "labels": labels})
    with caplog.at_level(logging.WARNING, "trine"):
        result = verify(models.llama, config_for(1, stage, parallel=parallel), batches, threads=ranks)
    assert result is not None and result.norm <= 1e-5 and result.weight <= 1e-5
    for record in (result.engine, result.reference):
        assert [loss != loss for loss in record.losses] == [False, True, False]
    said = [record.getMessage() for record in caplog.records if "was made although" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("update 2 was made although the loss was not finite, as one process")


def test_an_update_with_gradients_that_are_not_finite_is_said_where_bf16_makes_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = CONFIG | {"bf16": {"enabled": True, "check_grad_overflow": False}}
    with engine.initialize(net(), config) as eng, caplog.at_level(logging.WARNING, "trine"):
        for value in (1.0, torch.inf, torch.inf):
            eng.train_batch(torch.full((4, 3), value))
    said = [record.getMessage() for record in caplog.records if "was made although" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("update 2 was made although the gradient norm was not finite")
    assert "set bf16.check_grad_overflow to true" in said[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_that_the_engine_is_not_given_are_no_remark(ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    def user_backward(world: World) -> float:
        config = CONFIG | {"parallel": {"data": ranks}}
        with engine.initialize(net, config, world=world) as eng:
            eng(torch.randn(4 // ranks, 3)).backward()
            report = eng.step()
            assert report is not None
            return report.loss

    with caplog.at_level(logging.WARNING, "trine"):
        losses = run_thread_ranks(ranks, user_backward)
    assert all(loss != loss for loss in losses)
    assert not [record for record in caplog.records if "was made although" in record.getMessage()]
