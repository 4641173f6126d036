"""Times a training step of models of about 1 B parameters on one GPU: the engine, plain torch and DeepSpeed.

    python -m benchmarks gpu_step --out DIR [--quick] [--minutes 8.5] [--peak-tflops N] [--device cpu]

World size 1, no torchrun. Each contender is a process with the largest microbatch that fits. They run one after
another, or three at a time if those fit ("wave"): built and warmed up together, they train a few steps in turn, in a
new order each round, and profile one step in the end: busy share of the GPU, launches, longest kernels, host waits.
``--models 8b-shape`` is a slice of Llama 8B. Writes DIR/gpu_step.json (every turn) and DIR/gpu_step.md (the table),
with the error of a contender that fails. ``--quick``: two contenders. ``--device cpu`` trains tiny models, to test the
command.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_step.contenders import Contender, Job, make_runner
from benchmarks.gpu_step.models import MODELS, ONE_BILLION, TINY, Sizes, needed_bytes
from benchmarks.gpu_step.report import COMPILED, PLAIN, Row, formula, judge, known_peak, make_row, profiled, table
from benchmarks.harness.budget import Budget
from benchmarks.harness.worker import Worker, WorkerError, last_line
from benchmarks.kernels.roofline import about

CONTENDERS = (
    Contender("engine, kernels auto", "engine"),
    Contender(PLAIN, "torch"),
    Contender("engine, kernels reference", "engine", kernels="reference"),
    Contender("engine, compiled", "engine", compiled=True),
    Contender(COMPILED, "torch", compiled=True),
    Contender("engine, kernels triton", "engine", kernels="triton"),
    Contender("DeepSpeed ZeRO-1", "deepspeed"),
)
"""Contenders in the order of their waves; contenders that are compared are in one wave."""
QUICK = (CONTENDERS[0].name, PLAIN)
MICROBATCHES = (4, 2, 1)
WANTED_AT_ONCE = 3
USABLE_MEMORY = 0.92
"""Usable fraction of a GPU's memory; contexts and fragmentation need the rest."""
PATIENCE_SECONDS = 180.0
"""Timeout in seconds of one answer; first steps compile."""
NO_TIME = "not measured: no time left"


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of steps and turns of each contender."""

    warm_up: int = 3
    rounds: int = 3
    steps: int = 4
    """Number of steps per turn."""


TINY_EFFORT = Effort(1, 1, 2)


@dataclass(frozen=True, slots=True)
class Scale:
    """Number of contenders in memory at once, and the microbatch of all."""

    micro: int
    at_once: int


def choose_scale(sizes: Sizes, memory_bytes: int | None) -> Scale:
    """Returns the largest microbatch that fits one contender, and the number (three or one) that fits at once."""
    if memory_bytes is None:
        return Scale(1, len(CONTENDERS))
    room = USABLE_MEMORY * memory_bytes
    micro = next((micro for micro in MICROBATCHES if needed_bytes(sizes, micro) <= room), MICROBATCHES[-1])
    fit = int(room // needed_bytes(sizes, micro))
    return Scale(micro, fit if fit >= WANTED_AT_ONCE else 1)


def run_wave(jobs: Sequence[Job], effort: Effort, budget: Budget) -> list[dict[str, Any]]:
    """Runs ``jobs`` with all processes in memory at once, timed in turns; returns their results."""
    found: list[dict[str, Any]] = [{"turns": []} for _ in jobs]
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(make_runner, (job,))) for job in jobs]
        for key, request in (("start", ("start",)), ("warm_up", ("steps", effort.warm_up))):
            _ask_all(workers, found, key, request, budget)
        order = random.Random(0)
        for _ in range(effort.rounds):
            for place in order.sample(range(len(jobs)), len(jobs)):
                _turn(workers[place], found[place], effort.steps, budget)
        for worker, one in zip(workers, found, strict=True):
            if "error" not in one and budget.left:
                one["profile"] = _profile(worker, budget)
    return found


def _ask_all(
    workers: Sequence[Worker], found: Sequence[dict[str, Any]], key: str, request: tuple[Any, ...], budget: Budget
) -> None:
    """The same of all at the same time; who fails is asked no more."""
    asked = [(worker, one) for worker, one in zip(workers, found, strict=True) if "error" not in one]
    for worker, one in asked:
        with _noted(one):
            worker.post(request)
    for worker, one in asked:
        if "error" not in one:
            with _noted(one):
                one[key] = worker.receive(min(PATIENCE_SECONDS, budget.left))


def _turn(worker: Worker, one: dict[str, Any], steps: int, budget: Budget) -> None:
    if "error" in one:
        return
    if not budget.left:
        one["error"] = NO_TIME if not one["turns"] else f"{len(one['turns'])} turns: no time left"
        return
    with _noted(one):
        one["turns"].append(worker.ask(("steps", steps), min(PATIENCE_SECONDS, budget.left)))


def _profile(worker: Worker, budget: Budget) -> dict[str, Any]:
    """Ask for a profiled step; its failure spoils no turn."""
    try:
        found: dict[str, Any] = worker.ask(("profile",), min(PATIENCE_SECONDS, budget.left))
    except WorkerError as error:
        return {"error": str(error)}
    return found


@contextmanager
def _noted(one: dict[str, Any]) -> Iterator[None]:
    """An error of a worker inside becomes the error of its answers."""
    try:
        yield
    except WorkerError as error:
        one.update(error=str(error), trace=error.trace)


def run_model(jobs: Sequence[Job], at_once: int, effort: Effort, budget: Budget) -> list[dict[str, Any]]:
    """Runs all jobs, wave by wave, within the time budget; returns their results."""
    waves = [jobs[first : first + at_once] for first in range(0, len(jobs), at_once)]
    found: list[dict[str, Any]] = []
    for number, wave in enumerate(waves):
        share = budget.part(budget.left / (len(waves) - number) * (1.5 if number + 1 < len(waves) else 1.0))
        if not share.left:
            found += [{"error": NO_TIME} for _ in wave]
            continue
        try:
            found += run_wave(wave, effort, share)
        except Exception as error:
            found += [{"error": last_line(error)} for _ in wave]
        print(f"{wave[0].sizes.title}: wave {number + 1} of {len(waves)} after {budget.spent:.0f} s", file=sys.stderr)
    return found


def make_jobs(sizes: Sizes, arguments: argparse.Namespace, scale: Scale) -> list[Job]:
    """Returns one job per contender; DeepSpeed only if installed."""
    names = QUICK if arguments.quick and not arguments.contenders else arguments.contenders
    absent = ["deepspeed"] if find_spec("deepspeed") is None else []
    chosen = [one for one in CONTENDERS if one.kind not in absent and (not names or one.name in names)]
    return [Job(one, sizes, arguments.device, scale.micro, arguments.accumulation) for one in chosen]


def measure(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measures every model; returns rows, verdicts and raw answers as a JSON object."""
    tiny, facts = device.type == "cpu", about(device)
    peak = arguments.peak_tflops * 1e12 if arguments.peak_tflops else known_peak(facts["device"])
    budget, effort = Budget(60 * arguments.minutes), TINY_EFFORT if tiny else Effort()
    models: dict[str, Any] = {}
    chosen = [(TINY if tiny else MODELS)[name] for name in arguments.models or (TINY if tiny else ONE_BILLION)]
    for number, sizes in enumerate(chosen):
        scale = choose_scale(sizes, facts["gpu"].get("memory_bytes"))
        scale = replace(scale, micro=arguments.micro_batch or scale.micro, at_once=arguments.at_once or scale.at_once)
        jobs = make_jobs(sizes, arguments, scale)
        answers = run_model(jobs, scale.at_once, effort, budget.part(budget.left / (len(chosen) - number)))
        rows = [make_row(job, found, peak) for job, found in zip(jobs, answers, strict=True)]
        verdicts = judge(sizes.title, rows, judges_speed=not tiny)
        models[sizes.title] = {
            "sizes": asdict(sizes),
            "scale": asdict(scale),
            "formula": formula(jobs[0], peak),
            "rows": [asdict(row) for row in rows],
            "verdicts": [asdict(verdict) for verdict in verdicts],
            "answers": {job.contender.name: found for job, found in zip(jobs, answers, strict=True)},
            "text": _section(sizes, rows, [formula(jobs[0], peak), *map(str, verdicts), *profiled(jobs, answers)]),
        }
    return {"about": facts, "peak_flops": peak, "effort": asdict(effort), "seconds": budget.spent, "models": models}


