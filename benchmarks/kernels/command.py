"""Checks and times every kernel on one GPU, against other libraries and its targets.

    python -m benchmarks kernels --out DIR [--quick] [--minutes 8.5] [--operators NAME..] [--device cpu]

Needs a source checkout, torch and Triton; Liger and others are measured if installed. Writes DIR/kernels.json (all
figures), DIR/kernels.md (the table) and DIR/tuned.json, which may replace kernels/tuned.json. A case that fails is
reported by name and the rest goes on, in a new process if the device is broken; cases beyond the time limit are
reported as not measured. ``--device cpu`` interprets tiny shapes, to test the command.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.budget import Budget
from benchmarks.harness.worker import Worker, WorkerError
from benchmarks.kernels.cases.case import Case, short
from benchmarks.kernels.cases.lineup import DTYPES, MAKERS, Order, measured
from benchmarks.kernels.device_process import make_desk
from benchmarks.kernels.report import failures, judge, losses, table
from benchmarks.kernels.tuning import tuned
from benchmarks.kernels.winners import propose_winners, speedups, winners_json
from engine.kernels.dispatch import shipped_choices

START_SECONDS = 90.0
"""Timeout in seconds of a process's imports and GPU start."""
GRACE_SECONDS = 30.0
"""Seconds of the start beyond the timeout of the first task."""
SHARES = {"check": 0.35, "tune": 0.15}
"""Maximum fraction of the time for checks and tuning; measurements use the rest."""
PATIENCE = {"check": 90.0, "tune": 45.0, "measure": 90.0, "rates": 60.0}
"""Timeout in seconds of one task."""
SAMPLING_SECONDS = 20.0
"""Maximum seconds of samples per case; slow cases get fewer samples."""
NO_TIME = "not measured: no time left"
ATTEMPTS = 3
"""Maximum attempts at a case with contenders that break the device."""

Ask = Callable[..., Any]


class Desk:
    """Client of the device process, which restarts a lost process and returns errors as answers."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._worker: Worker | None = None

    def __call__(self, task: str, *arguments: Any, seconds: float) -> Any:
        """The answer, {"error": ..} or {"broken": the part that broke the device}."""
        try:
            if self._worker is None:
                self._worker = Worker(make_desk, (self._order,))
                self._worker.ask(("clocks",), min(START_SECONDS, seconds + GRACE_SECONDS))
            answer = self._worker.ask((task, *arguments), seconds)
        except WorkerError as error:
            self.close()
            return {"error": f"{task}: {error}"}
        if isinstance(answer, dict) and "broken" in answer:
            self.close()
        return answer

    def close(self) -> None:
        """Ends the device process."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def check_all(operators: Sequence[str], ask: Ask, budget: Budget) -> list[dict[str, Any]]:
    """Checks every operator in every dtype."""
    rows = []
    for dtype in DTYPES:
        for operator in operators:
            what = {"operator": operator, "dtype": short(dtype)}
            rows.append(what | _within(budget, ask, "check", operator, short(dtype)) | what)
    return rows


def measure_all(cases: Sequence[Case], ask: Ask, budget: Budget) -> dict[str, Any]:
    """Measures every case; returns the results by name."""
    return {case.name: _measure(case, ask, budget) for case in cases}


def _measure(case: Case, ask: Ask, budget: Budget) -> dict[str, Any]:
    """Once more without what broke the device."""
    without: dict[str, str] = {}
    answer: dict[str, Any] = {}
    for _ in range(ATTEMPTS):
        seconds = min(SAMPLING_SECONDS, budget.left / 2)
        answer = _within(budget, ask, "measure", case.name, seconds, without)
        if "broken" not in answer:
            return answer
        without[answer["broken"]] = "broke the device"
    return {"error": f"broken by {', '.join(without)}"}


def _within(budget: Budget, ask: Ask, task: str, *arguments: Any) -> dict[str, Any]:
    if not budget.left:
        return {"error": NO_TIME}
    answer: dict[str, Any] = ask(task, *arguments, seconds=min(PATIENCE[task], budget.left + 1))
    return answer


def run(order: Order, minutes: float, ask: Ask) -> dict[str, Any]:
    """Checks, tunes and measures within ``minutes``; returns all results as a JSON object."""
    budget, cases = Budget(60 * minutes), measured(order)
    found: dict[str, Any] = {"about": ask("about", seconds=START_SECONDS)}
    checking = budget.part(SHARES["check"] * budget.seconds)
    found["checks"] = check_all(order.operators, ask, checking)
    tuning = budget.part(SHARES["tune"] * budget.seconds)
    found["tuned"] = {name: _within(tuning, ask, "tune", name) for name in tuned(order)}
    found["rates"] = ask("rates", seconds=min(PATIENCE["rates"], budget.left))
    found["cases"] = measure_all(cases, ask, budget)
    found["clocks_after"] = ask("clocks", seconds=PATIENCE["rates"])
    found["seconds"] = budget.spent
    return found


