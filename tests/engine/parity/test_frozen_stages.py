"""Stages of which nothing, or hardly anything, is trained: with every ZeRO stage, saved and loaded."""

from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import engine
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests import models
from tests.engine.parity.launches import settings
from tests.models import take_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

TRAINED: dict[str, tuple[str, ...]] = {
    "the last blocks": ("h.3.*", "ln_f.*", "lm_head.*"),
    "the head": ("lm_head.weight",),
    "the first block": ("h.0.*",),
    "one block in the middle": ("h.1.*",),
    "one bias": ("h.2.fc.bias",),
    "the embedding and the head, which are tied": ("wte.weight",),
}


def partly(trained: tuple[str, ...]) -> nn.Module:
    """nanoGPT of four blocks of which only some parameters are trained."""
    model: Any = models.nano(4)
    if trained == TRAINED["the head"]:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in trained))
    return model  # type: ignore[no-any-return]


def batches() -> list[Any]:
    return [(t[:, :-1], t[:, 1:]) for t in models.token_batches(8, 4)]


def train(case: str, config: dict[str, Any], folder: str) -> tuple[TrainingRecord, TrainingRecord]:
    """Body of a rank: four steps in one go, and two steps, a checkpoint and two more in another engine."""
    build, steps = partial(partly, TRAINED[case]), batches()

    def play(eng: engine.Engine, some: list[Any], before: tuple[Any, ...] = ((), ())) -> TrainingRecord:
        rows, first = eng.config.micro * eng.config.accumulation, eng.grid.coord().dp
        reports = [eng.train_batch(take_rows(batch, first * rows, rows)) for batch in some]
        losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
        return TrainingRecord((*before[0], *losses), (*before[1], *norms), eng.full_state_dict())

    def start() -> engine.Engine:
        return engine.initialize(build, config, example_batch=take_rows(steps[0], 0, 2))

    with start() as eng:
        whole = play(eng, steps)
    with start() as eng:
        half = play(eng, steps[:2])
        eng.save_checkpoint(folder, {"at": 2}).wait()
    with start() as eng:
        assert eng.load_checkpoint(folder) == {"at": 2}
        again = play(eng, steps[2:], (half.losses, half.norms))
    return whole, again


FEW = ("the embedding and the head, which are tied",)
"""Case of the grid that is tried by default."""


def train_all(cases: tuple[str, ...], config: dict[str, Any], folder: str) -> dict[str, list[Parity]]:
    """Body of a rank: every one of these cases."""
    found = {}
    for index, case in enumerate(cases):
        runs = train(case, config, str(Path(folder) / str(index)))
        if runs[0].weights:
            alone = train_alone(partial(partly, TRAINED[case]), config, batches(), VerifyOptions())
            found[case] = [Parity(run, alone) for run in runs]
    return found


GRIDS = [
    wide({"pipeline": 2}, 0, tuple(TRAINED), id="pp2"),
    wide({"pipeline": 4}, 0, tuple(TRAINED), id="pp4"),
    wide({"data": 2, "pipeline": 2}, 1, tuple(TRAINED), id="dp2 x pp2, ZeRO 1"),
    wide({"data": 2, "pipeline": 2}, 2, tuple(TRAINED), id="dp2 x pp2, ZeRO 2"),
    pytest.param({"data": 2, "pipeline": 2}, 3, FEW, id="dp2 x pp2, ZeRO 3"),
    wide({"data": 2, "pipeline": 2}, 3, tuple(TRAINED), id="dp2 x pp2, ZeRO 3, all"),
    wide({"data": 2, "pipeline": 4}, 3, tuple(TRAINED), id="dp2 x pp4, ZeRO 3"),
]


@pytest.mark.parametrize(("parallel", "stage", "cases"), GRIDS)
def test_whatever_is_frozen_trains_as_in_one_process(
    run_ranks: RunRanks, tmp_path: Path, parallel: dict[str, int], stage: int, cases: tuple[str, ...]
) -> None:
    config = settings(parallel["pipeline"], parallel=parallel, zero_optimization={"stage": stage})
    config |= {"gradient_clipping": 0.005, "train_batch_size": 8}
    world = parallel.get("data", 1) * parallel["pipeline"]
    found = run_ranks(train_all, world, cases, config, str(tmp_path), seconds=300.0)[0]
    assert tuple(found) == cases
    for case, parities in found.items():
        for parity in parities:
            assert parity.holds(), f"{case}: {parity}"
            assert min(parity.reference.norms) > 0.005, f"{case}: clipping must be active"
            assert any(change > 0 for change in moved(case, parity.engine.weights)), f"{case}: something is trained"


def moved(case: str, weights: dict[str, Tensor]) -> list[float]:
    """How far each weight is from its start."""
    given = partly(TRAINED[case]).state_dict()
    return [float((weights[name] - value).abs().max()) for name, value in given.items()]
