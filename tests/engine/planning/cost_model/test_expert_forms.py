"""Cost of shared experts on tensor ranks, whole or cut along their width: the formulas by hand, and the choice."""

from dataclasses import astuple, replace

import pytest

from engine.planning.cost_model.expert_forms import SharedExpertWork
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.workload import ExpertWork

LAYOUT = TrainingLayout(dp=4, tp=2, ep=2, stage=1, microbatches=3)
WORK = SharedExpertWork(tokens=10, width=4, layers=2, work=ExpertWork(1000, 4, 2, 2))
"""960 bytes of rows in a step, 1,000 parameters on an expert rank, and 5/6 of an other rank for each token."""


@pytest.mark.parametrize(
    ("listed", "cut", "wanted"),
    [
        (False, False, (1600, 960 + 4000, 4000, 8000, 90_000)),
        (False, True, (3200, 1920, 2000, 4000, 90_000)),
        (True, False, (3840, 0, 4000, 8000, 180_000)),
        (True, True, (3840, 3840, 2000, 4000, 90_000)),
    ],
)
def test_the_cost_of_a_form_is_that_of_its_formula(listed: bool, cut: bool, wanted: tuple[int, ...]) -> None:
    assert astuple(replace(WORK, listed=listed).cost(LAYOUT, cut)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("tokens", "parameters", "listed", "cut", "reason"),
    [
        (
            1_000,
            1e8,
            False,
            True,
            "440.7 MiB a rank and step cut, 887.9 MiB whole, with even routing; 381.5 MiB",
        ),
        (100_000, 1e8, False, False, "whole, with even routing"),
        (4_000_000, 2e10, False, True, "GiB, which does not fit"),
        (100_000, 1e8, True, True, "whole experts of a list compute each row on every tensor rank"),
        (100_000, 1e4, True, False, "whole, with even routing"),
    ],
)
def test_the_form_is_chosen_by_bytes_and_memory_and_given_with_its_reason(
    tokens: int, parameters: float, listed: bool, cut: bool, reason: str
) -> None:
    work = replace(WORK, tokens=tokens, width=2048, work=ExpertWork(parameters, 4, 2, 2), listed=listed)
    chosen, said = work.choose(LAYOUT, load_gpu("h100"), 8)
    assert chosen == cut and reason in said, said
