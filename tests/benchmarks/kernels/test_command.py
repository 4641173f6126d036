"""The benchmark of kernels: its formulas, verdicts and winners, its patience with what fails, and a tiny run."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels import command
from benchmarks.kernels.cases.case import Case, Cost, Slice, Target, llama
from benchmarks.kernels.cases.lineup import MAKERS, TINY, Order, checked, measured
from benchmarks.kernels.device_process import check_case, make_desk
from benchmarks.kernels.report import Verdict, judge, share
from benchmarks.kernels.trial import EAGER, TRITON
from benchmarks.kernels.tuning import tuned
from benchmarks.kernels.winners import Speedup, propose_winners, speedups, winners_json
from engine.kernels.dispatch import TunedChoice, find_choice, read_choices, shipped_choices
from engine.kernels.gpu.launch_shapes import tiles_for
from tests.kernels.interpreter import repair

CPU = torch.device("cpu")
RATES = {"copy_bytes_per_second": 1e12, "product_flops_per_second": 1e14}
T, H, F, V = 8192, 4096, 14336, 128256


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> None:
    """As tests of kernels have it."""
    repair()


def case_of(operator: str, where: Slice = TINY, dtype: torch.dtype = torch.bfloat16) -> Case:
    return next(iter(MAKERS[operator](where, dtype)))


def found_of(case: Case, **times: tuple[float, float]) -> dict[str, Any]:
    """As ``measure_case`` answers: (forward, backward) seconds by contender."""
    rows: dict[str, Any] = {
        name.replace("_", " "): {
            "seconds": {"forward": forward, "backward": backward, "both": forward + backward},
            "peak_bytes": 1000,
        }
        for name, (forward, backward) in times.items()
    }
    return {"contenders": rows, "accuracy": {"error": 1e-3, "eager_error": 2e-3}}


@pytest.mark.parametrize(
    ("operator", "forward", "backward"),
    [
        ("norm", 4 * T * H, 6 * T * H),
        ("gated", 6 * T * F, 10 * T * F),
        ("rotary", 4 * T * (32 + 8) * 128, 4 * T * (32 + 8) * 128),
        ("cross_entropy", 2 * T * V, 4 * T * V),
        ("adamw", 28 * 500_000_000, 0),
        ("adamw_8bit", 16 * 500_000_000, 0),
        ("squared_norm", 2 * 500_000_000, 0),
    ],
)
def test_bytes_follow_the_formulas(operator: str, forward: int, backward: int) -> None:
    case = case_of(operator, llama("8B", 1))
    assert (case.forward, case.backward or Cost()) == (Cost(forward), Cost(backward))


def test_residual_sums_and_tensor_ranks_count() -> None:
    with_residual = list(MAKERS["norm"](llama("8B", 1), torch.bfloat16))[1]
    assert with_residual.forward == Cost(8 * T * H)
    assert case_of("gated", llama("8B", 8)).forward == Cost(6 * T * F // 8)
    assert case_of("cross_entropy", llama("70B", 4)).both == Cost(6 * T * V // 4)
    assert case_of("adamw", llama("8B", 1), torch.float32).forward == Cost(28 * 500_000_000)  # no second copy


def test_operations_follow_the_formulas() -> None:
    linear = case_of("linear", llama("8B", 1))
    assert (linear.forward.flops, linear.both.flops) == (2 * T * H * F, 6 * T * H * F)
    assert case_of("linear_cross_entropy", llama("8B", 1)).both.flops == 6 * T * H * V


def test_every_row_of_the_table_of_winners_is_decided_by_a_case() -> None:
    cases = measured(Order())
    assert {row for case in cases for row in case.decides} >= {row.operator for row in shipped_choices()}
    assert max(Counter(case.name for case in cases).values()) == 1
    first = [case.operator for case in measured(Order(quick=True))]
    assert [
        case.operator for case in cases[: len(first)]
    ] == first  # the head of every operator before any second slice
    assert not any(case.compiled for case in cases[len(first) :])


@pytest.mark.parametrize("operator", MAKERS)
def test_every_operator_passes_its_check_in_the_interpreter(operator: str) -> None:
    case = checked(operator, torch.bfloat16, "tiny")[0]
    found = check_case(case, CPU)
    assert found["passed"] and 0 <= found["share_of_allowed"] <= 1, found


def test_a_wrong_kernel_fails_its_check() -> None:
    case = case_of("norm")
    wrong = replace(case, ours=lambda kernels: lambda x, weight: case.ours(kernels)(x, weight) * 1.02)
    assert not check_case(wrong, CPU)["passed"]


def test_a_kernel_with_other_bits_the_second_time_fails_its_check() -> None:
    case, calls = case_of("norm", dtype=torch.float32), [0]

    def unsteady(x: Tensor, weight: Tensor) -> Tensor:
        calls[0] += 1
        return case.eager(x, weight) * (1 + calls[0] * 2.0**-23)  # type: ignore[no-any-return]

    found = check_case(replace(case, ours=lambda kernels: unsteady), CPU)
    assert not found["same_bits_twice"] and not found["passed"]


def test_shares_are_of_the_rate_that_the_cost_asks_for() -> None:
    rows, product = case_of("norm"), case_of("linear")
    found = found_of(rows, triton=(2.0, 4.0))
    assert share(rows, found, "forward", RATES) == pytest.approx(2 * 2 * 5 * 24 / 2 / 1e12)
    assert share(product, found, "both", RATES) == pytest.approx(6 * 5 * 24 * 40 / 6 / 1e14)
    assert share(rows, {"error": "no"}, "forward", RATES) is None
    assert share(rows, found, "forward", {"error": "no rates"}) is None  # type: ignore[dict-item]


def test_targets_pass_fail_or_are_open() -> None:
    case = replace(
        case_of("norm"),
        targets=(Target("forward", "copy", 0.5), Target("both", EAGER, 1.0), Target("both", "Liger", 1.0)),
        memory_limit=2000,
    )
    rates = {"copy_bytes_per_second": case.forward.bytes / 0.8}  # a copy of the same bytes takes 0.8 s
    words = [one.word for one in judge(case, found_of(case, triton=(1.0, 1.0), eager=(0.5, 1.0)), rates)]
    assert words == ["pass", "FAIL", "not measured", "pass"]
    assert {one.word for one in judge(case, {"error": "gone"}, rates)} == {"not measured"}
    assert str(Verdict("x", "share", 0.5, 0.9)) == "FAIL: x: share 0.50; at least 0.90"


def test_triton_is_proposed_only_where_it_wins_everywhere() -> None:
    measured_all = [
        Speedup("norm", "bfloat16", 4096, 1.5),
        Speedup("norm", "bfloat16", 8192, 1.5),
        Speedup("norm", "bfloat16", 8192, 0.9),
        Speedup("gated", "bfloat16", 8192, None),
        Speedup("gated", "bfloat16", 8192, 3.0),
        Speedup("linear", "bfloat16", 8192, 1.012),
    ]
    old = [TunedChoice("norm", "NVIDIA H200", "bfloat16", 1, True, 9.0), TunedChoice("norm", "*", "*", 1, True)]
    rows = read_choices(winners_json(propose_winners(measured_all, "NVIDIA H200", old)))
    assert TunedChoice("norm", "NVIDIA H200", "bfloat16", 1, True, 9.0) not in rows
    answers = [find_choice(rows, "norm", device, "bfloat16", width) for device, width in
               (("NVIDIA H200", 4096), ("NVIDIA H200", 9000), ("NVIDIA A100", 4096))]  # fmt: skip
    assert [(row.triton, row.speedup) for row in answers if row] == [(True, 1.5), (False, 0.9), (True, None)]
    for operator in ("gated", "linear"):  # one case failed; within the noise
        lost = find_choice(rows, operator, "NVIDIA H200", "bfloat16", 8192)
        assert lost is not None and not lost.triton


def test_products_are_decided_by_direction_and_wrong_ones_lose() -> None:
    linear = case_of("linear")
    found = {linear.name: found_of(linear, triton=(1.0, 4.0), reference=(2.0, 2.0))}
    assert [(one.operator, one.value) for one in speedups([linear], found, ())] == [
        ("linear", 2.0),
        ("linear_backward", 0.5),
    ]
    assert [one.value for one in speedups([linear], found, {("linear", "bfloat16")})] == [None, None]
    failed = {linear.name: found_of(linear, reference=(1.0, 1.0))}
    failed[linear.name]["contenders"][TRITON] = {"error": "out of memory"}
    assert [one.value for one in speedups([linear], failed, ())] == [None, None]


def test_tuning_tells_what_won() -> None:
    answer = make_desk(Order("cpu"))
    product = answer("tune", "product square")
    shipped = {f"{tile.rows}x{tile.columns}x{tile.depth}" for tile in tiles_for(2, False, (9, 0))}
    for found in product["layouts"].values():
        assert set(found["tflops"]) == shipped | {"torch"} and found["won"] in shipped
    warps = answer("tune", "warps activation")
    assert set(warps["milliseconds_by_factor"]) == {"0.5", "1.0", "2.0"}
    assert set(warps["won"]) == {"forward", "backward"}
    programs = answer("tune", "programs squared_norm")
    assert set(programs["milliseconds_by_programs"]) == {f"{each} programs, warps x 1.0" for each in (2, 4, 8, 16)}
    assert set(programs["won"]) == {"forward"}
    assert "programs norm" in tuned(Order())


class Inline:
    """A worker without a process."""

    def __init__(self, make: Any, arguments: tuple[Any, ...]) -> None:
        self._answer = make(*arguments)

    def ask(self, request: tuple[Any, ...], seconds: float) -> Any:
        return self._answer(*request)

    def close(self) -> None:
        pass


def test_a_tiny_run_writes_table_figures_and_winners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Worker", Inline)
    operators = ["activation", "squared_norm"]
    assert command.main(["--device", "cpu", "--out", str(tmp_path), "--operators", *operators]) == 0
    figures = json.loads((tmp_path / "kernels.json").read_text())
    assert {"about", "checks", "tuned", "rates", "cases", "clocks_after", "seconds", "verdicts"} == set(figures)
    assert figures["about"]["versions"]["torch"] == torch.__version__
    assert {(one["operator"], one["dtype"], one["passed"]) for one in figures["checks"]} == {
        (operator, dtype, True) for operator in operators for dtype in ("bfloat16", "float16", "float32")
    }
    assert set(figures["tuned"]) == {"warps activation", "programs activation", "programs squared_norm"}
    for case in measured(Order("cpu", operators=tuple(operators))):
        own = figures["cases"][case.name]
        assert own["contenders"][TRITON]["seconds"]["both"] > 0 and own["accuracy"]["holds"]
        assert own["contenders"]["torch.compile"]["seconds"]["forward"] > 0
    text = (tmp_path / "kernels.md").read_text()
    assert "says anything about speed" in text and text == capsys.readouterr().out[: len(text)]
    rows = read_choices((tmp_path / "tuned.json").read_text())
    assert {row.operator for row in rows if row.device == "cpu"} == {"activation", "squared_norm"}
    assert set(shipped_choices()) <= set(rows)


@pytest.mark.long
def test_all_operators_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    assert command.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    figures = json.loads((tmp_path / "kernels.json").read_text())
    assert all(one["passed"] for one in figures["checks"])
