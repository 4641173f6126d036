"""Trials in a loop of one's own: their configurations, reports and ends."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import ConfigError, EngineError
from tests.launch import swept
from tests.launches import Launch

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}


def sweep_of(folder: Path, **more: Any) -> engine.Sweep:
    space = {"optimizer.params.lr": {"choices": [0.1, 0.2]}}
    return engine.Sweep({"space": space, "grid": True, "pruner": "nop", "journal": str(folder / "journal")} | more)


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.mean()


def engine_of(trial: engine.SweepTrial, **more: Any) -> engine.Engine:
    torch.manual_seed(0)
    return trial.initialize(nn.Linear(2, 1), CONFIG | more, loss)


def reports(folder: Path) -> list[tuple[int, float]]:
    """Returns (update, value) of all reports in the journal."""
    lines = [json.loads(line) for line in (folder / "journal").read_text().splitlines()]
    return [(line["step"], line["intermediate_value"]) for line in lines if "intermediate_value" in line]


def test_a_trial_changes_its_keys_and_has_its_own_folder(tmp_path: Path) -> None:
    trial = sweep_of(tmp_path).ask()
    assert trial is not None and trial.folder == tmp_path / "journal.trials/0"
    logged = CONFIG | {"monitor": {"jsonl": "runs/log.jsonl", "every": 5}, "checkpoint": {"folder": "x", "every": 7}}
    made = engine.load_config(trial.configuration(logged))
    assert made.optimizer is not None and made.optimizer.params["lr"] == trial.values["optimizer.params.lr"]
    assert made.checkpoint.folder == str(trial.folder / "checkpoints") and made.checkpoint.every == 7
    assert made.monitor.jsonl == str(trial.folder / "log.jsonl") and made.monitor.every == 5
    assert engine.load_config(trial.configuration(engine.load_config(logged))) == made
    assert CONFIG["optimizer"] == {"type": "SGD", "params": {"lr": 1.0}}


def test_a_report_is_the_mean_since_the_last_one(tmp_path: Path) -> None:
    sweep, losses = sweep_of(tmp_path, report_every=2), list[float]()
    trial = sweep.ask()
    assert trial is not None
    with engine_of(trial) as eng:
        losses += [eng.train_batch(torch.ones(4, 2)).loss for _ in range(5)]
    row = sweep.tell()
    assert reports(tmp_path) == [(2, sum(losses[:2]) / 2), (4, sum(losses[2:4]) / 2)]
    assert row is not None and (row.updates, row.value, row.state) == (5, sum(losses[2:4]) / 2, "complete")


def test_a_loop_with_its_own_metric_ends_after_the_step_that_follows(tmp_path: Path) -> None:
    pruner = {"type": "threshold", "params": {"upper": 1.0}}
    made = list[int]()
    for trial in (sweep := sweep_of(tmp_path, metric=None, pruner=pruner)):
        with engine_of(trial) as eng:
            while eng.step_count < 6 and not trial.should_prune():
                report = eng.train_batch(torch.ones(4, 2))
                trial.report(2.0 if report.step == 3 and not made else 0.5, report.step)
            made.append(eng.step_count)
            if trial.should_prune():
                assert [path.name for path in (trial.folder / "checkpoints").iterdir() if path.is_dir()] == [
                    "step-00000004"
                ]
    assert made == [4, 6] and [row.state for row in sweep.rows()] == ["pruned", "complete"]


def test_a_script_with_a_folder_of_its_own_saves_into_the_trial_s_and_continues_from_the_newest(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with engine.initialize(nn.Linear(2, 1), CONFIG, loss) as eng:
        eng.train_batch(torch.ones(4, 2))
        eng.save_checkpoint(base).wait()
    ends = []
    for trial in sweep_of(tmp_path):
        with engine_of(trial) as eng:
            eng.load_checkpoint(base)
            assert eng.step_count == 1, "the trial has none of its own"
            eng.train_batch(torch.ones(4, 2))
            saved = eng.save_checkpoint(base).wait()
            assert saved.parent == trial.folder / "base"
            eng.train_batch(torch.ones(4, 2))
            eng.save_checkpoint().wait()
            eng.load_checkpoint(base)
            assert eng.step_count == 2, "the folder that the call names"
            eng.load_checkpoint(saved)
        trial.release()
        with engine_of(trial) as eng:
            eng.load_checkpoint(base)
            ends.append(eng.step_count)
    assert ends == [3, 3] and [path.name for path in base.glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize("last", [False, True])
def test_a_loss_that_is_not_finite_ends_the_trial(last: bool, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path)
    trial = sweep.ask()
    assert trial is not None
    with engine_of(trial) as eng:
        eng.train_batch(torch.ones(4, 2))
        skipped = eng.train_batch(torch.full((4, 2), math.inf))
        assert skipped.skipped and not trial.should_prune()
        if not last:
            eng.train_batch(torch.ones(4, 2))
            assert trial.should_prune()
    row = sweep.tell()
    assert row is not None and row.state == "pruned" and reports(tmp_path)[0][0] == 1


def refused(folder: str) -> list[str]:
    """Body of a rank: mistakes that only ranks together, or rank 0 alone, can find."""
    import torch.distributed as dist

    rank, said = dist.get_rank(), list[str]()
    given = {"space": {"optimizer.params.lr": {"choices": [0.1]}}, "grid": True}
    for changes in ({"report_every": 1 + rank, "journal": f"{folder}/a"}, {"journal": folder}):
        try:
            engine.Sweep(given | changes).ask()
        except ConfigError as error:
            said.append(str(error))
    return said


def test_mistakes_that_ranks_find_together_are_the_same_on_all(tmp_path: Path, run_ranks: Any) -> None:
    first, second = run_ranks(refused, 2, str(tmp_path))
    assert first == second and len(first) == 2
    assert first[0] == (
        "ranks were given different sweeps: report_every is 1 on rank 0 and 2 on rank 1; start all with the same file."
    )
    assert first[1].startswith(f"journal: {tmp_path} cannot be used (")


def test_mistakes_of_a_loop_are_one_sentence(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, metric="metrics/top1")
    with pytest.raises(EngineError, match=r"tell\(\) before ask\(\): there is no trial; call ask\(\) first\."):
        sweep.tell()
    trial = sweep.ask()
    assert trial is not None
    with pytest.raises(EngineError, match=r"ask\(\) inside trial 0; call tell\(\) first, or iterate over the sweep\."):
        sweep.ask()
    with pytest.raises(ConfigError, match=r"metric metrics/top1 never comes, because monitor.metrics .* is \[\]; add"):
        engine_of(trial)
    given = CONFIG | {"monitor": {"metrics": ["top1"]}}
    with pytest.raises(ConfigError, match=r"optimizer.params.lr of the sweep changes nothing, because optimizer="):
        trial.initialize(nn.Linear(2, 1), given, loss, optimizer=torch.optim.SGD)
    with trial.initialize(nn.Linear(2, 1), given, lambda output, batch: (output.mean(), {"top1": 0.5})) as eng:
        assert eng.train_batch(torch.ones(4, 2)).metrics == {"top1": 0.5}
        with pytest.raises(EngineError, match="trial 0 of the sweep initializes a second engine with an optimizer"):
            trial.initialize(nn.Linear(2, 1), given, loss)
    assert reports(tmp_path) == [(1, 0.5)]


def test_a_job_that_receives_sigterm_leaves_its_trial_to_the_next(tmp_path: Path) -> None:
    settings = swept.write(tmp_path, space={"optimizer.params.lr": {"choices": [0.1]}})
    script = tmp_path / "train.py"
    ends = "time.sleep(pause)\n            if eng.step_count == 5: import os; os.kill(os.getpid(), 15)"
    script.write_text(swept.SCRIPT.replace("time.sleep(pause)", ends))
    for code, said in ((143, []), (0, ["done"])):
        with Launch(swept.run_until_killed, 1, swept.words(settings)) as job:
            (rank,) = job.end()
        assert (rank.code, rank.said) == (code, said), rank.error
    assert [(line["begun"], line["updates"]) for line in swept.lines(tmp_path, 0)] == [(0, 6), (6, swept.STEPS)]
