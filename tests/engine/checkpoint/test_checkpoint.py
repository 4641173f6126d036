"""save_checkpoint and load_checkpoint in one process: what comes back, what is refused and how."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.checkpoint.format.filesystem import Files
from engine.data import Sampler
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.parity.test_axes import same


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    } | changes


def start(model: nn.Module | None = None, **changes: Any) -> engine.Engine:
    return engine.initialize(model or models.decoder(), settings(**changes), loss_sum)


RunRanks = Callable[..., list[Any]]
BATCHES = models.batches_for("decoder", 4, 6)


def train(eng: engine.Engine, first: int, last: int) -> list[float]:
    return [eng.train_batch(BATCHES[index]).loss for index in range(first, last)]


def moments(eng: engine.Engine) -> list[dict[str, Any]]:
    return [dict(state) for state in eng.optimizer.state.values()]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint, after two updates."""
    with start() as eng:
        train(eng, 0, 2)
        eng.save_checkpoint(tmp_path / "run", {"note": ["here", 1]}).wait()
    return tmp_path / "run"


# ------------------------------------------------------------------------------------------------ what comes back


def test_a_run_goes_on_bit_for_bit(saved: Path) -> None:
    with start() as eng:
        train(eng, 0, 2)
        expected, state = train(eng, 2, 4), eng.full_state_dict()
    with start() as eng:
        train(eng, 4, 6)  # whatever was before is gone
        assert eng.load_checkpoint(saved) == {"note": ["here", 1]}
        assert eng.step_count == 2
        assert train(eng, 2, 4) == expected
        assert same(eng.full_state_dict(), state)


def test_nothing_there_is_none_and_nothing_given_is_empty(tmp_path: Path) -> None:
    with start() as eng:
        for there in (False, True):
            with pytest.raises(
                engine.CheckpointError,
                match=rf"^load_checkpoint: .*run {'has no checkpoint' if there else 'is not a folder'}; pass the fol",
            ):
                eng.load_checkpoint(tmp_path / "run")
            assert eng.load_checkpoint(tmp_path / "run", missing_ok=True) is None
            (tmp_path / "run").mkdir(exist_ok=True)
        step = eng.save_checkpoint(tmp_path / "run").wait()
        assert step == tmp_path / "run" / "step-00000000", "also before the first step"
        assert eng.load_checkpoint(step) == {}
        assert train(eng, 0, 1)


def test_weights_alone_leave_everything_else_as_it_is(saved: Path) -> None:
    with start() as eng:
        train(eng, 0, 2)
        weights = eng.full_state_dict()
    with start() as eng:
        sampler = Sampler(10, 4)
        eng.register_for_checkpointing(data=sampler)  # the checkpoint has none: not asked for
        train(eng, 3, 4)
        before = [{name: value.clone() for name, value in state.items()} for state in moments(eng)]
        eng.load_checkpoint(saved, load_module_only=True)
        assert same(eng.full_state_dict(), weights)
        assert eng.step_count == 1
        after = moments(eng)
        assert all(torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a)


def test_without_optimizer_states_the_optimizer_starts_fresh(saved: Path) -> None:
    with start() as eng:
        eng.load_checkpoint(saved, load_optimizer_states=False)
        assert eng.step_count == 2 and not eng.optimizer.state
        assert all("step" not in group for group in eng.optimizer.param_groups)
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    with start(optimizer=sgd) as eng:
        eng.load_checkpoint(saved, load_optimizer_states=False)
        assert train(eng, 2, 3)


def goes_on_uncut(folder: Path) -> list[float]:
    """Tensor ranks without an example plan from the first batch."""
    with start(parallel={"data": 1, "tensor": 2}) as eng:
        with pytest.raises(engine.EngineError, match=r"^save_checkpoint was called before the model is placed"):
            eng.save_checkpoint(folder)
        assert eng.load_checkpoint(folder) == {"note": ["here", 1]}
        losses = train(eng, 2, 4)
        assert eng.step_count == 4
        return losses


def test_a_load_before_the_model_is_cut_waits_for_the_first_batch(run_ranks: RunRanks, saved: Path) -> None:
    with start() as eng:
        eng.load_checkpoint(saved)
        expected = train(eng, 2, 4)
    for losses in run_ranks(goes_on_uncut, 2, saved):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_every_saves_and_keep_keeps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = {"folder": str(tmp_path / "run"), "every": 2, "keep": 2}
    with caplog.at_level(logging.INFO, "trine"), start(checkpoint=checkpoint) as eng:
        train(eng, 0, 6)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".trine.lock",
        "latest",
        "step-00000004",
        "step-00000006",
    ]
    assert sum("checkpoint saved" in record.message for record in caplog.records) == 3
    with start(checkpoint=checkpoint) as eng:
        assert eng.load_checkpoint() == {} and eng.step_count == 6


