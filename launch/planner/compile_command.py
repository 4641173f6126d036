"""Command ``trine compile MODEL CONFIG`` or ``trine compile train.py``: compiles the kernels of a step ahead of it."""

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.config import Config, load_config
from engine.config.config_file import OVERRIDES_HELP
from engine.errors import ConfigError, PlanError
from engine.launch.planner.plan_request import add_sizes, read_request
from engine.planning.cost_model.hardware import load_gpu

if TYPE_CHECKING:
    from engine.build.request import Request
    from engine.kernels.gpu.launch_shapes import GpuShape
    from engine.kernels.gpu.warm_cache import NotedKernel
    from engine.launch.planner.planned_model import PlannedModel
    from engine.launch.verifier.script_run import ScriptCall

_EVERY = 10.0
"""Seconds between two lines of progress."""
_UNUSED = {"nodes": None, "memory": None, "batch": None, "price": None, "top": None, "estimate": True}
"""Options of ``trine plan`` that ``trine compile`` lacks."""


class StepSubject(NamedTuple):
    """Model, configuration and launch options of a training step, for ``trine compile``."""

    planned: "PlannedModel"
    config: Config
    request: "Request"


def add_compile_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine compile`` to the parser ``command``."""
    command.add_argument("model", nargs="?", metavar="MODEL", help=(
        "Hugging Face folder or config.json, or module:function; or a script train.py, run up to its call of "
        "engine.initialize, with its arguments after two dashes; default: the built-in decoder of the sizes below"
    ))  # fmt: skip
    command.add_argument("config", nargs="?", metavar="CONFIG", help="configuration of the run; not for a script")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE | -- ARGUMENTS", help=(
        f"{OVERRIDES_HELP}; or arguments of a script"
    ))  # fmt: skip
    command.add_argument("--world", type=int, default=1, help="number of GPUs (processes) of the run (default 1)")
    command.add_argument("--gpu", help="a100, b200, h100 or h200 (default: the GPU here, else h100)")
    command.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="compiler processes (default: all cores)"
    )
    add_sizes(command)
    command.set_defaults(**_UNUSED)


def run_compile(options: Namespace) -> None:
    """Runs ``trine compile``: compiles the Triton kernels of a training step that are not in Triton's cache.

    Raises:
        EngineError: the model, the configuration or the GPU is refused, or Triton is not installed.
    """
    if options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: give a number of at least 1.")
    name, gpu = _gpu(options.gpu)
    began = time.perf_counter()
    options.gpu = "h100" if options.gpu is None else options.gpu  # its rates are not read
    noted = _noted(options, name, gpu)
    print(f"noted      {len(noted)} kernels that a step launches on {name}, in {time.perf_counter() - began:.1f} s")
    compile_noted(noted, options.processes)


def _gpu(given: str | None) -> "tuple[str, GpuShape]":
    """Returns the name of the GPU in the table of kernels, and its properties that launches depend on."""
    from engine.kernels.dispatch import has_triton, is_interpreted

    if not has_triton() or is_interpreted():
        why = "TRITON_INTERPRET is set; unset it" if has_triton() else "Triton is not installed; install triton"
        raise PlanError(f"trine compile fills Triton's cache with compiled kernels, but {why}.")
    import torch

    from engine.kernels.device import compiles_triton, device_name, find_accelerator
    from engine.kernels.gpu.launch_shapes import GPUS, gpu_shape

    if given is None:
        device = torch.device(find_accelerator() or "cpu")
        if compiles_triton(device) and torch.version.hip is None:
            return device_name(device), gpu_shape(device)
        given = "h100"
    if given.lower() not in GPUS:
        raise ConfigError(f"--gpu {given}: kernels are compiled ahead for {', '.join(sorted(GPUS))}; give one of them.")
    return load_gpu(given).name, GPUS[given.lower()]


def _noted(options: Namespace, name: str, gpu: "GpuShape") -> "list[NotedKernel]":
    return list({kernel: None for subject in _subjects(options) for kernel in note_subject(subject, name, gpu)})


def note_subject(subject: StepSubject, name: str, gpu: "GpuShape") -> "list[NotedKernel]":
    """Returns the distinct Triton kernels that a training step launches on ``gpu``, over all pipeline ranks.

    It makes a dry run with tensor shapes only. ``name``: GPU name in the table of tuned kernel settings.
    """
    from engine.kernels.gpu.warm_cache import noted_launches

    found: dict[NotedKernel, None] = {}
    for rank in _ranks(subject, name):
        with noted_launches(gpu) as seen:
            rank.play()
        found |= seen
    return list(found)


def _subjects(options: Namespace) -> Iterator[StepSubject]:
    from engine.launch.planner.planned_model import build_model

    if options.model is not None and options.model.endswith(".py"):
        yield from _of_script(options)
        return
    asked = read_request(options)
    if asked.config is None:
        raise ConfigError("CONFIG is not given, but it decides the kernels of a step; give its JSON file.")
    print(f"model      {asked.model.words}")
    planned = build_model(asked.model)
    config = load_config(asked.config, asked.world).for_accelerators()
    yield StepSubject(planned, config, planned.request(config))


def _of_script(options: Namespace) -> Iterator[StepSubject]:
    from engine.launch.verifier.script_run import calls_of_script

    script = Path(options.model)
    if not script.is_file():
        raise PlanError(f"MODEL {script} does not exist; give the script that calls engine.initialize.")

    def resolve(config: Any) -> Config:
        return load_config(config, options.world).for_accelerators()

    given = ([] if options.config is None else [options.config]) + options.overrides
    for call in calls_of_script(script, given, resolve):
        yield _of_call(call, options.model, resolve(call.config))


def _of_call(call: "ScriptCall", name: str, config: Config) -> StepSubject:
    from torch import nn

    from engine.launch.planner.planned_model import PlannedModel, first_row
    from engine.models.named_model import build_named
    from engine.program.batch_rows import BatchRows

    rows = call.example if call.rows is None else call.rows
    if rows is None:
        raise PlanError(f"MODEL {name} passes no batch to its engine; pass example_batch to engine.initialize.")
    model = call.model if isinstance(call.model, nn.Module) else build_named(name, call.model)
    rule = BatchRows.of(call.more["whole"], call.example, config.micro)
    planned = PlannedModel(
        model=model, loss_fn=call.loss_fn, row=first_row(rows, rule), styles=None, inputs=call.more["inputs"], rows=rule
    )
    return StepSubject(planned, config, planned.request(config))


def _ranks(subject: StepSubject, name: str) -> Iterator[Any]:
    """Yields one rank of each class of equal pipeline ranks."""
    from engine.dry_run.dry_run_rank import DryRunRank
    from engine.dry_run.rank_forecast import PlannedKernels, RankLikeness

    planned, config, request = subject
    plan = planned.plan(config)
    likeness, seen = RankLikeness(planned.model, plan), set[Any]()
    example = planned.example(config.micro)
    for pp in range(config.pp):
        if (key := likeness.of(pp)) in seen:
            continue
        seen.add(key)
        kernels = PlannedKernels(config.kernels, name)
        yield DryRunRank(planned.model, plan, plan.grid(0).rank_at(pp=pp), request, example, kernels)


def compile_noted(noted: "Sequence[NotedKernel]", processes: int) -> None:
    """Compiles the kernels ``noted`` that are not in Triton's cache, in up to ``processes`` processes."""
    from engine.kernels.gpu.warm_cache import compile_kernel, is_compiled

    if not noted:
        print("compiled   nothing: this configuration launches no kernel of Trine's")
        return
    began = time.perf_counter()
    left = [kernel for kernel in noted if not is_compiled(kernel)]
    there = len(noted) - len(left)
    if not left:
        print(f"compiled   nothing: all {there} are in Triton's cache, {cache_folder()}")
        return
    count = min(processes, len(left))
    printed, seconds = began, 0.0
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        for done, job in enumerate(as_completed([pool.submit(compile_kernel, kernel) for kernel in left]), 1):
            seconds += job.result().seconds
            if time.perf_counter() - printed > _EVERY:
                printed = time.perf_counter()
                print(f"compiled   {done} of {len(left)}", flush=True)
    words = f"{seconds:.1f} s of {count} processes in {time.perf_counter() - began:.1f} s"
    print(f"compiled   {len(left)} kernels, {words}; {there} were in Triton's cache, {cache_folder()}")


def cache_folder() -> str:
    """Returns the folder of Triton's compilation cache."""
    from triton import knobs

    return str(knobs.cache.dir)
