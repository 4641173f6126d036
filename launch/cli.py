"""Command line ``trine``. Reading and checking a configuration imports no torch, so it responds at once."""

import json
import os
import select
import signal
import sys
from argparse import PARSER, REMAINDER, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from engine.config import Config, load_config
from engine.config.config_file import OVERRIDES_HELP
from engine.config.grid_rules import check_plans
from engine.config.json_schema import schema
from engine.config.sections import check_installed
from engine.errors import EngineError
from engine.launch import explain_command as explained
from engine.launch import init_command as init
from engine.launch import outer_command as outer
from engine.launch import schedule_command as schedule
from engine.launch import serve_command as serve
from engine.launch import sweep_command as sweep
from engine.launch import watch_command as watch
from engine.launch.doctor import doctor_command as doctor
from engine.launch.jobs import launch_command as jobs
from engine.launch.planner import compile_command as compilation
from engine.launch.planner import plan_request as plan
from engine.launch.verifier import verify_command as verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one ``trine`` command and returns its exit status.

    ``arguments``: the words after ``trine``; None: from ``sys.argv``.
    """
    options = make_parser().parse_args(arguments)
    try:
        code = options.run(options) or 0
        sys.stdout.flush()
        return int(code)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _has_no_reader():  # of a socket, or of a process that the command has started
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return 128 + signal.SIGPIPE


def _has_no_reader() -> bool:
    """Returns True if the process that read the output has ended, as in `trine schema | head`."""
    output = select.poll()
    output.register(sys.stdout, select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))


class CommandParser(ArgumentParser):
    """Argument parser; its errors show the command's usage, and for an unknown option a similar known option.

    Options may stand before, between and after positional arguments, up to ``--``.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses ``args`` as argparse does; exits with a usage error if there are unknown words."""
        if not any(action.nargs in (PARSER, REMAINDER) for action in self._actions):
            args = self._options_first(args)
        found, left = super().parse_known_args(args, namespace)
        if left:
            name = left[0].partition("=")[0]
            near = get_close_matches(name, self._option_string_actions, 1, 0.7) if name.startswith("-") else []
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists its options."
            self.error(f"{name} is not an option of this command; {hint}")
        return found, left

    def _options_first(self, words: Iterable[str]) -> list[str]:
        """Returns the words with options, and their values, before all others."""
        options, others, left = list[str](), list[str](), iter(words)
        for word in left:
            if word == "--":
                others += [word, *left]
            elif not self._is_option(word):
                others.append(word)
            else:
                options += [word, *islice(left, int(self._takes_value(word)))]
        return options + others

    def _is_option(self, word: str) -> bool:
        return word.partition("=")[0] in self._option_string_actions or (word.startswith("-") and " " not in word)

    def _takes_value(self, word: str) -> bool:
        """Returns True if the next word is the value of this option, which may be abbreviated."""
        known = self._option_string_actions
        near = [word] if word in known else [name for name in known if word[:2] == "--" and name.startswith(word)]
        return any(known[name].nargs != 0 for name in near)


def make_parser() -> ArgumentParser:
    """Returns the argument parser of ``trine`` with all of its commands."""
    parser = CommandParser(prog="trine", description="3D-parallel training of unchanged PyTorch models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("schema", help="print the JSON Schema of the configuration")
    command.set_defaults(run=_print_schema)

    command = commands.add_parser("check", help="check a configuration and report all mistakes at once")
    command.add_argument("config", type=Path)
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    sized = "number of processes that the configuration must fit"
    command.add_argument("--ranks", "--world", type=int, default=None, dest="world", metavar="N", help=sized)
    command.set_defaults(run=check_configuration)

    init.add_init_options(commands.add_parser("init", help="write a script and a configuration to start from"))
    _add_ahead_commands(commands)
    command = commands.add_parser("schedule", help="draw a pipeline schedule: order, idle share, memory")
    schedule.add_options(command)
    command.set_defaults(run=schedule.run)

    command = commands.add_parser("launch", help="start a script on this host, over ssh, under Slurm or on Kubernetes")
    jobs.add_launch_options(command)
    command.set_defaults(run=jobs.launch)

    _add_run_commands(commands)
    command = commands.add_parser("doctor", help="check that training would start, and measure the links")
    doctor.add_doctor_options(command)
    command.set_defaults(run=doctor.run_doctor)

    command = commands.add_parser("explain", help="find an error by its words: its cause, its remedy and its place")
    explained.add_explain_options(command)
    command.set_defaults(run=explained.explain)

    command = commands.add_parser("convert", help="convert a checkpoint of another engine to one that any grid loads")
    command.add_argument("folder", type=Path, help="checkpoint of DeepSpeed, torch.distributed.checkpoint or Megatron")
    command.add_argument("out", type=Path, help="folder of a run; a step-N folder is written into it")
    command.add_argument("--weights-only", action="store_true", help="leave out the optimizer")
    command.set_defaults(run=_convert)

    command = commands.add_parser("checkpoint", help="inspect, verify and export checkpoints")
    _add_checkpoint_commands(command.add_subparsers(required=True, metavar="ACTION"))
    return parser


def _add_ahead_commands(commands: "_SubParsersAction[CommandParser]") -> None:
    """Adds the commands on a run before it trains."""
    command = commands.add_parser("plan", help="predict memory, traffic and time of a run, without GPUs or processes")
    plan.add_plan_options(command)
    command.set_defaults(run=_plan)

    command = commands.add_parser("compile", help="compile the kernels of a first step into Triton's cache, before it")
    compilation.add_compile_options(command)
    command.set_defaults(run=compilation.run_compile)

    command = commands.add_parser("verify", help="train a small copy of a model on the grid and alone, and compare")
    verify.add_verify_options(command)
    command.set_defaults(run=verify.run_verify)


def _add_run_commands(commands: "_SubParsersAction[CommandParser]") -> None:
    """Adds the commands on a run, while it trains or later."""
    command = commands.add_parser("watch", help="show the actions of a job's ranks, now or when it hung")
    watch.add_watch_options(command)
    command.set_defaults(run=watch.show_ranks)

    command = commands.add_parser("outer", help="serve the store in which sites of the outer loop meet")
    outer.add_outer_options(command)
    command.set_defaults(run=outer.run_outer)

    command = commands.add_parser("serve", help="serve a model to clients that train it over HTTP")
    serve.add_serve_options(command)
    command.set_defaults(run=serve.run_serve)

    command = commands.add_parser("sweep", help="train a script with many settings, and prune the worst early")
    sweep.add_sweep_options(command)
    command.set_defaults(run=sweep.run_sweep)

    command = commands.add_parser("report", help="write the records of a run's ranks as one page")
    folder = "monitor.report folder of the run, or --out of train.py"
    command.add_argument("folder", type=Path, metavar="RUN", help=folder)
    command.add_argument("--out", type=Path, default=None, metavar="FILE", help="the page (default RUN/report.html)")
    command.set_defaults(run=_report)


def _add_checkpoint_commands(commands: "_SubParsersAction[CommandParser]") -> None:
    folder = "folder of a run (its newest checkpoint), or one of its step-N folders"
    command = commands.add_parser("info", help="print the contents of a checkpoint")
    command.add_argument("folder", type=Path, help=folder)
    command.set_defaults(run=_checkpoint_info)

    command = commands.add_parser("verify", help="read and check every block; damage gives exit status 1")
    command.add_argument("folder", type=Path, help=folder)
    command.add_argument("--all", action="store_true", help="verify all checkpoints of the run")
    command.set_defaults(run=_checkpoint_verify)

    command = commands.add_parser("export", help="verify the model and copy it into a Hugging Face folder")
    command.add_argument("folder", type=Path, help=folder)
    command.add_argument("out", type=Path, help="new or empty folder")
    command.add_argument("--single", action="store_true", help="write one model.safetensors instead of several files")
    command.set_defaults(run=_checkpoint_export)


def _print_schema(options: Namespace) -> None:
    print(json.dumps(schema(), indent=2))


def _plan(options: Namespace) -> None:
    from engine.launch.planner.plan_command import run_plan

    run_plan(options)


def _convert(options: Namespace) -> None:
    from engine.checkpoint.foreign.convert import convert
    from engine.launch.checkpoint_command import info

    info(convert(options.folder, options.out, options.weights_only))


def _report(options: Namespace) -> None:
    from engine.launch.run_report.page import write_report

    write_report(options.folder, options.out)


def _checkpoint_info(options: Namespace) -> None:
    from engine.launch.checkpoint_command import info  # import numpy only here: the other commands do not need it

    info(options.folder)


def _checkpoint_verify(options: Namespace) -> None:
    from engine.launch.checkpoint_command import verify_checkpoint

    verify_checkpoint(options.folder, options.all)


def _checkpoint_export(options: Namespace) -> None:
    from engine.launch.checkpoint_command import export

    export(options.folder, options.out, options.single)


def check_configuration(options: Namespace) -> None:
    """Checks a configuration file without a model or GPU, and prints the result.

    Raises:
        ConfigError, PlanError, ScheduleError: the error that ``engine.initialize`` would raise.
    """
    config = load_config(options.config, options.world, options.overrides)
    check_plans(config.parallel, config.gradient_accumulation_steps)
    check_installed(config.monitor)
    if config.activation_checkpointing.save is not None:
        from engine.parallel.activation_checkpointing.blocks import find_operators

        find_operators(config.activation_checkpointing)  # only torch knows its operators
    for note in config.notes:
        print(f"note: {note}")
    for gap in unchecked(config, options.world is not None):
        print(f"not checked: {gap}")
    print(f"{options.config} is valid" + (f" for {options.world} ranks" if options.world else ""))


def unchecked(config: Config, sized: bool) -> Iterator[str]:
    """Yields a line for each check that only ``engine.initialize`` can make.

    ``sized``: True if the number of ranks is known.
    """
    parallel = config.parallel
    if not sized:
        yield "whether grid, batch and schedule fit the number of ranks; give --ranks N"
    if parallel.tensor != 1:
        yield f"parallel.tensor {parallel.tensor}: whether the model's layers can be sharded this way"
    if parallel.pipeline != 1:
        yield f"parallel.pipeline {parallel.pipeline}: whether the model can be split this way"
    entries = config.optimizer.entries if config.optimizer is not None else ()
    patterns = {
        "parallel.tensor_plan": parallel.tensor != 1 and parallel.tensor_plan != "auto",
        "parallel.split": parallel.pipeline != 1 and parallel.split != "auto",
        "keep_fp32": config.keep_fp32,
        "optimizer.match": config.optimizer is not None and config.optimizer.before,
        "optimizer.no_weight_decay": any(entry.no_weight_decay for entry in entries),
        "optimizer.groups": any(entry.groups for entry in entries),
    }
    for key, given in patterns.items():
        if given:
            yield f"{key}: whether the names match the model"
    if (every := config.activation_checkpointing.every) is not None:
        yield f"activation_checkpointing.every {every}: whether the model has that many blocks"
    if config.compile:
        yield "compile: whether the model has blocks to compile"
    if config.kernels == "triton":
        yield 'kernels "triton": whether the machine of the run has a GPU and Triton'
    if config.checkpoint.init_from is not None:
        yield "checkpoint.init_from: whether the folder has weights of the model"
    if config.optimizer is None:
        yield "optimizer null: whether optimizer=... is passed to engine.initialize"


if __name__ == "__main__":
    sys.exit(main())