def test_an_older_step_may_be_gone_back_to(tmp_path: Path) -> None:
    """The newest is what the run goes on from: steps of the course that was left are set aside."""
    with start() as eng:
        for index in range(3):
            train(eng, index, index + 1)
            eng.save_checkpoint(tmp_path)
        eng.load_checkpoint(tmp_path / "step-00000001")
        train(eng, 4, 5)
        other = eng.full_state_dict()
        again = eng.save_checkpoint(tmp_path).wait()
        assert again.name == "step-00000002-r1"
        twice = eng.save_checkpoint(tmp_path, {"again": True}).wait()
        assert twice.name == "step-00000002-r2"
    with start() as eng:
        assert eng.load_checkpoint(tmp_path) == {"again": True}
        assert same(eng.full_state_dict(), other)
    assert any(path.name.startswith("abandoned-") and "step-00000003" in path.name for path in tmp_path.iterdir())


def test_what_is_registered_comes_back(tmp_path: Path) -> None:
    sampler = Sampler(50, 4, seed=3)
    with start() as eng:
        eng.register_for_checkpointing(data=sampler)
        for _ in range(3):
            next(sampler)
        eng.save_checkpoint(tmp_path).wait()
        expected = next(sampler).tolist()
    again = Sampler(50, 4, seed=3)
    with start() as eng:
        eng.register_for_checkpointing(data=again)
        eng.load_checkpoint(tmp_path)
    assert next(again).tolist() == expected


def test_the_state_saved_is_that_of_the_call(tmp_path: Path) -> None:
    client: dict[str, Any] = {"list": [1]}
    with start() as eng:
        train(eng, 0, 1)
        state = eng.full_state_dict()
        pending = eng.save_checkpoint(tmp_path, client)
        client["list"].append(2)
        train(eng, 1, 3)
        pending.wait()
        assert eng.load_checkpoint(tmp_path) == {"list": [1]}
        assert same(eng.full_state_dict(), state)


# ------------------------------------------------------------------------------------------------ what is refused


def refusal(folder: Path, model: nn.Module | None = None, **changes: Any) -> str:
    with start(model, **changes) as eng, pytest.raises(engine.CheckpointError) as caught:
        eng.load_checkpoint(folder)
    return str(caught.value)


def test_another_model_is_refused_with_the_first_difference(saved: Path) -> None:
    step, remedy = saved / "step-00000002", "build the model that was saved, or load another checkpoint."
    said = refusal(saved, models.decoder(layers=3))
    assert said == f"{step} lacks 'blocks.2.norm1.weight', which this model has; {remedy}"
    said = refusal(saved, models.decoder(layers=1))
    assert said.startswith(f"{step} has 'blocks.1.") and said.endswith(f"which this model lacks; {remedy}")
    other = models.decoder()
    other.head = nn.Linear(32, models.VOCABULARY + 1, bias=False)
    said = refusal(saved, other)
    assert said == f"'head.weight' has shape [61, 32] in {step} and [62, 32] in this model; {remedy}"


def test_a_refused_model_is_left_as_it_was(saved: Path) -> None:
    with start(models.decoder(layers=3)) as eng:
        before = eng.full_state_dict()
        with pytest.raises(engine.CheckpointError):
            eng.load_checkpoint(saved)
        assert same(eng.full_state_dict(), before)
        assert train(eng, 0, 1)


def test_another_optimizer_is_refused_with_the_way_out(saved: Path) -> None:
    said = refusal(saved, optimizer={"type": "SGD"})
    assert said == (
        f"{saved / 'step-00000002'} has the optimizer state of Adam, but this run's optimizer is SGD; configure the "
        "same optimizer, or load the weights alone with load_optimizer_states=False."
    )


def test_a_parameter_that_was_frozen_then_is_named(tmp_path: Path) -> None:
    frozen = models.decoder()
    frozen.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    with start(frozen) as eng:
        train(eng, 0, 1)
        eng.save_checkpoint(tmp_path).wait()
    with start() as eng, pytest.raises(engine.CheckpointError, match=r"has no 'exp_avg/head.weight': .* load_opt"):
        eng.load_checkpoint(tmp_path)


