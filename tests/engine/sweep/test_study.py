"""Journal of a sweep: shared trials, trials of dead processes, promotion, and what survives a kill."""

import math
from pathlib import Path
from typing import Any

import pytest

from engine.sweep.settings import SweepConfig, read_sweep
from engine.sweep.study import MOST_STARTS, Assignment, SweepStudy

RATES = [1e-5, 1e-4, 1e-3, 1e-2]
HALVING = {"type": "successive_halving", "params": {"min_resource": 2, "reduction_factor": 2}}


def sweep_of(folder: Path, **more: Any) -> SweepConfig:
    grid = {"space": {"optimizer.params.lr": {"choices": RATES}}, "grid": True, "pruner": HALVING}
    return read_sweep(grid | {"journal": str(folder / "journal")} | more)


def rate(trial: Assignment | None) -> float:
    assert trial is not None
    return float(trial.values["optimizer.params.lr"])


def test_processes_share_the_trials_of_a_grid(tmp_path: Path) -> None:
    first, second = SweepStudy(sweep_of(tmp_path)), SweepStudy(sweep_of(tmp_path))
    seen = []
    for study in (first, second, first, second):
        seen.append(rate(study.next()))
        study.report(1.0, 1)
        study.finish(1, "complete")
    assert sorted(seen) == RATES and seen != RATES, "shuffled, each once"
    assert first.next() is None and second.next() is None


def test_a_trial_of_a_live_process_is_not_taken_and_one_of_a_dead_process_is(tmp_path: Path) -> None:
    first, second = SweepStudy(sweep_of(tmp_path)), SweepStudy(sweep_of(tmp_path))
    left = first.next()
    assert left is not None
    first.report(3.0, 2)
    other = second.next()
    assert other is not None and other.number != left.number
    second.report(2.0, 1)
    second.finish(1, "complete")
    first._locks.close()  # as the kernel does when a process ends
    again = second.next()
    assert again is not None and (again.number, again.values, again.folder) == (left.number, left.values, left.folder)
    assert again.reported == 2


def test_a_trial_that_ends_while_another_process_looks_at_it_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = SweepStudy(sweep_of(tmp_path)), SweepStudy(sweep_of(tmp_path))
    ended = first.next()
    assert ended is not None
    first.report(1.0, 1)
    hold = second._hold

    def hold_after_the_end(folder: Path) -> bool:
        if folder == ended.folder:
            first.finish(1, "complete")
        return hold(folder)

    monkeypatch.setattr(second, "_hold", hold_after_the_end)
    other = second.next()
    assert other is not None and other.number != ended.number
    assert second._folder == other.folder


def test_a_grid_whose_first_process_is_killed_while_it_queues_the_values_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna

    queue, queued = optuna.study.Study.enqueue_trial, list[Any]()

    def killed(study: Any, values: Any, **options: Any) -> None:
        if len(queued) == 2:
            raise KeyboardInterrupt
        queued.append(values)
        queue(study, values, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optuna.study.Study, "enqueue_trial", killed)
        SweepStudy(sweep_of(tmp_path))
    study, seen = SweepStudy(sweep_of(tmp_path)), list[float]()
    while (trial := study.next()) is not None:
        seen.append(rate(trial))
        study.report(1.0, 1)
        study.finish(1, "complete")
    assert sorted(seen) == RATES, "each once"


def test_a_trial_that_kills_its_processes_fails(tmp_path: Path) -> None:
    numbers = []
    for _ in range(MOST_STARTS + 1):
        study = SweepStudy(sweep_of(tmp_path))
        trial = study.next()
        assert trial is not None
        numbers.append(trial.number)
        study._locks.close()
    assert numbers == [0] * MOST_STARTS + [1]
    assert [row.state for row in study.rows()] == ["fail", "running", "waiting", "waiting"]


