"""Searches tensor plans of published models and plans their runs: one table row for each model.

    python -m benchmarks plan_search [--models llama-70b,gpt-oss-120b] [--write-figures]

Models are built on device meta from the published sizes in ``configurations.json``; nothing is downloaded. Every search
runs on one thread of a new process (about 0.5 GiB for imports), and is compared with the search that draws all numbers
where that takes less than ``--seconds`` and 12 GiB. Then ``trine plan`` finds the fastest layout on the stated number
of GPUs. ``--parts estimate``: CPU seconds of ``trine plan --estimate``.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.figures import record_cells, render_cells
from engine.config import load_config
from engine.launch.cli import main as run_command
from engine.planning.tensor_plan_search import SearchedProgram
from engine.precision.dtypes import make_precision
from engine.program.program import Program

CORNER = "model"
GPU = "h100"
GIB = 2**30
MOST_SECONDS = 120
MOST_BYTES = 12 * GIB
BYTES_OF_ALL = 80
"""Bytes per parameter of the largest block in a search with dense weights: ten float64 copies."""
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("configurations.json").read_text(encoding="utf-8")
)
Cells = dict[tuple[str, str], str]


def main(arguments: Sequence[str]) -> int:
    """Searches and plans each model in a process of its own, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan_search", description=__doc__)
    parser.add_argument("--models", default=",".join(CONFIGURATIONS), help="some of " + ", ".join(CONFIGURATIONS))
    parser.add_argument("--one", choices=TASKS, help="do this for the one model here, and print the result as JSON")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    parser.add_argument("--parts", default=",".join(TASKS), help="do only these of " + ", ".join([*TASKS, "estimate"]))
    parser.add_argument(
        "--seconds", type=int, default=MOST_SECONDS, help="limit of a plan, and of a search with all numbers"
    )
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps(TASKS[asked.one](asked.models)))
        return 0
    cells: Cells = {}
    for name in asked.models.split(","):
        found = cells_of(name, asked.seconds, asked.parts.split(","))
        print(name, *(f"{column} {text};" for (_, column), text in found.items()), flush=True)
        if asked.write_figures:
            record_cells("plan-search", CORNER, found)
        cells |= found
    print(render_cells(CORNER, cells))
    return 0


def cells_of(name: str, seconds: int, parts: Sequence[str]) -> Cells:
    """Measures the columns ``parts`` of a model's row; ``seconds``: CPU time limit of slow ones."""
    gpus, texts = CONFIGURATIONS[name]["gpus"], dict[str, str]()
    if "search" in parts:
        found = _apart(name, "search")
        texts |= _search_texts(found) | (_all_texts(found, name, seconds) if found and "all-numbers" in parts else {})
    if "plan" in parts:
        texts |= _plan_texts(_apart(name, "plan", seconds), seconds) | {f"{GPU}s": f"{gpus:,}"}
    if "estimate" in parts:
        texts["trine plan --estimate"] = f"{_estimate(name):.1f} CPU s"
    return {(name, column): text for column, text in texts.items()}


def _search_texts(found: Mapping[str, Any] | None) -> dict[str, str]:
    if found is None:
        return {"search and proof": f"more than {MOST_SECONDS} s"}
    return {
        "parameters": f"{found['parameters'] / 1e9:.1f} B",
        "largest block": f"{found['largest'] / 1e9:.2f} B",
        "tensor": str(found["tensor"]),
        "search and proof": f"{found['seconds']:.1f} s",
        "peak memory": f"{found['bytes'] / GIB:.1f} GiB",
        "how its groups of layers run": found["plan"],
    }


def _all_texts(found: Mapping[str, Any], name: str, seconds: int) -> dict[str, str]:
    """The search with all numbers beside ``found``, or why it was not run to its end."""
    needed = found["largest"] * BYTES_OF_ALL
    if needed >= MOST_BYTES:
        return {"all numbers drawn": f"not run: about {needed / GIB:.0f} GiB"}
    full = _apart(name, "all-numbers", seconds)
    if full is None:
        return {"all numbers drawn": f"more than {seconds} s"}
    same = "same plan" if full["patterns"] == found["patterns"] else "OTHER PLAN"
    return {"all numbers drawn": f"{full['seconds']:.1f} s, {full['bytes'] / GIB:.1f} GiB, {same}"}


