"""``trine check``: every mistake of a configuration that can be found without a model, and what could not be checked.

Without ``activation_checkpointing.save`` it imports no torch, so it answers at once.
"""

from argparse import Namespace
from collections.abc import Iterator

from engine.config import Config, load_config
from engine.config.between import check_plans
from engine.config.sections import check_installed


def check_configuration(options: Namespace) -> None:
    """Print notes, what was not checked, and the verdict.

    Raises:
        ConfigError, PlanError, ScheduleError: the sentence that ``engine.initialize`` would raise.
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
    """Yield what only ``engine.initialize`` can check, because it depends on ranks, model, device or arguments.

    ``sized``: the number of ranks was given.
    """
    parallel = config.parallel
    if not sized:
        yield "whether grid, batch and schedule fit the number of ranks; give --ranks N"
    if parallel.tensor != 1:
        yield f"parallel.tensor {parallel.tensor}: whether the model's layers can be sharded so"
    if parallel.pipeline != 1:
        yield f"parallel.pipeline {parallel.pipeline}: whether the model can be cut so"
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
            yield f"{key}: whether the names are the model's"
    if (every := config.activation_checkpointing.every) is not None:
        yield f"activation_checkpointing.every {every}: whether the model has so many blocks"
    if config.compile:
        yield "compile: whether the model has blocks to compile"
    if config.kernels == "triton":
        yield 'kernels "triton": whether the machine of the run has a GPU and Triton'
    if config.checkpoint.init_from is not None:
        yield "checkpoint.init_from: whether the folder holds weights of the model"
    if config.optimizer is None:
        yield "optimizer null: whether engine.initialize is given optimizer=..."