def conclude(order: Order, found: Mapping[str, Any]) -> tuple[str, dict[str, Any], str]:
    """Returns (Markdown, JSON, proposed ``tuned.json``)."""
    cases, rates = measured(order), found["rates"]
    judged = [] if order.tiny else cases  # tiny shapes on a CPU reach nothing, and shall not
    verdicts = [verdict for case in judged for verdict in judge(case, found["cases"][case.name], rates)]
    wrong = [one for one in found["checks"] if not one.get("passed")]
    names = {(one["operator"], one["dtype"]) for one in wrong}
    device = found["about"].get("device", "unknown")
    winners = propose_winners(speedups(cases, found["cases"], names), device, shipped_choices())
    parts = {
        "Checks": [_check_line(one) for one in found["checks"]],
        "Failures": failures(found["cases"]),
        "Targets": [str(verdict) for verdict in verdicts],
        "Faster than our kernel": losses(found["cases"]),
        "Tuned": [f"{name}: {json.dumps(what)}" for name, what in found["tuned"].items()],
    }
    text = [_head(order, found), table(cases, found["cases"], rates), *(_part(*part) for part in parts.items())]
    figures = dict(found) | {"verdicts": [asdict(one) | {"verdict": one.word} for one in verdicts]}
    return "\n\n".join(text) + "\n", figures, winners_json(winners)


def _head(order: Order, found: Mapping[str, Any]) -> str:
    about, rates = found["about"], found["rates"]
    copy, product = (rates.get(name) for name in ("copy_bytes_per_second", "product_flops_per_second"))
    lines = [
        f"# Kernels on {about.get('device', 'an unknown device')}",
        "",
        f"{about}",
        f"clocks afterwards: {found['clocks_after']}; the run took {found['seconds']:.0f} s.",
        f"Shares are of a copy's {copy / 1e12:.3f} TB/s (read + written), or (*) of {product / 1e12:.1f} TFLOP/s of "
        "torch's bf16 product of random 8192^3." if copy and product else f"no rates, so no shares: {rates}",
        "x: the time of the other, forward and backward, over ours. Medians of interleaved rounds, L2 flushed.",
    ]  # fmt: skip
    if order.tiny:
        lines.append("**Interpreted on a CPU with tiny shapes: no figure here says anything about speed.**")
    return "\n".join(lines)


def _check_line(one: Mapping[str, Any]) -> str:
    what = f"{one['operator']} {one['dtype']}"
    if "cases" not in one:
        return f"FAIL: {what}: {one.get('error', 'broke the device')}"
    bad = [case["case"] for case in one["cases"] if not case["passed"]]
    detail = f", worst error {one['share_of_allowed']:.2f} of what is allowed"
    return f"pass: {what}{detail}" if one["passed"] else f"FAIL: {what}{detail}; {', '.join(bad)}"


def _part(title: str, lines: Sequence[str]) -> str:
    return f"## {title}\n\n" + ("\n".join(f"- {line}" for line in lines) or "none")


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if every check passed and every kernel ran."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description="Kernels beside their peers.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for kernels.json, kernels.md, tuned.json"
    )
    parser.add_argument("--quick", action="store_true", help="the first slice of every operator alone")
    parser.add_argument("--minutes", type=float, default=8.5, help="in all; what does not fit is not measured")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: interpreted, tiny")
    parser.add_argument("--operators", nargs="+", choices=tuple(MAKERS), default=tuple(MAKERS), help="all by default")
    arguments = parser.parse_args(command)
    order = Order(arguments.device, arguments.quick, tuple(arguments.operators))
    if order.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is here; --device cpu runs tiny shapes in Triton's interpreter")
    desk = Desk(order)
    try:
        found = run(order, arguments.minutes, lambda *task, seconds: desk(*task, seconds=seconds))
    finally:
        desk.close()
    text, figures, winners = conclude(order, found)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "kernels.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "kernels.md").write_text(text, encoding="utf-8")
    (arguments.out / "tuned.json").write_text(winners, encoding="utf-8")
    print(text)
    ran = all("seconds" in one.get("contenders", {}).get("triton", {}) for one in found["cases"].values())
    return 0 if ran and all(one.get("passed") for one in found["checks"]) else 1
