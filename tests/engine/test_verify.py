"""The proof itself can fail."""

import math

import torch
from torch import nn

from engine.verify import Parity, TrainingRecord, verify
from tests import models
from tests.engine.parity.test_parity import config_for


def run(*losses: float, weight: float = 0.0) -> TrainingRecord:
    return TrainingRecord(losses, (1.0,) * len(losses), {"w": torch.tensor([0.0, weight])})


def test_deviations_are_found() -> None:
    assert Parity(run(1.0, 2.0), run(1.0, 2.0)).holds()
    assert not Parity(run(1.0, 2.00001), run(1.0, 2.0)).holds()
    assert not Parity(run(1.0, weight=1e-4), run(1.0)).holds()


def test_what_is_not_a_number_never_holds() -> None:
    assert not Parity(run(1.0, math.nan), run(1.0, 2.0)).holds()
    assert not Parity(run(1.0, math.inf), run(1.0, math.inf)).holds()
    assert not Parity(run(1.0, weight=math.nan), run(1.0)).holds()


def test_a_builder_that_sets_no_seed_is_built_alike() -> None:
    def build() -> nn.Module:
        return models.Nano()

    result = verify(build, config_for(1, 0), models.batches_for("nano", 16, 2))
    assert result is not None and result.holds(), str(result)


def test_imaginary_parts_are_compared() -> None:
    runs = [TrainingRecord((1.0,), (1.0,), {"w": torch.tensor([complex(1, part)])}) for part in (0.0, 1e-2)]
    assert Parity(runs[0], runs[0]).holds() and not Parity(*runs).holds()
