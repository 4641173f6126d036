"""Folders, client states and what is said of a load: where a caller's mistake was taken for something else."""

import copy
import gc
import json
import logging
import pickle
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.launch.cli import main as trine
from tests.engine.checkpoint.test_checkpoint import start, train

RunRanks = Callable[..., list[Any]]


def test_a_load_names_the_command_that_checks_what_it_did_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with start() as eng:
        train(eng, 0, 2)
        optim = next((eng.save_checkpoint(tmp_path).wait() / "optim").iterdir())
    optim.write_bytes(optim.read_bytes()[:-1] + b"x")
    with caplog.at_level(logging.INFO, "trine"), start() as eng:
        eng.load_checkpoint(tmp_path, load_module_only=True)
    (command,) = re.findall(r"updates made; the loaded data is sound, and `trine (.*)` checks the rest", caplog.text)
    assert trine(shlex.split(command)) == 1 and "optim-00000.safetensors is damaged" in capsys.readouterr().err


def test_a_client_state_is_not_unpacked_like_a_pair(tmp_path: Path) -> None:
    given = {"path": "here", "state": {"epoch": 1}}
    with start() as eng:
        eng.save_checkpoint(tmp_path, given).wait()
        state = eng.load_checkpoint(tmp_path)
        with pytest.raises(engine.EngineError, match=r"client state alone, not \(path, client_state\); write `state ="):
            _, _ = state
        assert state == given and {**state} == given and dict(state) == given and state["path"] == "here"
        assert json.loads(json.dumps(state)) == given and copy.deepcopy(state) == pickle.loads(pickle.dumps(state))
        assert list(state.items()) == [("path", "here"), ("state", {"epoch": 1})] and "path" in state
        eng.save_checkpoint(tmp_path, state).wait()
        assert eng.load_checkpoint(tmp_path) == given


def other_folders(folder: Path) -> list[str]:
    """Body of a rank: every rank names a folder of its own."""
    with start(parallel={"data": 2}) as eng:
        mine, told = folder / f"of rank {eng.grid.rank}", []
        for call in (lambda: eng.save_checkpoint(mine).wait(), lambda: eng.save_pretrained(mine)):
            with pytest.raises(engine.CheckpointError) as caught:
                call()
            told.append(str(caught.value))
        eng.save_checkpoint(folder / "of rank 0").wait()
        with pytest.raises(engine.CheckpointError) as caught:
            eng.load_checkpoint(mine)
        return [*told, str(caught.value)]


def test_other_folders_on_other_ranks_are_refused_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    saved, exported, loaded = (first := run_ranks(other_folders, 2, tmp_path))[0]
    assert first[0] == first[1] and saved == exported
    assert re.match(r"not saved: rank 1 was to save into '.*of rank 1' and rank 0 into '.*of rank 0', but all", saved)
    assert re.match(r"load_checkpoint was given '.*of rank 1' on rank 1 and '.*of rank 0' on rank 0, but one", loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["of rank 0"]


# ------------------------------------------------------------------------------------------------ two engines


def test_two_engines_do_not_save_into_one_folder(tmp_path: Path) -> None:
    run, other = {"folder": str(tmp_path / "run")}, tmp_path / "other"
    with start(checkpoint=run) as eng:
        with (
            start(checkpoint=run) as second,  # an engine that is about to be replaced would be in its way
            pytest.raises(engine.CheckpointError, match=r"run: another engine \(this process, since .* saves its"),
        ):
            second.save_checkpoint().wait()
        with start() as guest:
            guest.save_checkpoint(other).wait()
            for folder in (tmp_path / "run", other):
                pending = (guest if folder != other else eng).save_checkpoint(folder)
                with pytest.raises(engine.CheckpointError, match=r"another engine \(this process"):
                    pending.wait()
        train(eng, 0, 1)
        eng.save_checkpoint(other).wait()
        eng.save_checkpoint().wait()
    with start(checkpoint=run) as eng:
        assert eng.load_checkpoint() == {} and eng.step_count == 1
    del eng
    start(checkpoint=run)
    gc.collect()
    with start(checkpoint=run):
        pass
