"""The engine in one process: both loops, evaluation, state, and what it does not touch."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.flight.flight import FlightFile
from engine.parallel.comm.flight.recorder import FlightRecorder
from tests import models

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
}


def batches(steps: int = 3) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = models.batches_for("decoder", 8, steps)
    return found


@pytest.fixture
def eng() -> Iterator[engine.Engine]:
    with engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum) as made:
        yield made


def weights(eng: engine.Engine) -> dict[str, Tensor]:
    return eng.full_state_dict()


def test_loss_falls_and_report_is_complete(eng: engine.Engine, tmp_path: Path) -> None:
    recorder = eng._parts.comm.recorder = FlightRecorder(tmp_path / "rank0.flight", 0, 1, {})
    reports = [eng.train_batch(batches(1)[0]) for _ in range(5)]
    assert reports[-1].loss < reports[0].loss
    last = reports[-1]
    assert (last.step, eng.step_count, last.tokens, last.skipped) == (5, 5, 8 * models.LENGTH, False)
    assert last.bytes_sent == 0 and last.peak_bytes > 0 and last.seconds > 0 and last.tokens_per_second > 0
    assert last.mfu is None and last.tflops is not None and last.tflops > 0
    assert FlightFile(recorder.path).read().step == 5, "the watchdog counts the step that has just ended"


def test_three_calls_equal_train_batch() -> None:
    mean = nn.CrossEntropyLoss()

    def mean_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = mean(logits.flatten(0, 1), batch["labels"].flatten())
        return loss

    with engine.initialize(models.decoder(), CONFIG, loss_fn=mean_loss) as whole:
        first = [whole.train_batch(batch) for batch in batches()]
        expected = weights(whole)
    with engine.initialize(models.decoder(), CONFIG) as loop:
        second = []
        for batch in batches():
            for start in range(0, 8, 2):
                part = {key: value[start : start + 2] for key, value in batch.items()}
                loop.backward(mean_loss(loop(part), part))
                report = loop.step()
                assert (report is None) == (start < 6), "step is a no-op off the boundary"
            assert report is not None
            second.append(report)
        actual = weights(loop)
    assert [r.loss for r in first] == [r.loss for r in second]
    assert [r.grad_norm for r in first] == [r.grad_norm for r in second]
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_loop_passes_arguments_as_the_model_takes_them() -> None:
    with engine.initialize(models.nano(), CONFIG) as eng:
        tokens = models.token_batches(2, 1)[0]
        _, loss = eng(tokens[:, :-1], tokens[:, 1:])
        _, same = eng((tokens[:, :-1], tokens[:, 1:]))
        assert torch.equal(loss, same)


def test_iterator_of_microbatches_equals_one_batch(eng: engine.Engine) -> None:
    batch = batches(1)[0]
    expected = eng.train_batch(batch).loss
    parts = iter([{key: value[i : i + 2] for key, value in batch.items()} for i in range(0, 16, 2)][:4] * 2)
    with engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum) as other:
        assert other.train_batch(parts).loss == expected
        assert len(list(parts)) == 4, "exactly accumulation items are pulled"


def test_evaluation_touches_nothing() -> None:
    with engine.initialize(models.decoder(dropout=0.5), CONFIG, loss_fn=loss_sum) as eng:
        eng.module.get_submodule("blocks.0").eval()
        modes = [module.training for module in eng.module.modules()]
        before, random = weights(eng), torch.get_rng_state()
        first = eng.eval_batch(batches(1)[0])
        second, output = eng.eval_batch(batches(1)[0], return_output=True)
        assert first.loss == second.loss
        assert math.isnan(first.grad_norm) and output.shape == (8, models.LENGTH, models.VOCABULARY)
        assert [module.training for module in eng.module.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random) and eng.step_count == 0
        assert all(torch.equal(before[name], value) for name, value in weights(eng).items())


def test_evaluation_gives_the_loss_that_training_starts_from(eng: engine.Engine) -> None:
    batch = batches(1)[0]
    assert eng.eval_batch(batch).loss == eng.train_batch(batch).loss


def test_training_leaves_modes_and_the_users_random_stream_alone() -> None:
    with engine.initialize(models.decoder(dropout=0.5), CONFIG, loss_fn=loss_sum) as eng:
        eng.module.get_submodule("blocks.1").eval()
        modes = [module.training for module in eng.module.modules()]
        random = torch.get_rng_state()
        eng.train_batch(batches(1)[0])
        assert torch.equal(torch.get_rng_state(), random)
        assert [module.training for module in eng.module.modules()] == modes


@pytest.mark.parametrize("bf16", [False, True])
def test_full_state_has_the_keys_and_dtypes_of_the_model(bf16: bool) -> None:
    model = models.decoder(tied=True)
    model.register_buffer("table", torch.arange(3.0))
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    given = {key: value.clone() for key, value in model.state_dict().items()}
    with engine.initialize(model, CONFIG | {"bf16": {"enabled": bf16}}, loss_fn=loss_sum) as eng:
        state = eng.full_state_dict()
        assert list(state) == list(given)
        assert all(torch.equal(state[key], given[key]) and state[key].dtype == given[key].dtype for key in given)
        assert torch.equal(state["head.weight"], state["tokens.weight"])
        eng.train_batch(batches(1)[0])
        assert not torch.equal(state["head.weight"], eng.full_state_dict()["head.weight"]), "state is a copy"


def test_non_finite_step_changes_nothing_but_the_count() -> None:
    def poisoned(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        total, weight = loss_sum(logits, batch)
        return total * (math.inf if poison else 1.0), weight

    poison = False
    settings = CONFIG | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    with engine.initialize(models.decoder(), settings, loss_fn=poisoned) as eng:
        eng.train_batch(batches(1)[0])
        before, lr = weights(eng), eng.lr
        moments = [value.clone() for state in eng.optimizer.state.values() for value in state.values()]
        poison = True
        report = eng.train_batch(batches(1)[0])
        assert report.skipped and not math.isfinite(report.grad_norm)
        assert (eng.step_count, eng.skipped_steps, eng.lr) == (1, 1, lr)
        assert all(torch.equal(before[name], value) for name, value in weights(eng).items())
        after = [value for state in eng.optimizer.state.values() for value in state.values()]
        assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
        poison = False
        assert not eng.train_batch(batches(1)[0]).skipped and eng.step_count == 2


def test_two_engines_live_in_one_process() -> None:
    with (
        engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum) as student,
        engine.initialize(models.decoder(), CONFIG, loss_fn=loss_sum) as teacher,
    ):
        a = [student.train_batch(batch).loss for batch in batches()]
        b = [teacher.train_batch(batch).loss for batch in batches()]
    assert a == b


def test_optimizer_and_scheduler_of_the_user() -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)

    def scheduler(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(made, step_size=1, gamma=0.1)

    for lr_scheduler in (scheduler, lambda update: 0.1**update):
        with engine.initialize(
            models.decoder(), CONFIG, loss_fn=loss_sum, optimizer=optimizer, lr_scheduler=lr_scheduler
        ) as eng:
            assert [round(eng.train_batch(batch).lr, 9) for batch in batches()] == [0.5, 0.05, 0.005]
            assert isinstance(eng.optimizer, torch.optim.SGD)


def test_callable_model_is_built_under_the_seed() -> None:
    def build() -> nn.Module:
        return nn.Linear(4, 1)

    def loss(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        return F.mse_loss(output, torch.zeros_like(output))

    random = torch.get_rng_state()
    states = []
    for _ in range(2):
        with engine.initialize(build, CONFIG, loss_fn=loss) as eng:
            states.append(eng.full_state_dict()["weight"])
    assert torch.equal(states[0], states[1]) and torch.equal(torch.get_rng_state(), random)


def test_hugging_face_cache_is_off_and_its_mean_of_means_is_noted() -> None:
    with engine.initialize(models.llama(), CONFIG) as eng:
        assert getattr(eng.module.config, "use_cache", None) is False
        assert any("(sum, weight)" in note for note in eng.plan.notes)


def test_float_inputs_follow_bf16() -> None:
    class Regressor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("shift", torch.ones(4))
            self.shift: Tensor

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(self.layer(x + self.shift), target)

    with engine.initialize(Regressor(), CONFIG | {"bf16": {"enabled": True}}) as eng:
        report = eng.train_batch({"x": torch.randn(8, 4), "target": torch.randn(8, 1)})
        assert math.isfinite(report.loss) and report.tokens == 8


def test_monitor_writes_json_lines(tmp_path: Any) -> None:
    import json

    settings = CONFIG | {"monitor": {"jsonl": str(tmp_path / "log" / "m.jsonl"), "every": 1}}
    with engine.initialize(models.decoder(), settings, loss_fn=loss_sum) as eng:
        losses = [eng.train_batch(batch).loss for batch in batches()]
    lines = [json.loads(line) for line in (tmp_path / "log" / "m.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses and [line["step"] for line in lines] == [1, 2, 3]


def test_monitor_writes_tensorboard(tmp_path: Any) -> None:
    settings = CONFIG | {"monitor": {"tensorboard": str(tmp_path / "board"), "every": 1}}
    with engine.initialize(models.decoder(), settings, loss_fn=loss_sum) as eng:
        eng.train_batch(batches(1)[0])
    assert list((tmp_path / "board").glob("events*"))


def test_state_dict_hooks_that_rename_keys_export_the_masters() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = models.decoder()
    model.register_module("norm", checkpoint_wrapper(model.get_submodule("norm")))
    given = {key: value.clone() for key, value in model.state_dict().items()}
    with engine.initialize(model, CONFIG | {"bf16": {"enabled": True}}, loss_fn=loss_sum) as eng:
        state = eng.full_state_dict()
    assert list(state) == list(given) and all(torch.equal(state[key], given[key]) for key in given)


def close_the_first() -> list[float]:
    """Two engines over one process group; the second goes on when the first is closed."""
    first = engine.initialize(models.decoder(), CONFIG | {"train_batch_size": 16}, loss_fn=loss_sum)
    second = engine.initialize(models.decoder(), CONFIG | {"train_batch_size": 16}, loss_fn=loss_sum)
    first.train_batch(batches(1)[0])
    first.close()
    return [second.train_batch(batch).loss for batch in batches()]


def test_closing_one_engine_leaves_the_other(run_ranks: Any) -> None:
    assert len(set(map(tuple, run_ranks(close_the_first, 2)))) == 1


def test_second_forward_in_a_microbatch_draws_other_numbers() -> None:
    with engine.initialize(models.decoder(dropout=0.5), CONFIG, loss_fn=loss_sum) as eng:
        part = {key: value[:2] for key, value in batches(1)[0].items()}
        first, second = eng(part), eng(part)
        assert not torch.equal(first, second)


def test_an_evaluation_forward_changes_neither_masks_nor_the_clock() -> None:
    part = {key: value[:2] for key, value in batches(1)[0].items()}
    outputs = []
    for evaluate in (False, True):
        with engine.initialize(models.decoder(dropout=0.5), CONFIG, loss_fn=loss_sum) as eng:
            if evaluate:
                with torch.no_grad():
                    eng(part)
                time.sleep(0.5)
            outputs.append(eng(part).detach())
            assert eng.train_batch(batches(1)[0]).seconds < 0.5
    assert torch.equal(outputs[0], outputs[1])
