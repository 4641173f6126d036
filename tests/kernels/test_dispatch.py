"""Choices of kernels: one line in the run's log after its first step, details at debug level."""

import logging

import pytest
import torch

import engine
from engine.kernels import dispatch
from engine.kernels.dispatch import Kernels, TunedChoice

TABLE = (
    TunedChoice("norm", "*", "*", 1, True),
    TunedChoice("gated", "*", "*", 1, True),
    TunedChoice("linear", "*", "*", 1, False),
    TunedChoice("linear", "NVIDIA H100*", "bfloat16", 64, False, 0.8),
    TunedChoice("norm", "NVIDIA H100*", "bfloat16", 64, True, 1.3),
)
UNMEASURED = (
    "not measured on this GPU, so by the default table: norm, gated: triton; linear: torch; "
    "`python -m benchmarks kernels` measures"
)
MEASURED = "measured on this GPU: norm: triton; linear: torch; not in the table: rotary: torch"


@pytest.mark.parametrize(("card", "summary"), [("NVIDIA A100", UNMEASURED), ("NVIDIA H100 80GB", MEASURED)])
def test_choices_are_one_line_and_each_is_logged_once_at_debug_level(
    card: str, summary: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "runs_triton", lambda device: True)
    monkeypatch.setattr(dispatch.logger, "propagate", True)
    kernels, x = Kernels("auto", TABLE), torch.zeros(2, 128, dtype=torch.bfloat16)
    kernels.card = card
    assert kernels.summary() == ""
    with caplog.at_level(logging.DEBUG, "trine"):
        for operator in ("norm", "linear", "gated" if summary == UNMEASURED else "rotary") * 2:
            kernels.triton(operator, x, 128)
    assert kernels.summary() == summary
    assert {record.levelno for record in caplog.records} == {logging.DEBUG} and len(caplog.records) == 3
    times = ", measured 1.30x torch" * (summary == MEASURED)
    assert caplog.messages[0] == f"kernels: norm, bfloat16, width 128: triton{times}"


def test_a_run_logs_its_choices_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Kernels, "summary", lambda self: "as configured: norm: triton")
    eng = engine.initialize(torch.nn.Linear(2, 1), {"train_batch_size": 2}, loss_fn=lambda output, target: output.sum())
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            eng.train_batch((torch.ones(2, 2), torch.ones(2)))
    assert caplog.messages.count("kernels: as configured: norm: triton") == 1
    eng.close()
