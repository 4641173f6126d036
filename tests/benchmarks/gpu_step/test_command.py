"""The benchmark of a step on one GPU: its formulas, verdicts and waves, its patience, and a tiny run on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_step import command
from benchmarks.gpu_step.command import CONTENDERS, choose_scale
from benchmarks.gpu_step.contenders import Contender, Job, make_runner
from benchmarks.gpu_step.models import (
    EIGHT_BILLION_SHAPE,
    ONE_BILLION,
    TINY,
    make_batch,
    make_model,
    mean_loss,
    multiplied_parameters,
    needed_bytes,
    step_flops,
)
from benchmarks.gpu_step.report import BF16_PEAK, COMPILED, PLAIN, Row, formula, judge, make_row, table
from benchmarks.harness.worker import WorkerError

CPU = torch.device("cpu")
GPU_BYTES = 150_754_820_096  # of an H200


def job_of(name: str = "decoder", contender: Contender = CONTENDERS[0]) -> Job:
    return Job(contender, TINY[name], "cpu", 1, 2)


@pytest.mark.parametrize("name", TINY)
def test_multiplied_parameters_are_those_of_all_matrices_but_the_looked_up(name: str) -> None:
    model = make_model(TINY[name], torch.device("meta"))
    looked_up = ("tokens.weight", "positions.weight")
    matrices = {k: p.numel() for k, p in model.named_parameters() if p.ndim == 2 and k not in looked_up}
    assert multiplied_parameters(TINY[name]) == sum(matrices.values())  # the tied head of llama is its embedding


def test_the_large_models_have_about_a_billion_parameters() -> None:
    for sizes in ONE_BILLION.values():
        total = sum(p.numel() for p in make_model(sizes, torch.device("meta")).parameters())
        assert 0.95e9 < total < 1.3e9
        assert sizes.sequence == 4096


def test_operations_are_those_of_the_formula() -> None:
    sizes = TINY["decoder"]
    assert step_flops(sizes, 10) == 10 * (6 * multiplied_parameters(sizes) + 6 * 2 * 32 * 16)
    text = formula(job_of(), BF16_PEAK)
    assert "6 x 26,624 multiplied weights" in text and "MFU over 989.4 TFLOP/s" in text
    assert "--peak-tflops" in formula(job_of(), None)


def found_of(seconds: float, loss: float, turns: int = 2) -> dict[str, Any]:
    turn = {"seconds": seconds, "losses": [9.0, loss], "peak_bytes": 2_000_000_000}
    return {"start": {"start_seconds": 3.0}, "warm_up": {"seconds": 5.0}, "turns": [turn] * turns}


def test_a_row_has_rates_and_mfu() -> None:
    job = job_of()
    row = make_row(job, found_of(0.5, 4.0), 1e9)
    assert row.tokens_per_second == 2 * 16 / 0.5
    assert row.mfu == pytest.approx(step_flops(job.sizes, 32) / 0.5 / 1e9)
    assert (row.loss, row.turns, row.peak_bytes) == (4.0, 2, 2_000_000_000)
    assert make_row(job, found_of(0.5, 4.0), None).mfu is None
    assert make_row(job, {"error": "out of memory"}, 1e9).error == "out of memory"


def test_verdicts_on_losses_speed_and_mfu() -> None:
    def row(name: str, speed: float, loss: float = 4.0, mfu: float | None = None) -> Row:
        return Row("m", name, turns=3, tokens_per_second=speed, loss=loss, mfu=mfu)

    good = [row("engine, kernels auto", 120, mfu=0.55), row(PLAIN, 80), row(COMPILED, 100, 4.01)]
    assert [one.passed for one in judge("m", good, True)] == [True, True, True, True]
    bad = [row("engine, kernels auto", 90, 4.1, 0.45), row(PLAIN, 80), row(COMPILED, 100)]
    assert [one.passed for one in judge("m", bad, True)] == [False, False, True, False]
    assert "engine, kernels auto furthest" in str(judge("m", bad, True)[0])
    lost = [row("engine, kernels auto", 90, float("nan")), row(PLAIN, 80)]
    assert judge("m", lost, False)[0].passed is False
    nothing = [Row("m", "engine, kernels auto", "failed"), row(PLAIN, 80)]
    assert [one.passed for one in judge("m", nothing, True)] == [None, None]
    assert "failed" in table(nothing).splitlines()[2]


def test_microbatch_and_waves_follow_the_memory() -> None:
    for sizes in ONE_BILLION.values():
        scale = choose_scale(sizes, GPU_BYTES)
        assert scale.at_once * needed_bytes(sizes, scale.micro) < GPU_BYTES
        assert scale.micro == 4 and scale.at_once in (1, 3, 4), "three at once or one at a time"
        assert choose_scale(sizes, 80 << 30).micro >= 2 and choose_scale(sizes, 80 << 30).at_once == 1
        assert choose_scale(sizes, 36 << 30).micro == 1
    assert needed_bytes(EIGHT_BILLION_SHAPE, 1) < 0.92 * (80 << 30)
    assert choose_scale(TINY["llama"], None).at_once == len(CONTENDERS)


class Inline:
    """A worker without a process, whose work is done when its answer is asked for."""

    def __init__(self, make: Any, arguments: tuple[Any, ...]) -> None:
        self._make, self._arguments = make, arguments
        self._answer: Any = None
        self._asked: list[tuple[Any, ...]] = []

    def post(self, request: tuple[Any, ...]) -> None:
        self._asked.append(request)

    def receive(self, seconds: float) -> Any:
        request = self._asked.pop(0)
        try:
            self._answer = self._answer or self._make(*self._arguments)
            return self._answer(*request)
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {error}") from error

    def ask(self, request: tuple[Any, ...], seconds: float) -> Any:
        self.post(request)
        return self.receive(seconds)

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Worker", Inline)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("name", TINY)
def test_the_engine_and_the_torch_loop_train_the_same(name: str, inline: None) -> None:
    losses = []
    for contender in (CONTENDERS[0], Contender(PLAIN, "torch")):
        run = make_runner(job_of(name, contender))
        assert run("start")["start_seconds"] > 0
        losses.append(run("steps", 3)["losses"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    assert losses[0][2] < losses[0][0] - 1e-3  # and they learn


def test_the_torch_loop_has_the_gradient_of_the_whole_batch() -> None:
    sizes = TINY["llama"]
    model, batch = make_model(sizes, CPU), make_batch(sizes, 2, CPU)
    whole = mean_loss(model, sizes, batch)
    halves = [mean_loss(model, sizes, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(2)]
    torch.testing.assert_close(whole, torch.stack(halves).mean())


def test_a_tiny_run_writes_table_and_figures(tmp_path: Path, inline: None, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["--device", "cpu", "--quick", "--accumulation", "2", "--out", str(tmp_path), "--peak-tflops", "1"]
    assert command.main(told) == 0
    found = json.loads((tmp_path / "gpu_step.json").read_text())
    assert set(found) == {"about", "peak_flops", "effort", "seconds", "models"} and found["peak_flops"] == 1e12
    for name, model in found["models"].items():
        rows = model["rows"]
        assert [row["contender"] for row in rows] == list(command.QUICK)
        assert all(row["tokens_per_second"] > 0 and row["mfu"] > 0 and row["error"] is None for row in rows)
        assert model["verdicts"][0]["passed"] and name in model["formula"]
        assert all(answer["profile"]["wall_ms"] > 0 for answer in model["answers"].values())
    text = (tmp_path / "gpu_step.md").read_text()
    assert "engine, kernels auto: busy none, 0 launches; the host waits at nothing." in text
    assert "says anything about speed" in text and "| torch |" in text
    assert capsys.readouterr().out.startswith(text)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_contender_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert command.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu_step.json").read_text())
    for model in found["models"].values():
        errors = {row["contender"]: row["error"] for row in model["rows"]}
        assert not any(error for name, error in errors.items() if "DeepSpeed" not in name), errors
