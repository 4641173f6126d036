"""Command ``trine verify MODEL CONFIG`` or ``trine verify train.py``: checks that training equals one process's."""

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config, axis_sizes, load_config, load_raw
from engine.config.config_file import OVERRIDES_HELP, is_override
from engine.errors import ConfigError, EngineError, PlanError, first_line

if TYPE_CHECKING:
    from engine.launch.verifier.script_run import ScriptCall
    from engine.launch.verifier.trials import Subject
    from engine.verify import Parity

BOUNDS = (1e-6, 1e-5, 1e-5)
"""Maximum deviations: relative for losses and norms, absolute for weights."""


def add_verify_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine verify`` to the parser ``command``."""
    command.add_argument("model", metavar="MODEL", help=(
        "Hugging Face folder or config.json, which is shrunk; or module:function that returns model, (model, rows) "
        "or (model, rows, loss_fn), used unchanged; or a script train.py, run up to its call of "
        "engine.initialize, with its arguments after two dashes"
    ))  # fmt: skip
    command.add_argument("config", nargs="?", metavar="CONFIG", help="configuration of the run; not for a script")
    command.add_argument("arguments", nargs="*", metavar="KEY=VALUE | -- ARGUMENTS", help=(
        f"{OVERRIDES_HELP}; or arguments of a script"
    ))  # fmt: skip
    command.add_argument("--world", type=int, help="number of processes, if the configuration does not set it")
    command.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    command.add_argument(
        "--layers",
        type=int,
        help="blocks of a shrunk Hugging Face model (default: 2 per pipeline rank, or one per stage)",
    )
    command.add_argument("--weights", action="store_true", help="print the deviation of every weight")


def run_verify(options: Namespace) -> int:
    """Runs ``trine verify``: compares training on the configured grid and in one process.

    Returns exit status 0 if losses, gradient norms and final weights agree within bounds, otherwise 1.

    Raises:
        EngineError: the model or the configuration is refused.
    """
    with _without_banners():
        return _verify(options)


def _verify(options: Namespace) -> int:
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: give a number of at least 1.")
    if options.model.endswith(".py"):
        return max(_verify_call(options, call) for call in _calls(options))
    if options.config is None:
        raise ConfigError("CONFIG is not given, but a model is verified for a configuration; give its JSON file.")
    if other := [word for word in options.arguments if not is_override(word)]:
        raise ConfigError(
            f"{other[0]} is an argument of a script, but MODEL is {options.model}; leave this argument out."
        )
    asked = _configured(load_raw(options.config, options.arguments), options.world)
    _check_source(options.model)
    from engine.launch.verifier import trials  # imports torch

    config = trials.small_config(asked)
    return _compare(options, _subject(options, config), config)


def _calls(options: Namespace) -> "list[ScriptCall]":
    script = Path(options.model)
    if not script.is_file():
        raise PlanError(f"MODEL {script} does not exist; give the script that calls engine.initialize.")
    from engine.launch.verifier.script_run import calls_of_script

    given = ([] if options.config is None else [options.config]) + options.arguments
    found = calls_of_script(script, given, lambda config: _configured(config, options.world))
    if len(found) > 1:
        print(f"script     calls engine.initialize {len(found)} times; each call is verified separately")
    return found


def _verify_call(options: Namespace, call: "ScriptCall") -> int:
    from engine.launch.verifier import trials

    config = trials.small_config(_configured(call.config, options.world))
    for note in call.notes:
        print(f"note       {note}")
    return _compare(options, trials.of_call(call, options.model, (config.tp, _layers(options, config))), config)


def _configured(config: Any, world: int | None) -> Config:
    return load_config(config, world or _world_of(load_config(config)))


def _compare(options: Namespace, subject: "Subject", config: Config) -> int:
    from engine.launch.verifier import trials

    print(f"model      {subject.words}")
    print(f"run        {_described(config)}; {options.steps} steps of {config.accumulation} microbatches, fp32")
    parity = _trained(options.model, subject, config, options.steps)
    print(f"deviation  {parity}")
    print(
        f"bounds     losses {BOUNDS[0]:.0e} relative, norms {BOUNDS[1]:.0e} relative, weights {BOUNDS[2]:.0e} absolute"
    )
    if options.weights:
        for name, deviation in sorted(parity.weights.items(), key=lambda item: -item[1]):
            print(f"           {deviation:.1e}  {name}")
    if parity.holds(*BOUNDS):
        print("verdict    trains as one process")
        return 0
    print("verdict    DIFFERS from one process; with one feature switched off:")
    for name, other in trials.switched_off(config):
        print(f"           {name:<28}{_verdict(options.model, subject, other, options.steps)}")
    return 1


@contextmanager
def _without_banners() -> Iterator[None]:
    """Silences the engine's log below errors, since banners of toy models are not of interest."""
    logger = logging.getLogger("trine")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _trained(name: str, subject: "Subject", config: Config, steps: int) -> "Parity":
    from engine.launch.verifier import trials

    try:
        return trials.train_both_ways(subject, config, steps)
    except EngineError:
        raise
    except Exception as error:  # the model's own, in its forward
        raise PlanError(
            f"MODEL {name} raises {type(error).__name__} in training: {first_line(error)}; give one that trains on one "
            "process."
        ) from error


def _verdict(name: str, subject: "Subject", config: Config, steps: int) -> str:
    try:
        parity = _trained(name, subject, config, steps)
    except EngineError as error:
        return f"refused: {error}"
    return "equal: it causes the deviation" if parity.holds(*BOUNDS) else f"differs: {parity}"


def _subject(options: Namespace, config: Config) -> "Subject":
    from engine.launch.verifier import trials

    if ":" in options.model:
        return trials.of_function(options.model)
    return trials.of_folder(Path(options.model), config.tp, _layers(options, config))


def _layers(options: Namespace, config: Config) -> int:
    """Returns the number of blocks of a shrunk model."""
    blocks: int = options.layers or config.pp * max(2, config.parallel.virtual_stages)
    return blocks


def _check_source(name: str) -> None:
    if ":" in name:
        return
    path = Path(name)
    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".json"):
        raise PlanError(
            f"MODEL {name} has no config.json; give a Hugging Face folder, its config.json, or module:function."
        )


def _world_of(config: Config) -> int:
    """Returns the world size of a configuration that sets all axes."""
    world = 1
    for axis, size in axis_sizes(config.parallel).items():
        if size == "auto":
            raise ConfigError(f'parallel.{axis} is "auto", which depends on the number of processes; give --world N.')
        world *= size
    return world


def _described(config: Config) -> str:
    words = [f"{config.dp} data x {config.tp} tensor x {config.pp} pipeline ranks as threads"]
    words += [f"{config.parallel.expert} ranks share experts"] if config.parallel.expert > 1 else []
    words += [config.parallel.schedule] if config.pp > 1 else []
    words += ["sequence parallel"] if config.parallel.sequence_parallel and config.tp > 1 else []
    words += [f"ZeRO {config.zero_optimization.stage}"]
    mode = config.activation_checkpointing.mode
    words += ["activations on the host" if mode == "offload" else f"{mode} recomputation"] if mode != "none" else []
    return ", ".join(words)