def _plan_texts(plan: Mapping[str, Any] | None, seconds: int) -> dict[str, str]:
    if plan is None:
        return {"fastest layout that fits": f"not planned in {seconds} s"}
    if "refused" in plan:
        return {"fastest layout that fits": plan["refused"]}
    memory = max(rank["total"] for rank in plan["memory_bytes"])
    return {
        "fits": "yes" if plan["fits"] else "no",
        "memory, predicted": f"{memory / GIB:.1f} GiB",
        "step, predicted": f"{plan['step_seconds']:.2f} s",
        "fastest layout that fits": plan["layout"],
    }


def _apart(name: str, task: str, seconds: int = MOST_SECONDS) -> dict[str, Any] | None:
    """The result of a task in a process of its own; None if it takes longer than ``seconds`` of processor time.

    A forked process, so that all of them share the imports of this one.
    """
    import transformers.modeling_utils  # noqa: F401

    import engine.launch.planner.plan_command  # noqa: F401

    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, name, task, seconds))
    process.start()
    there.close()
    try:
        found: dict[str, Any] | None = here.recv()
    except EOFError:
        found = None
    process.join()
    if process.exitcode == 1:
        raise RuntimeError(f"{task} of {name} has failed; see above")
    return found


def _work(there: Connection, name: str, task: str, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 5, seconds + 5))  # building the model takes some of them
    there.send(TASKS[task](name))


def _search(name: str, low_rank: bool = True) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = CONFIGURATIONS[name].get("tensor", 8)
    model = _build(name)
    parallel = {"data": 1, "tensor": ranks}
    config = load_config({"train_batch_size": 8, "parallel": parallel, "optimizer": {"type": "AdamW"}}, ranks)
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    ids = torch.randint(0, 1000, (2, 128), generator=torch.Generator().manual_seed(0))
    begun = time.process_time()
    found = SearchedProgram(program, {"input_ids": ids, "labels": ids}).find_styles(ranks, low_rank=low_rank)
    seconds = time.process_time() - begun
    hows = Counter(f"{reason.style} {reason.how}" for reason in found.reasons)
    blocks = (block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module)
    return {
        "seconds": seconds,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "largest": max(sum(p.numel() for p in block.parameters()) for block in blocks),
        "tensor": ranks,
        "patterns": dict(found.patterns),
        "plan": "; ".join(hows),
    }


def _plan(name: str) -> dict[str, Any]:
    """What ``trine plan`` says, or the sentence by which it refuses."""
    one, told, refused = CONFIGURATIONS[name], io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(one["config"]), encoding="utf-8")
        sizes = ("--world", str(one["gpus"]), "--gpu", GPU, "--context", str(one["context"]))
        begun = time.process_time()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(refused):
            status = run_command(["plan", folder, *sizes, "--json"])
    if status:
        return {"refused": refused.getvalue().strip()}
    found: dict[str, Any] = json.loads(told.getvalue())
    return found | {"seconds of the plan": time.process_time() - begun}


def _estimate(name: str) -> float:
    """Processor seconds of ``trine plan --estimate`` in a fresh process with an empty cache, imports included."""
    one = CONFIGURATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(one["config"]), encoding="utf-8")
        sizes = ("--world", str(one["gpus"]), "--gpu", GPU, "--context", str(one["context"]))
        code = "import sys; from engine.launch.cli import main; sys.exit(main(sys.argv[1:]))"
        environment = os.environ | {"TRINE_CACHE": folder, "OMP_NUM_THREADS": "1"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", code, "plan", folder, *sizes, "--estimate", "--json"],
            env=environment, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _build(name: str) -> nn.Module:
    import transformers

    given = dict(CONFIGURATIONS[name]["config"])
    (architecture,) = given.pop("architectures")
    configuration = transformers.AutoConfig.for_model(**given, use_cache=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, architecture)(configuration)
            return model
    finally:
        torch.set_default_dtype(before)


TASKS = {"search": _search, "all-numbers": lambda name: _search(name, low_rank=False), "plan": _plan}
"""Function that a separate process runs for a model, by name."""