def test_a_trial_that_makes_progress_is_taken_up_as_often_as_it_is_preempted(tmp_path: Path) -> None:
    for update in range(1, 2 * MOST_STARTS):
        study = SweepStudy(sweep_of(tmp_path))
        trial = study.next()
        assert trial is not None and (trial.number, trial.reported) == (0, update - 1)
        study.report(1.0, update)
        study._locks.close()


def test_the_pruner_of_optuna_decides(tmp_path: Path) -> None:
    study = SweepStudy(sweep_of(tmp_path))
    for value, stopped in ((1.0, False), (2.0, True), (0.5, False)):
        assert study.next() is not None
        assert not study.report(value, 1)
        assert study.report(value, 2) is stopped
        study.finish(2, "pruned" if stopped else "complete")
    states = [(row.state, row.value) for row in study.rows()]
    assert states[:3] == [("complete", 1.0), ("pruned", 2.0), ("complete", 0.5)]
    best = study.best()
    assert best is not None and best.number == 2


def test_promoted_trials_continue_in_their_folders_and_are_not_pruned(tmp_path: Path) -> None:
    study = SweepStudy(sweep_of(tmp_path))
    folders = []
    for value, state in ((1.0, "complete"), (4.0, "pruned"), (2.0, "pruned"), (3.0, "pruned")):
        trial = study.next()
        assert trial is not None
        folders.append(trial.folder)
        study.report(value, 2)
        study.finish(3, state)
    assert study.next() is None
    study.promote(2)
    for origin in (2, 3):
        trial = study.next()
        assert trial is not None and trial.folder == folders[origin] and trial.reported == 0
        assert not study.report(9.0, 4)
        study.finish(4, "complete")
    assert study.next() is None
    study.promote(2)
    trial = study.next()
    assert trial is not None and trial.folder == folders[1]
    study.finish(4, "pruned")
    assert study.next() is None, "each once: only trial 1 was left"


@pytest.mark.parametrize("alike", [True, False])
def test_values_without_effect_are_logged_once(alike: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    study = SweepStudy(sweep_of(tmp_path, pruner="nop"))
    for number in range(3):
        study.next()
        for update in (1, 2, 3):
            study.report(1.0 / update + (update == 3 and not alike) * number, update)
        study.finish(3, "complete")
    said = [record.message for record in caplog.records]
    assert len(said) == alike
    assert not alike or "trials 0 and 1 of the sweep differ in optimizer.params.lr and have made the same" in said[0]


def test_a_process_that_starts_later_draws_other_values(tmp_path: Path) -> None:
    space = {"space": {"optimizer.params.lr": {"log": [1e-5, 1e-2]}}, "grid": False, "trials": 2}
    seeded = {"sampler": {"type": "random", "params": {"seed": 3}}}

    def drawn(folder: Path) -> list[float]:
        found = []
        for _ in range(2):
            study = SweepStudy(sweep_of(folder, **space, **seeded))
            found.append(rate(study.next()))
            study.report(1.0, 1)
            study.finish(1, "complete")
        return found

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = drawn(tmp_path / "a")
    assert first[0] != first[1] and first == drawn(tmp_path / "b")


def test_a_line_that_a_killed_process_has_torn_is_cut(tmp_path: Path) -> None:
    study = SweepStudy(sweep_of(tmp_path))
    study.next()
    whole = (tmp_path / "journal").read_bytes()
    with (tmp_path / "journal").open("ab") as file:
        file.write(b'{"op_code": 6, "wor')
    study._locks.close()
    again = SweepStudy(sweep_of(tmp_path))
    assert (tmp_path / "journal").read_bytes().startswith(whole)
    trial = again.next()
    assert trial is not None and trial.number == 0 and not again.report(1.0, 1)


def test_the_best_of_a_maximized_metric(tmp_path: Path) -> None:
    study = SweepStudy(sweep_of(tmp_path, direction="maximize"))
    for value in (1.0, 3.0, 2.0):
        study.next()
        study.report(value, 1)
        study.finish(1, "complete")
    best = study.best()
    assert best is not None and best.value == 3.0 and math.isfinite(best.value)