def _section(sizes: Sizes, rows: Sequence[Row], lines: Sequence[str]) -> str:
    return "\n\n".join((f"## {sizes.title}", table(rows), "\n".join(f"- {line}" for line in lines)))


def as_text(found: Mapping[str, Any]) -> str:
    """Formats the results as Markdown."""
    facts = found["about"]
    lines = [f"# A training step on {facts['device']}", "", str(facts), f"The run took {found['seconds']:.0f} s."]
    if facts["device"] == "cpu":
        lines.append("**Tiny models on a CPU: no figure here says anything about speed.**")
    return "\n\n".join(["\n".join(lines), *(model["text"] for model in found["models"].values())]) + "\n"


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_step", description="A 1 B step on one GPU.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for gpu_step.json and gpu_step.md"
    )
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--minutes", type=float, default=8.5, help="in all; what does not fit is not measured")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny models")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16, for MFU; known for H100 and H200 SXM")
    parser.add_argument("--accumulation", type=int, default=4, help="microbatches a step")
    parser.add_argument("--micro-batch", type=int, help="sequences of a microbatch; by default what fits")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], help="by default decoder and llama")
    parser.add_argument("--at-once", type=int, help="contenders in memory at once; by default what fits")
    names = [one.name for one in CONTENDERS]
    parser.add_argument("--contenders", nargs="+", metavar="NAME", choices=names, help=f"some of: {'; '.join(names)}")
    arguments = parser.parse_args(command)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is here; --device cpu trains tiny models")
    return arguments


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if losses agree and an engine row has figures for each model."""
    arguments = _parse(command)
    found = measure(arguments, torch.device(arguments.device))
    text = as_text(found)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu_step.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "gpu_step.md").write_text(text, encoding="utf-8")
    print(text)
    models = found["models"].values()
    ran = all(any(r["turns"] and r["contender"].startswith("engine") for r in model["rows"]) for model in models)
    return 0 if ran and all(model["verdicts"][0]["passed"] is not False for model in models) else 1
