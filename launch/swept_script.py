"""Runs of one unchanged script in the same process, once for each trial of a sweep.

The call of ``engine.initialize`` gets the values of the trial; steps report; a pruned trial leaves the script by
``TrialEnd``. Each run begins with the same state of all random generators.
"""

import gc
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.api import initialize
from engine.build.answered_calls import answered_by
from engine.config import load_config
from engine.errors import PlanError
from engine.launch.verifier.script_run import started_as
from engine.parallel.comm.world import read_world
from engine.parallel.model.rng_streams import HostState, generators_of
from engine.sweep.settings import SweepConfig
from engine.sweep.study import TrialRow
from engine.sweep.sweep import Sweep
from engine.sweep.trial import SweepTrial


def sweep_script(
    settings: SweepConfig,
    script: Path,
    arguments: Sequence[str],
    promote: int,
    show: Callable[[TrialRow, SweepConfig], None],
) -> Sweep:
    """Runs ``script`` once for each trial of a hyperparameter sweep; returns the finished sweep. All ranks must call
    it.

    Args:
        promote: number of trials to continue from checkpoints: the best that earlier runs of the sweep pruned.
        show: callback on rank 0 for each finished trial.

    Raises:
        ConfigError: the settings or the script's configuration have a mistake.
        PlanError: the script ends without an engine that trains.
    """
    sweep = Sweep(settings, promote)
    generators = generators_of(read_world().device)
    host, states = HostState.take(), [generator.get_state() for generator in generators]
    while (trial := sweep.ask(leaves=True)) is not None:
        host.put()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        try:
            _run(trial, script, arguments)
        except Exception:
            sweep.tell(failed=True)
            raise
        row = sweep.tell()
        if row is not None:
            show(row, settings)
    return sweep


def _run(trial: SweepTrial, script: Path, arguments: Sequence[str]) -> None:
    """Runs the script to its end, or to the end of the trial."""
    plain: Callable[..., Any] = initialize.__wrapped__  # type: ignore[attr-defined]

    def answer(given: Mapping[str, Any]) -> Any:
        trains = given["optimizer"] is not None or load_config(given["config"]).optimizer is not None
        return (trial.initialize if trains else plain)(**given)

    try:
        with answered_by(answer), started_as(script, arguments):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise  # SIGTERM, after a checkpoint: the trial still runs in the journal, and is taken up
    if trial.engine is None:
        raise PlanError(
            f"{script} ends without a call of engine.initialize that trains; give the script that trains the model."
        )
    trial.release()
    gc.collect()
