"""Checkpoints that the real DeepSpeed wrote go on here, on its grid and on others, with the losses that it printed."""

import json
from typing import Any

import pytest

from tests.deepspeed.record import BF16, CHECKPOINTS, RECORD, SAVED, UNIVERSAL, printed
from tests.deepspeed.test_scripts import changed
from tests.warm_python import warm_torchrun

TENSOR: dict[str, Any] = {"parallel": {"tensor": 2}, "train_micro_batch_size_per_gpu": 8}
LONG = pytest.mark.long
STAGE_3: dict[str, Any] = {"zero_optimization": {"stage": 3}}


def check(saved: str, origin: str, ranks: int, more: dict[str, Any], warm_python: str) -> None:
    script, config = CHECKPOINTS[origin]
    expected = json.loads(RECORD.read_text(encoding="utf-8"))["continued"][origin][4:]
    place = {"LOAD": str(SAVED / saved)}
    found = printed(changed(script), config | more, ranks, place, warm_torchrun(warm_python))
    assert [word for word, _ in found] == [word for word, _ in expected] == ["loss"] * 3
    bound = 2e-3 if BF16.items() <= config.items() else 1e-5
    assert [number for _, number in found] == pytest.approx([number for _, number in expected], rel=bound)


OFTEN = ("zero3",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in CHECKPOINTS]
)
def test_a_checkpoint_goes_on(name: str, warm_python: str) -> None:
    check(name, name, 2, {}, warm_python)


@pytest.mark.parametrize(
    ("name", "ranks", "more"),
    [
        pytest.param("zero2", 2, TENSOR, id="zero2 on tp2", marks=LONG),
        pytest.param(
            "zero1", 1, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}, id="zero1 on 1", marks=LONG
        ),
        pytest.param("zero1", 2, STAGE_3, id="zero1 at stage 3", marks=LONG),
        pytest.param("zero3", 4, {"parallel": {"tensor": 2}}, id="zero3 on dp2 x tp2", marks=LONG),
        pytest.param("zero3_in_parts", 2, TENSOR, id="parts of zero3 on tp2", marks=LONG),
        pytest.param("bf16_zero3", 2, {"zero_optimization": {"stage": 1}}, id="bf16 of zero3", marks=LONG),
        pytest.param("pipeline", 4, {"parallel": {"tensor": 2}}, id="pipeline x tp2", marks=LONG),
    ],
)
def test_on_another_grid(name: str, ranks: int, more: dict[str, Any], warm_python: str) -> None:
    check(name, name, ranks, more, warm_python)


@pytest.mark.long
@pytest.mark.parametrize("name", UNIVERSAL)
def test_a_universal_checkpoint_goes_on(name: str, warm_python: str) -> None:
    check(f"{name}_universal", name, 2, TENSOR, warm_python)