class Mute:
    """Cannot be saved."""


class Odd:
    """Its state is no JSON."""

    def state_dict(self) -> Mapping[str, Any]:
        return {"set": {1, 2}}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_calls_that_cannot_be_right(tmp_path: Path, saved: Path) -> None:
    with start() as eng:
        with pytest.raises(engine.EngineError, match=r"^save_checkpoint\(\) got no folder, and checkpoint.folder"):
            eng.save_checkpoint()
        with pytest.raises(engine.EngineError, match=r"^load_checkpoint\(\) got no folder"):
            eng.load_checkpoint()
        with pytest.raises(engine.EngineError, match=r"^save_checkpoint\(folder, 'best'\): the second argument is cl"):
            eng.save_checkpoint(tmp_path / "odd", "best")
        with pytest.raises(engine.EngineError, match=r"^register_for_checkpointing\(thing=...\): a Mute lacks state"):
            eng.register_for_checkpointing(thing=Mute())
        with pytest.raises(
            engine.CheckpointError, match=r"^not saved: the client_state cannot be saved as JSON: .* use dicts, lists"
        ):
            eng.save_checkpoint(tmp_path / "odd", {"x": float("nan")}).wait()
        eng.register_for_checkpointing(odd=Odd())
        with pytest.raises(engine.CheckpointError, match=r"^not saved: the state of 'odd' cannot be saved"):
            eng.save_checkpoint(tmp_path / "odd").wait()
        with pytest.raises(engine.CheckpointError, match=r"has no state of 'odd', which is registered"):
            eng.load_checkpoint(saved)
        eng.backward(loss_sum(eng(BATCHES[0]), BATCHES[0]))
        with pytest.raises(
            engine.EngineError, match=r"inside an unfinished accumulation; call step\(\) first, or zero_"
        ):
            eng.load_checkpoint(tmp_path / "x")
    assert not (tmp_path / "odd").exists() or not list((tmp_path / "odd").iterdir())


def inside_full_parameters(folder: Path) -> None:
    with start(zero_optimization={"stage": 3}) as eng:
        with (
            eng.full_parameters("head.*"),
            pytest.raises(engine.EngineError, match=r"^save_checkpoint cannot run inside full_p"),
        ):
            eng.save_checkpoint(folder)
        eng.save_checkpoint(folder).wait()


def test_not_inside_full_parameters(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(inside_full_parameters, 2, tmp_path)


def test_an_optimizer_whose_state_has_other_shapes_is_refused_by_name(tmp_path: Path) -> None:
    with engine.initialize(
        models.decoder(), settings(), loss_sum, optimizer=lambda groups: torch.optim.Adafactor(groups)
    ) as eng:
        train(eng, 0, 1)
        with pytest.raises(engine.CheckpointError, match=r"optimizer Adafactor has the state 'row_var', a tensor"):
            eng.save_checkpoint(tmp_path).wait()
        assert train(eng, 1, 2)


@pytest.mark.parametrize("reaction", ["continue", "stop"])
def test_a_last_save_that_fails_ends_the_run_with_it_if_asked(tmp_path: Path, reaction: str) -> None:
    """The folder is a file: nothing can be written there."""
    (tmp_path / "run").write_text("")
    eng = start(checkpoint={"folder": str(tmp_path / "run"), "on_failure": reaction})
    train(eng, 0, 1)
    pending = eng.save_checkpoint()
    with pytest.raises(engine.CheckpointError, match="run"):
        pending.wait()
    if reaction == "continue":
        assert train(eng, 1, 2)
        eng.close()
        return
    with pytest.raises(engine.CheckpointError, match=r"^the checkpoint of step 1 was not saved .*: .*run"):
        eng.close()


def test_two_engines_in_one_folder_leave_each_others_save_alone(tmp_path: Path) -> None:
    """A folder that is being written is locked; one that a dead run has left is swept."""
    dead, living = (tmp_path / f"step-00000007.tmp-{name}" for name in ("0123abcd", "4567abcd"))
    for folder in (dead, living):
        (folder / "model").mkdir(parents=True)
    with start() as eng, Files().locked(living) as free:
        assert free
        eng.save_checkpoint(tmp_path).wait()
        assert living.is_dir() and not dead.exists()
        with Files().locked(living) as again:
            assert not again
    with start() as eng:
        eng.save_checkpoint(tmp_path).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".trine.lock",
        "latest",
        "step-00000000",
        "step-00000000-r1",
    ]
